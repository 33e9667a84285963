"""One transformer layer, forward and backward, in bytes: the tensors of `engine/models/decoder.py` in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shardsmith.design.footprint import drops
from shardsmith.design.footprint.attention import Attended, Attention, Fused, Products
from shardsmith.design.footprint.norms import Norm
from shardsmith.design.footprint.reductions import Gradients
from shardsmith.design.footprint.ring import Ring
from shardsmith.design.footprint.sizes import Sizes
from shardsmith.design.footprint.tape import Piece, Tape

Later = list[Callable[[], object]]
"""Weight gradients that are put off: each frees what it was kept for."""


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


class Block:
    """A layer of stage `gradients`, its weights named `layers.INDEX...`."""

    def __init__(self, tape: Tape, sizes: Sizes, gradients: Gradients, layer: int) -> None:
        self.tape, self.sizes, self.gradients, self.layer = tape, sizes, gradients, layer
        self.model, self.recompute = sizes.setup.model, sizes.setup.plan.recompute
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
            self._drop(kept)
            kept = Kept(x=x)
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
            full = None if self.model.dropout else self._leave_backward(grad, kept)
            kept, _ = self._forward(kept.x, stop=True)
            kept.around = around
        full = full or self._leave_backward(grad, kept)
        grad = self._norm_backward(2, grad, *self._mlp_backward(kept, full, later))
        full = self._leave_backward(grad, kept)
        return self._norm_backward(1, grad, *self._attention_backward(kept, full, later))

    def _forward(self, x: Piece, *, stop: bool = False) -> tuple[Kept, Piece | None]:
        """With `stop`, what recomputation needs: up to the last product, but not its closing sum."""
        tape, s, kept = self.tape, self.sizes, Kept(x=x)
        self._norm(kept, x)
        full = self._gathered(kept.entering[0])
        q, k, v = tape.new(s.queries), tape.new(s.keys), tape.new(s.keys)
        tape.free(full)
        if self.model.qk_norm:
            (q2, q_scale), (k2, k_scale) = self.q_norm.forward(tape), self.k_norm.forward(tape)
            kept.raw = [(q, q_scale), (k, k_scale)]
            q, k = q2, k2
        if self.model.positions == "rope":
            turned = tape.new(s.queries), tape.new(s.keys)
            tape.free(q, k)
            q, k = turned
        kept.attention = self.attention.forward((q, k, v))
        left = self._left(self.model.output_bias)
        tape.free(*kept.attention.loose)
        x = self._residual(self._dropped(kept, left))
        self._norm(kept, x)
        full = self._gathered(kept.entering[1])
        kept.mlp = [tape.new(s.inner) for _ in range(1 + self.model.gated)]
        tape.free(full)
        kept.inner = tape.new(s.inner)
        if stop:
            if self.model.dropout:
                tape.free(self._dropped(kept, self._left(self.model.mlp_bias)))
            else:
                tape.free(tape.new(s.gathered))
            return kept, None
        return kept, self._residual(self._dropped(kept, self._left(self.model.mlp_bias)))

    def _norm(self, kept: Kept, x: Piece) -> None:
        out, scale = self.norm.forward(self.tape)
        kept.norms.append((x, scale))
        kept.entering.append(out)

    def _left(self, bias: bool) -> Piece:
        """What leaves a row-parallel product: summed over the tensor ranks, then its bias."""
        out = self.tape.new(self.sizes.gathered)
        if self.sizes.scattered:
            part = self.tape.new(self.sizes.hidden)
            self.tape.free(out)
            out = part
        if bias:
            biased = self.tape.new(self.sizes.hidden)
            self.tape.free(out)
            out = biased
        return out

    def _dropped(self, kept: Kept, left: Piece) -> Piece:
        """What a block half adds to its input, some of it dropped."""
        if not self.model.dropout:
            return left
        out, mask = drops.dropped(self.tape, self.sizes.rows, self.model.hidden, self.sizes.hidden)
        self.tape.free(left)
        kept.drops.append(mask)
        return out

    def _residual(self, added: Piece) -> Piece:
        out = self.tape.new(self.sizes.hidden)
        self.tape.free(added)
        return out

    def _gathered(self, entering: Piece) -> Piece:
        """The input of a column-parallel product, of all tokens."""
        return self.tape.new(self.sizes.gathered) if self.sizes.scattered else self.tape.hold(entering)

    def _leave_backward(self, grad: Piece, kept: Kept) -> Piece:
        """The gradient of a row-parallel product; `grad` stays with the residual stream."""
        tape = self.tape
        own = tape.hold(grad)
        if kept.drops:
            own = drops.dropped_backward(tape, kept.drops.pop(), own)
        if not self.sizes.scattered:
            return own
        full = tape.new(self.sizes.gathered)
        tape.free(own)
        return full

    def _norm_backward(self, number: int, grad: Piece, inner: Piece, x: Piece, scale: Piece) -> Piece:
        """Back through a norm; its input gradient is added to `grad`, which came around half the block.

        Gains come last: autograd hands them over when all else has arrived.
        """
        by_norm = self.norm.backward(self.tape)
        self.tape.free(inner, x, scale)
        out = self.tape.new(self.sizes.hidden)
        self.tape.free(grad, by_norm)
        for kind in ("weight", "bias") if self.norm.fused else ("weight",):
            self.gradients.accumulated(f"{self._name(f'norm{number}')}.{kind}")
        return out

    def _mlp_backward(self, kept: Kept, full: Piece, later: Later | None) -> tuple[Piece, Piece, Piece]:
        tape, s = self.tape, self.sizes
        inner = kept.inner or tape.new(s.inner)
        grad = tape.new(s.inner)
        self._weights(["mlp.down"], [inner], [full], later, bias=self.model.mlp_bias, sums=True)
        if self.model.gated:
            product = tape.new(s.inner)
            by_gate = tape.new(s.inner)
            tape.free(product)
            grads = [by_gate, tape.new(s.inner)]
        else:
            grads = [tape.new(s.inner)]
        tape.free(grad, *kept.mlp)
        names = ["mlp.gate", "mlp.up"] if self.model.gated else ["mlp.up"]
        return self._entering_backward(kept, 1, names, grads, later, bias=self.model.mlp_bias)

    def _attention_backward(self, kept: Kept, full: Piece, later: Later | None) -> tuple[Piece, Piece, Piece]:
        tape, s = self.tape, self.sizes
        assert kept.attention is not None, "the layer has attended"
        grad, out = tape.new(s.queries), tape.hold(kept.attention.out)
        self._weights(["attention.o"], [out], [full], later, bias=self.model.output_bias, sums=True)
        grads = list(self.attention.backward(kept.attention, grad))
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
    ) -> tuple[Piece, Piece, Piece]:
        """Back through column-parallel products: the gradient of their input, and what the norm ahead kept."""
        tape, s = self.tape, self.sizes
        entering = kept.entering[at] if kept.entering else self._again()
        grad = tape.new(s.gathered)
        if s.scattered:
            part = tape.new(s.hidden)
            tape.free(grad)
            grad = part
        self._weights(names, [entering], grads, later, bias=bias, sums=False)
        return grad, *kept.norms[at]

    def _again(self) -> Piece:
        """The output of a norm, made again."""
        out, scale = self.norm.forward(self.tape)
        self.tape.free(scale)
        return out

    def _weights(
        self, names: list[str], inputs: list[Piece], grads: list[Piece], later: Later | None, *, bias: bool, sums: bool
    ) -> None:
        """Weight gradients of products of one input; frees it and the output gradients, now or when they are due.

        A product that leaves through a sum (`sums`) has its whole input here, others gather it.
        """

        def compute() -> None:
            full = self.tape.new(self.sizes.gathered) if self.sizes.scattered and not sums else None
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

    def _drop(self, kept: Kept) -> None:
        """Let go of everything but the layer's input."""
        (_, scale), (x2, scale2) = kept.norms
        raw = [piece for pair in kept.raw for piece in pair]
        assert kept.attention is not None, "the layer has attended"
        attended = [kept.attention.out, *kept.attention.kept]
        self.tape.free(scale, x2, scale2, *kept.entering, *raw, *attended, *kept.mlp, kept.inner, *kept.drops)


def _attention(tape: Tape, sizes: Sizes) -> Attention:
    """How the layers of a plan attend."""
    if sizes.setup.plan.context > 1:
        return Ring(tape, sizes)
    if sizes.setup.model.attention_dropout:
        return Products(tape, sizes, masked=sizes.mask > 0)
    return Fused(tape, sizes)
