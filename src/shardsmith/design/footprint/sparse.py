"""A layer whose MLP is a mixture of experts, in bytes; the shared expert is computed beside the dispatch."""

from __future__ import annotations

from shardsmith.design.footprint import drops
from shardsmith.design.footprint.block import Behind, Block, Kept, Later
from shardsmith.design.footprint.experts import Mixture, Rows
from shardsmith.design.footprint.reductions import Gradients
from shardsmith.design.footprint.sizes import Sizes
from shardsmith.design.footprint.tape import Piece, Tape


class SparseBlock(Block):
    """A layer with experts, whose gradients are in `routed`, and to which `rows` travel; see `Block`."""

    def __init__(
        self, tape: Tape, sizes: Sizes, gradients: Gradients, routed: Gradients, rows: Rows, layer: int
    ) -> None:
        super().__init__(tape, sizes, gradients, layer)
        self.mixture = Mixture(tape, sizes, gradients, routed, rows, layer)
        self.mlp, self.inner = "mlp.shared", sizes.shared

    def forward(self, x: Piece, around: Piece | None) -> tuple[Piece, Kept]:
        """See `Block.forward`."""
        out, kept = super().forward(x, around)
        if self.recompute == "selective" and kept.routed is not None:
            self.mixture.forget_inner(kept.routed)
        return out, kept

    def backward(self, kept: Kept, grad: Piece, later: Later | None) -> Piece:
        """See `Block.backward`."""
        if self.recompute == "full":
            around = kept.around
            self.graph += kept.routed.route if kept.routed is not None else []
            kept = self._made_again(kept)
            kept.around = around
            if kept.routed is not None:
                self.mixture.reroute(kept.routed)
        own = self.tape.hold(grad)
        if kept.drops:
            own = drops.dropped_backward(self.tape, kept.drops.pop(), own, self.sizes.hidden)
        grad = self.norm_backward(2, grad, self._mixture_backward(kept, own, later))
        full = self.leave_backward(grad, kept, "attention.o" if self.model.output_bias else None)
        return self.norm_backward(1, grad, self.attention_backward(kept, full, later))

    def drop_mlp(self, kept: Kept) -> None:
        """See `Block.drop_mlp`; indices of the route stay."""
        super().drop_mlp(kept)
        if kept.routed is not None:
            self.mixture.forget(kept.routed)
        self.tape.free(*kept.shared)

    def _second_half(self, kept: Kept, x: Piece, *, stop: bool) -> Piece:
        """Norm and mixture, whole even where they are made again: what is kept last is all but the end."""
        tape, spec = self.tape, self.mixture.spec
        self._norm(kept, x)
        kept.routed = self.mixture.send(kept.entering[1])
        shared: Piece | None = None
        if spec.shared_ffn:
            self._mlp_entered(kept)
            shared = self._left(self.inner, self.model.mlp_bias)
            if spec.shared_gate:
                kept.shared = [shared, tape.new(self.sizes.rows * self.sizes.narrow)]
                shared = tape.new(self.sizes.hidden)
        else:
            tape.free(kept.entering.pop())  # the router holds it
        out = self.mixture.compute(kept.routed)
        if shared is None:
            return out
        both = tape.new(self.sizes.hidden)
        tape.free(out, shared)
        return both

    def _mixture_backward(self, kept: Kept, grad: Piece, later: Later | None) -> Behind:
        """Back through the mixture: the gradient of its input, and what the norm ahead kept; `grad` is taken over."""
        tape, routed = self.tape, kept.routed
        assert routed is not None, "a layer that routed"
        shared = tape.hold(grad) if self.mixture.spec.shared_ffn else None
        travelling = self.mixture.back(routed, grad, later)
        found = None if shared is None else self._shared_backward(kept, shared, later)
        by_routed = self.mixture.home(routed, travelling, self._again)
        self.graph += routed.route
        if found is not None:
            both = tape.new(self.sizes.hidden)
            tape.free(found, by_routed)
            by_routed = both
        return (by_routed, []), kept.norms[1]

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
        (found, sent), _ = self.mlp_backward(kept, self._spread(grad, None), later)
        found = self._arrived(found, sent)
        if gated is not None:
            both = tape.new(s.hidden)
            tape.free(found, gated)
            found = both
        return found
