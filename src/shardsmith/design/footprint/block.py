"""One transformer layer, forward and backward, in bytes: the tensors of `engine/models/decoder.py` in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shardsmith.design.footprint import drops
from shardsmith.design.footprint.attention import Attended, Attention, Fused, Products, Three
from shardsmith.design.footprint.experts import Mixture, Routed, Rows
from shardsmith.design.footprint.latent import Latents, LatentTape
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
    latents: Latents | None = None
    cut: Piece | None = None
    """what attention gave back without its padding, where values are narrower than queries"""
    routed: Routed | None = None
    """of a mixture of experts; `mlp` and `inner` are then those of the shared expert"""
    shared: list[Piece] = field(default_factory=list)
    """the shared expert's output and its gate, where it has one"""


class Block:
    """A layer of stage `gradients`, its weights named `layers.INDEX...`; those of experts are in `routed`.

    What stays as long as the graph of a pass is added to `graph`, for the stage to free.
    """

    def __init__(
        self, tape: Tape, sizes: Sizes, gradients: Gradients, routed: Gradients | None, rows: Rows | None, layer: int
    ) -> None:
        self.tape, self.sizes, self.gradients, self.layer = tape, sizes, gradients, layer
        self.model, self.recompute = sizes.setup.model, sizes.setup.plan.recompute
        self.graph: list[Piece] = []
        self.mixture: Mixture | None = None
        self.mlp, self.inner = "mlp", sizes.inner
        if self.model.is_sparse(layer):
            assert self.model.experts is not None, "a sparse layer has experts"
            assert routed is not None, "a stage with a sparse layer has experts"
            assert rows is not None, "rows of experts are stated"
            self.mixture = Mixture(tape, sizes, gradients, routed, rows, layer)
            self.mlp, self.inner = "mlp.shared", sizes.shared
        self.latent = LatentTape(tape, sizes, gradients, layer) if self.model.latent else None
        fused = self.model.norm == "layernorm"
        wide, narrow = sizes.wide, sizes.narrow
        self.attention = _attention(tape, sizes)
        self.norm = Norm(rows=sizes.rows, width=self.model.hidden, narrow=narrow, wide=wide, fused=fused)
        self.values = sizes.queries if self.latent is None else self.latent.values
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
            kept = Kept(x=x, routed=kept.routed)
        elif self.recompute == "selective":
            self.tape.free(*kept.entering, kept.inner)
            kept.entering, kept.inner = [], None
            if self.mixture is not None and kept.routed is not None:
                self.mixture.forget_inner(kept.routed)
        if around is not None:
            kept.around = self.tape.hold(around)
        return out, kept

    def backward(self, kept: Kept, grad: Piece, later: Later | None) -> Piece:
        """`grad` [rows, hidden] of the output is taken over; returns that of the input.

        Weight gradients are computed on the way, or put off into `later`.
        """
        around, full, dense = kept.around, None, self.mixture is None
        if self.recompute == "full":
            # Whatever is asked for first makes the layer again: a mask, or else the last product's input.
            full = self._leave_backward(grad, kept) if dense and not self.model.dropout else None
            self.graph += kept.routed.route if kept.routed is not None else []
            kept, _ = self._forward(kept.x, stop=True)
            kept.around = around
            if self.mixture is not None and kept.routed is not None:
                self.mixture.reroute(kept.routed)
        if self.mixture is not None:
            by_inner = self._mixture_backward(kept, self.mixture, self._undropped(kept, grad), later)
        else:
            by_inner = self._mlp_backward(kept, full or self._leave_backward(grad, kept), later)
        grad = self._norm_backward(2, grad, *by_inner)
        full = self._leave_backward(grad, kept)
        return self._norm_backward(1, grad, *self._attention_backward(kept, full, later))

    def _forward(self, x: Piece, *, stop: bool = False) -> tuple[Kept, Piece | None]:
        """With `stop`, what recomputation needs: up to the last product, but not its closing sum."""
        tape, s, kept = self.tape, self.sizes, Kept(x=x)
        self._norm(kept, x)
        kept.attention = self.attention.forward(self._projected(kept))
        if self.values != s.queries:
            kept.cut = tape.new(self.values)
        left = self._left(self.model.output_bias)
        tape.free(*kept.attention.loose)
        x = self._residual(self._dropped(kept, left))
        self._norm(kept, x)
        if self.mixture is not None:
            left = self._mixture_forward(kept, self.mixture)
        else:
            self._mlp_forward(kept)
            if stop and not self.model.dropout:
                tape.free(tape.new(s.gathered))
                return kept, None
            left = self._left(self.model.mlp_bias)
        if stop:
            tape.free(self._dropped(kept, left))
            return kept, None
        return kept, self._residual(self._dropped(kept, left))

    def _projected(self, kept: Kept) -> Three:
        """Queries, keys and values as attention takes them."""
        tape, s = self.tape, self.sizes
        if self.latent is not None:
            kept.latents, qkv = self.latent.forward()
            return qkv
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
        return q, k, v

    def _mlp_forward(self, kept: Kept) -> None:
        """Up to the product that leaves."""
        full = self._gathered(kept.entering[1])
        kept.mlp = [self.tape.new(self.inner) for _ in range(1 + self.model.gated)]
        self.tape.free(full)
        kept.inner = self.tape.new(self.inner)

    def _mixture_forward(self, kept: Kept, mixture: Mixture) -> Piece:
        """A mixture of experts, its shared expert beside the dispatch."""
        tape, spec = self.tape, mixture.spec
        kept.routed = mixture.send(kept.entering[1])
        shared: Piece | None = None
        if spec.shared_ffn:
            self._mlp_forward(kept)
            shared = self._left(self.model.mlp_bias)
            if spec.shared_gate:
                kept.shared = [shared, tape.new(self.sizes.rows * self.sizes.narrow)]
                shared = tape.new(self.sizes.hidden)
        else:
            tape.free(kept.entering.pop())  # the router holds it
        out = mixture.compute(kept.routed)
        if shared is None:
            return out
        both = tape.new(self.sizes.hidden)
        tape.free(out, shared)
        return both

    def _mixture_backward(
        self, kept: Kept, mixture: Mixture, grad: Piece, later: Later | None
    ) -> tuple[Piece, Piece, Piece]:
        """Back through a mixture of experts: the gradient of its input, and what the norm ahead kept.

        `grad` is taken over.
        """
        tape, s, routed = self.tape, self.sizes, kept.routed
        assert routed is not None, "a layer that routed"
        shared = tape.hold(grad) if mixture.spec.shared_ffn else None
        travelling = mixture.back(routed, grad, later)
        found: Piece | None = None
        if shared is not None:
            found = self._shared_backward(kept, shared, later)
        by_routed = mixture.home(routed, travelling, self._again)
        self.graph += routed.route
        if found is None:
            return by_routed, *kept.norms[1]
        both = tape.new(s.hidden)
        tape.free(found, by_routed)
        return both, *kept.norms[1]

    def _shared_backward(self, kept: Kept, grad: Piece, later: Later | None) -> Piece:
        """Back through the shared expert, and its gate; `grad` is taken over."""
        tape, s = self.tape, self.sizes
        gated = None
        if kept.shared:
            ungated = tape.new(s.hidden)
            tape.free(tape.new(s.hidden), *kept.shared)
            gated = tape.new(s.hidden)
            if not kept.entering:
                tape.free(self._again())
            self.gradients.accumulated(self._name("mlp.shared_gate") + ".weight")
            tape.free(grad)
            grad = ungated
        full = self._spread(grad)
        found, _, _ = self._mlp_backward(kept, full, later)
        if gated is not None:
            both = tape.new(s.hidden)
            tape.free(found, gated)
            found = both
        return found

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
        return self._spread(self._undropped(kept, grad))

    def _undropped(self, kept: Kept, grad: Piece) -> Piece:
        """The gradient of what a block half adds to its input; `grad` stays with the residual stream."""
        own = self.tape.hold(grad)
        return drops.dropped_backward(self.tape, kept.drops.pop(), own) if kept.drops else own

    def _spread(self, grad: Piece) -> Piece:
        """`grad` [rows, hidden], which is taken over, for all tokens."""
        if not self.sizes.scattered:
            return grad
        full = self.tape.new(self.sizes.gathered)
        self.tape.free(grad)
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
        tape = self.tape
        inner = kept.inner or tape.new(self.inner)
        grad = tape.new(self.inner)
        self._weights([f"{self.mlp}.down"], [inner], [full], later, bias=self.model.mlp_bias, sums=True)
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

    def _attention_backward(self, kept: Kept, full: Piece, later: Later | None) -> tuple[Piece, Piece, Piece]:
        tape, s = self.tape, self.sizes
        assert kept.attention is not None, "the layer has attended"
        grad = tape.new(self.values)
        left = kept.cut or tape.hold(kept.attention.out)
        self._weights(["attention.o"], [left], [full], later, bias=self.model.output_bias, sums=True)
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
            return by_latent, *kept.norms[0]
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
        if self.latent is not None and kept.latents is not None:
            self.latent.forget(kept.latents)
        if self.mixture is not None and kept.routed is not None:
            self.mixture.forget(kept.routed)
        assert kept.attention is not None, "the layer has attended"
        attended = [kept.attention.out, *kept.attention.kept, kept.cut]
        self.tape.free(scale, x2, scale2, *kept.entering, *raw, *attended, *kept.mlp, kept.inner, *kept.drops)
        self.tape.free(*kept.shared)


def _attention(tape: Tape, sizes: Sizes) -> Attention:
    """How the layers of a plan attend."""
    if sizes.setup.plan.context > 1:
        return Ring(tape, sizes)
    if sizes.setup.model.attention_dropout:
        return Products(tape, sizes, masked=sizes.mask > 0)
    return Fused(tape, sizes)
