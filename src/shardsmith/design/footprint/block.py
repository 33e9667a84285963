"""One transformer layer, forward and backward, in bytes: the tensors of `engine/models/decoder.py` in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from shardsmith.design.footprint import chunks, drops
from shardsmith.design.footprint.attention import Attended, Attention, Fused, Products, Three
from shardsmith.design.footprint.experts import Routed
from shardsmith.design.footprint.latent import Latents, LatentTape
from shardsmith.design.footprint.norms import Norm
from shardsmith.design.footprint.ring import Ring
from shardsmith.design.footprint.sizes import Sizes
from shardsmith.design.footprint.tape import Piece, Tape

Later = list[Callable[[], object]]
"""Weight gradients that are put off: each frees what it was kept for."""


Arriving = tuple[Piece | None, list[Piece]]
"""An input gradient, None where it comes in chunks; and what is sent of it."""

Behind = tuple[Arriving, tuple[Piece, Piece]]
"""What comes back to a norm: the gradient of its output; and its input and scale."""


@dataclass
class Kept:
    """What one layer keeps of one microbatch for its backward pass."""

    x: Piece
    norms: list[tuple[Piece, Piece]] = field(default_factory=list)
    """input and scale of each norm"""
    entering: list[Piece] = field(default_factory=list)
    """inputs of the products behind the norms"""
    raw: list[tuple[Piece, Piece]] = field(default_factory=list)
    """queries and keys ahead of their norms, and those norms' scales"""
    attention: Attended | None = None
    drops: list[Piece] = field(default_factory=list)
    """masks of what attention and the MLP add, where something is dropped"""
    mlp: list[Piece] = field(default_factory=list)
    """up, and gate where there is one"""
    inner: Piece | None = None
    around: Piece | None = None
    """cosines and sines, and places where they are remade, one for all layers of a pass"""
    latents: Latents | None = None
    cut: Piece | None = None
    """what attention gave back without its padding, where values are narrower than queries"""
    routed: Routed | None = None
    """of a mixture of experts; `mlp` and `inner` are then those of the shared expert"""
    shared: list[Piece] = field(default_factory=list)
    """the shared expert's output and its gate, where it has one"""


class Arrivals(Protocol):
    """Where gradients of a stage arrive (`Gradients`)."""

    def product(self, name: str) -> None:
        """The weight gradient of a product."""

    def accumulated(self, name: str) -> None:
        """A gradient that autograd makes and hands over."""


class Block:
    """A layer of stage `gradients`, its weights named `layers.INDEX...`.

    What stays as long as the graph of a pass is added to `graph`, for the stage to free.
    """

    def __init__(self, tape: Tape, sizes: Sizes, gradients: Arrivals, layer: int) -> None:
        self.tape, self.sizes, self.gradients, self.layer = tape, sizes, gradients, layer
        self.model, self.recompute = sizes.setup.model, sizes.setup.plan.recompute
        self.graph: list[Piece] = []
        self.mlp, self.inner = "mlp", sizes.inner
        self.latent = LatentTape(tape, sizes, gradients, layer) if self.model.latent else None
        self.values = sizes.queries if self.latent is None else self.latent.values
        fused = self.model.norm == "layernorm"
        wide, narrow = sizes.wide, sizes.narrow
        self.attention = _attention(tape, sizes)
        self.norm = Norm(rows=sizes.rows, width=self.model.hidden, narrow=narrow, wide=wide, fused=fused)
        self.q_norm, self.k_norm = (
            Norm(rows=sizes.all_rows * heads, width=self.model.head_dim, narrow=narrow, wide=wide, fused=False)
            for heads in (sizes.heads, sizes.kv_heads)
        )

    def forward(self, x: Piece, around: Piece | None) -> tuple[Piece, Kept]:
        """`x` [rows, hidden] is taken over; returns the output and what is kept, `around` included."""
        kept, out = self._forward(x)
        assert out is not None, "the layer runs to its end"
        if self.recompute == "full":
            self.drop(kept)
            kept = Kept(x=x, routed=kept.routed)
        elif self.recompute == "selective":
            self.tape.free(*kept.entering, kept.inner)
            kept.entering, kept.inner = [], None
        if around is not None:
            kept.around = self.tape.hold(around)
        return out, kept

    def backward(self, kept: Kept, grad: Piece, later: Later | None) -> Piece:
        """`grad` [rows, hidden] of the output is taken over; returns that of the input.

        Weight gradients are computed on the way, or put off into `later`.
        """
        around, full = kept.around, None
        if self.recompute == "full":
            # Whatever is asked for first makes the layer again: a mask, or else the last product's input.
            full = None if self.model.dropout else self._mlp_left(grad, kept)
            kept = self._made_again(kept)
            kept.around = around
        full = full or self._mlp_left(grad, kept)
        grad = self.norm_backward(2, grad, self.mlp_backward(kept, full, later))
        full = self.leave_backward(grad, kept, "attention.o" if self.model.output_bias else None)
        return self.norm_backward(1, grad, self.attention_backward(kept, full, later))

    def _made_again(self, kept: Kept) -> Kept:
        """What is kept of a layer of which there was only the input."""
        return self._forward(kept.x, stop=True)[0]

    def _forward(self, x: Piece, *, stop: bool = False) -> tuple[Kept, Piece | None]:
        """With `stop`, what recomputation needs: up to the last product, but not its closing sum."""
        tape, kept = self.tape, Kept(x=x)
        attended = self.attend(kept, x)
        left = self._left(self.values, self.model.output_bias)
        tape.free(*attended.loose)
        out = self._second_half(kept, self.residual(self.dropped(kept, left)), stop=stop and not self.model.dropout)
        if out is None:
            return kept, None
        out = self.dropped(kept, out)
        if stop:
            tape.free(out)
            return kept, None
        return kept, self.residual(out)

    def _second_half(self, kept: Kept, x: Piece, *, stop: bool) -> Piece | None:
        """Norm and MLP; None where they `stop` ahead of the closing sum."""
        s = self.sizes
        self.activate(kept, x)
        if stop:
            self.tape.free(chunks.left(self.tape, s, s.inner) if s.chunked else self.tape.new(s.gathered))
            return None
        return self._left(s.inner, self.model.mlp_bias)

    def attend(self, kept: Kept, x: Piece) -> Attended:
        """Norm and attention, up to the product that leaves it."""
        self._norm(kept, x)
        kept.attention = self.attention.forward(self._projected(kept))
        if self.values != self.sizes.queries:
            kept.cut = self.tape.new(self.values)
        return kept.attention

    def _projected(self, kept: Kept) -> Three:
        """Queries, keys and values as attention takes them."""
        tape, s = self.tape, self.sizes
        if self.latent is not None:
            kept.latents, qkv = self.latent.forward()
            return qkv
        q, k, v = self._entered(kept.entering[0], [s.queries, s.keys, s.keys])
        if self.model.qk_norm:
            (q2, q_scale), (k2, k_scale) = self.q_norm.forward(tape), self.k_norm.forward(tape)
            kept.raw = [(q, q_scale), (k, k_scale)]
            q, k = q2, k2
        if self.model.positions == "rope":
            turned = tape.new(s.queries), tape.new(s.keys)
            tape.free(q, k)
            q, k = turned
        return q, k, v

    def activate(self, kept: Kept, x: Piece) -> None:
        """Norm and MLP, up to the product that leaves it."""
        self._norm(kept, x)
        self._mlp_entered(kept)

    def _mlp_entered(self, kept: Kept) -> None:
        kept.mlp = self._entered(kept.entering[1], [self.inner] * (1 + self.model.gated))
        kept.inner = self.tape.new(self.inner)

    def _norm(self, kept: Kept, x: Piece) -> None:
        out, scale = self.norm.forward(self.tape)
        kept.norms.append((x, scale))
        kept.entering.append(out)

    def _left(self, given: int, bias: bool) -> Piece:
        """What leaves a row-parallel product of `given` bytes: summed over the tensor ranks, then its bias."""
        if self.sizes.chunked:
            return self.biased(chunks.left(self.tape, self.sizes, given), bias)
        out, sent = self.started()
        self.tape.free(sent)
        return self.biased(out, bias)

    def started(self) -> tuple[Piece, Piece | None]:
        """What leaves a row-parallel product, on its way; and what is sent, where that is not it itself."""
        full = self.tape.new(self.sizes.gathered)
        return (self.tape.new(self.sizes.hidden), full) if self.sizes.scattered else (full, None)

    def biased(self, out: Piece, bias: bool) -> Piece:
        """With a bias added, where there is one."""
        if not bias:
            return out
        biased = self.tape.new(self.sizes.hidden)
        self.tape.free(out)
        return biased

    def dropped(self, kept: Kept, left: Piece) -> Piece:
        """What a block half adds to its input, some of it dropped."""
        if not self.model.dropout:
            return left
        out, mask = drops.dropped(self.tape, self.sizes.rows, self.model.hidden, self.sizes.hidden)
        self.tape.free(left)
        kept.drops.append(mask)
        return out

    def residual(self, added: Piece) -> Piece:
        """The residual stream with what a block half adds, which is taken over."""
        out = self.tape.new(self.sizes.hidden)
        self.tape.free(added)
        return out

    def _entered(self, entering: Piece, outs: list[int]) -> list[Piece]:
        """Column-parallel products of all tokens."""
        tape, s = self.tape, self.sizes
        if s.scattered and s.chunked:
            return chunks.entered(tape, s, outs)
        full = tape.new(s.gathered) if s.scattered else tape.hold(entering)
        made = [tape.new(size) for size in outs]
        tape.free(full)
        return made

    def _mlp_left(self, grad: Piece, kept: Kept) -> Piece:
        return self.leave_backward(grad, kept, "mlp.down" if self.model.mlp_bias else None)

    def leave_backward(self, grad: Piece, kept: Kept, biased: str | None) -> Piece:
        """The gradient of a row-parallel product (or `biased` one), unless it is gathered by chunks.

        `grad` stays with the residual stream.
        """
        tape = self.tape
        own = tape.hold(grad)
        if kept.drops:
            own = drops.dropped_backward(tape, kept.drops.pop(), own, self.sizes.hidden)
        return self._spread(own, biased)

    def _spread(self, own: Piece, biased: str | None) -> Piece:
        tape = self.tape
        if biased is not None:
            self.gradients.accumulated(self._name(biased) + ".bias")
        if not self.sizes.scattered or self.sizes.chunked:
            return own
        full = tape.new(self.sizes.gathered)
        tape.free(own)
        return full

    def _row_parallel_backward(self, name: str, inner: Piece, full: Piece, later: Later | None) -> Piece:
        """The gradient of a product's input `inner`, which is taken over with the gradient `full` of its output."""
        own = None
        if self.sizes.scattered and self.sizes.chunked:
            own = full
            full, grad = chunks.left_backward(self.tape, self.sizes, inner.size)
        else:
            grad = self.tape.new(inner.size)
        self._weights([name], [inner], [full], later, bias=False)
        self.tape.free(own)
        return grad

    def norm_backward(self, number: int, grad: Piece, behind: Behind) -> Piece:
        """Back through a norm; its input gradient is added to `grad`, which came around half the block.

        Gains come last: autograd hands them over when all else has arrived.
        """
        (inner, sent), (x, scale) = behind
        inner = self._arrived(inner, sent)
        by_norm = self.norm.backward(self.tape)
        self.tape.free(inner, x, scale)
        out = self.tape.new(self.sizes.hidden)
        self.tape.free(grad, by_norm)
        for kind in ("weight", "bias") if self.norm.fused else ("weight",):
            self.gradients.accumulated(f"{self._name(f'norm{number}')}.{kind}")
        return out

    def mlp_backward(self, kept: Kept, full: Piece, later: Later | None, *, apart: bool = False) -> Behind:
        """Back through the MLP; `apart`: the rows of the gradient `full` of its output do not lie together."""
        tape = self.tape
        inner = kept.inner or tape.new(self.inner)
        if apart:
            rows = tape.new(self.sizes.hidden)
            tape.free(full)
            full = rows
        grad = self._row_parallel_backward(f"{self.mlp}.down", inner, full, later)
        if self.model.gated:
            product = tape.new(self.inner)
            by_gate = tape.new(self.inner)
            tape.free(product)
            grads = [by_gate, tape.new(self.inner)]
        else:
            grads = [tape.new(self.inner)]
        tape.free(grad, *kept.mlp)
        names = [f"{self.mlp}.{part}" for part in (("gate", "up") if self.model.gated else ("up",))]
        return self._entering_backward(kept, 1, names, grads, later, bias=self.model.mlp_bias)

    def attention_backward(self, kept: Kept, full: Piece, later: Later | None) -> Behind:
        """Back through attention, from the gradient `full` of its output."""
        tape, s = self.tape, self.sizes
        assert kept.attention is not None, "the layer has attended"
        left = kept.cut or tape.hold(kept.attention.out)
        grad = self._row_parallel_backward("attention.o", left, full, later)
        if kept.cut is not None:
            padded = tape.new(s.queries)
            tape.free(grad)
            grad = padded
        grads = list(self.attention.backward(kept.attention, grad))
        if self.latent is not None:
            assert kept.latents is not None, "latents were kept"
            entering = kept.entering[0] if kept.entering else self._again()
            by_latent = self.latent.backward(kept.latents, entering, grads, later, self._weights)
            tape.free(kept.around)
            return (by_latent, []), kept.norms[0]
        if self.model.positions == "rope":
            for at, size in ((1, s.keys), (0, s.queries)):
                turned = tape.new(size)
                tape.free(grads[at])
                grads[at] = turned
        tape.free(kept.around)
        if self.model.qk_norm:
            for at, norm, name in ((1, self.k_norm, "k_norm"), (0, self.q_norm, "q_norm")):
                by_norm = norm.backward(tape)
                self.gradients.accumulated(self._name(f"attention.{name}") + ".weight")
                tape.free(grads[at], *kept.raw[at])
                grads[at] = by_norm
        names = ["attention.q", "attention.k", "attention.v"]
        return self._entering_backward(kept, 0, names, grads, later, bias=self.model.attention_bias)

    def _entering_backward(
        self, kept: Kept, at: int, names: list[str], grads: list[Piece], later: Later | None, *, bias: bool
    ) -> Behind:
        """Back through column-parallel products: the gradient of their input, and what the norm ahead kept."""
        tape, s = self.tape, self.sizes
        entering = kept.entering[at] if kept.entering else self._again()
        again = tape.new(s.gathered) if s.scattered and s.beside and later is None else None
        found = self._input_gradient([g.size for g in grads])
        if not s.beside:
            found = self._arrived(*found), []
        self._weights(names, [entering], grads, later, bias=bias, again=again, gathers=s.scattered)
        return found, kept.norms[at]

    def _input_gradient(self, grads: list[int]) -> Arriving:
        """From output gradients of sizes `grads`, summed over the tensor ranks; and what is sent (None: in chunks)."""
        if self.sizes.chunked:
            return None, chunks.entered_backward(self.tape, self.sizes, grads)
        full = self.tape.new(self.sizes.gathered)
        return (self.tape.new(self.sizes.hidden), [full]) if self.sizes.scattered else (full, [])

    def _arrived(self, grad: Piece | None, sent: list[Piece]) -> Piece:
        """The gradient, complete, from chunks where there is none yet."""
        whole = grad or self.tape.new(self.sizes.hidden)
        self.tape.free(*sent)
        return whole

    def _again(self) -> Piece:
        """The output of a norm, made again."""
        out, scale = self.norm.forward(self.tape)
        self.tape.free(scale)
        return out

    def _weights(
        self,
        names: list[str],
        inputs: list[Piece],
        grads: list[Piece],
        later: Later | None,
        *,
        bias: bool,
        again: Piece | None = None,
        gathers: bool = False,
    ) -> None:
        """Weight gradients of products of one input; frees it and the output gradients, now or when they are due.

        Where it `gathers` the input is gathered, unless it is there `again` already.
        """

        def compute() -> None:
            full = self.tape.new(self.sizes.gathered) if gathers and again is None else again
            for name in names:
                self.gradients.product(self._name(name) + ".weight")
            self.tape.free(full, *inputs, *grads)

        if later is None:
            compute()
        else:
            later.append(compute)
        for name in names if bias else ():
            self.gradients.accumulated(self._name(name) + ".bias")

    def _name(self, part: str) -> str:
        return f"layers.{self.layer}.{part}"

    def drop(self, kept: Kept) -> None:
        """Let go of everything but the layer's input."""
        self.drop_attention(kept)
        (_, _), (x, _) = kept.norms
        self.drop_mlp(kept)
        self.tape.free(x, *kept.drops)

    def drop_attention(self, kept: Kept) -> None:
        """Let go of what attention was made from, but for the layer's input."""
        assert kept.attention is not None, "the layer has attended"
        raw = [piece for pair in kept.raw for piece in pair]
        if self.latent is not None and kept.latents is not None:
            self.latent.forget(kept.latents)
        self.tape.free(kept.norms[0][1], kept.entering[0], *raw, kept.attention.out, *kept.attention.kept, kept.cut)

    def drop_mlp(self, kept: Kept) -> None:
        """Let go of what the MLP was made from, but for its input."""
        self.tape.free(kept.norms[1][1], *kept.entering[1:], *kept.mlp, kept.inner)


def _attention(tape: Tape, sizes: Sizes) -> Attention:
    """How the layers of a plan attend."""
    if sizes.setup.plan.context > 1:
        return Ring(tape, sizes)
    if sizes.setup.model.attention_dropout:
        return Products(tape, sizes, masked=sizes.mask > 0)
    return Fused(tape, sizes)
