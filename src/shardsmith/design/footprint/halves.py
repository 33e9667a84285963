"""A layer that takes the halves of a microbatch in turn, in bytes: one is computed while the other is summed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardsmith.design.footprint import drops
from shardsmith.design.footprint.block import Behind, Block, Kept, Later
from shardsmith.design.footprint.reductions import Gradients
from shardsmith.design.footprint.sizes import Sizes
from shardsmith.design.footprint.tape import Piece, Tape

Leaving = tuple[Piece, Piece | None]


@dataclass
class KeptHalves:
    """What is kept of both halves; where all is made again, only the input `x`."""

    x: Piece
    halves: list[Kept]
    around: Piece | None = None


class Twice:
    """Gradients that come once for each half: products are added, and autograd hands over the sum of the others."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients, self._once = gradients, set[str]()

    def product(self, name: str) -> None:
        """See `Gradients`."""
        self.gradients.product(name, last=self._again(name))

    def accumulated(self, name: str) -> None:
        """See `Gradients`."""
        if self._again(name):
            self.gradients.accumulated(name)

    def _again(self, name: str) -> bool:
        """Whether `name` comes for the second time."""
        self._once ^= {name}
        return name not in self._once


class Halves:
    """Layer `layer`, of two halves of a microbatch; see `Block`."""

    def __init__(self, tape: Tape, sizes: Sizes, gradients: Gradients, layer: int) -> None:
        self.tape, self.sizes, self.layer = tape, sizes, layer
        self.half = Block(tape, replace(sizes, halves=2), Twice(gradients), layer)
        self.model, self.recompute = sizes.setup.model, sizes.setup.plan.recompute

    def forward(self, x: Piece, around: Piece | None) -> tuple[Piece, KeptHalves]:
        """See `Block.forward`."""
        tape = self.tape
        halves, out = self._forward(stop=False)
        assert out is not None, "the layer runs to its end"
        kept = KeptHalves(x=x, halves=halves)
        if self.recompute == "full":
            kept.halves = []
        else:
            tape.free(x)
            if self.recompute == "selective":
                for half in halves:
                    tape.free(*half.entering, half.inner)
                    half.entering, half.inner = [], None
        if around is not None:
            kept.around = tape.hold(around)
        return out, kept

    def backward(self, kept: KeptHalves, grad: Piece, later: Later | None) -> Piece:
        """See `Block.backward`; autograd takes the second half first."""
        tape = self.tape
        ahead: list[Leaving] = []
        again = self.recompute == "full"
        if again and self.model.dropout:
            kept.halves = self._again(kept)
        for number in (1, 0):
            ahead.append(self._arrive_backward(grad, kept.halves[number] if kept.halves else None))
        if again and not self.model.dropout:
            # It is the last product of the half that comes first which asks for its input, with its gradient at hand.
            (full, sent), *others = ahead
            tape.free(sent)
            ahead = [(full, None), *others]
            kept.halves = self._again(kept)
        if not again and kept.around is not None:
            for half in kept.halves:
                half.around = tape.hold(kept.around)
            tape.free(kept.around)
        order = [kept.halves[1], kept.halves[0]]
        behind = []
        for half, (full, sent) in zip(order, ahead, strict=True):
            tape.free(sent)
            behind.append(self.half.mlp_backward(half, full, later, apart=self._apart))
        tape.hold(grad)
        left = [self._between(half, grad, late, later) for half, late in zip(order, behind, strict=True)]
        halves = [self.half.norm_backward(1, own, late) for own, late in left]
        if again:
            tape.free(kept.x)
        wholes = []
        for half_grad in halves:
            wholes.append(tape.new(self.sizes.hidden))
            tape.free(half_grad)
        out = tape.new(self.sizes.hidden)
        tape.free(*wholes)
        return out

    @property
    def _apart(self) -> bool:
        """Whether gradients of the rows of a half, which is a part of a whole, do not lie together."""
        return not (self.half.sizes.scattered or self.half.sizes.sequences == 1 or self.model.dropout)

    def _between(self, half: Kept, grad: Piece, behind: Behind, later: Later | None) -> tuple[Piece, Behind]:
        """Back through the second norm and attention of a half."""
        own = self.half.norm_backward(2, grad, behind)
        full = self.half.leave_backward(own, half, "attention.o" if self.model.output_bias else None)
        return own, self.half.attention_backward(half, full, later)

    def _arrive_backward(self, grad: Piece, half: Kept | None) -> tuple[Piece, Piece | None]:
        """The gradient of a half's last product, on its way; and what is sent, where that is not it itself."""
        tape, s = self.tape, self.half.sizes
        own, dropped = tape.hold(grad), half is not None and half.drops
        if half is not None and half.drops:
            own = drops.dropped_backward(tape, half.drops.pop(), own, s.hidden)
        if self.model.mlp_bias:
            self.half.gradients.accumulated(f"layers.{self.layer}.mlp.down.bias")
        if s.scattered:
            if not dropped:  # a half of a whole does not lie together
                tape.free(own)
                own = tape.new(s.hidden)
            return tape.new(s.gathered), own
        return own, None

    def _again(self, kept: KeptHalves) -> list[Kept]:
        halves, _ = self._forward(stop=True)
        for half in halves:
            half.around = None if kept.around is None else self.tape.hold(kept.around)
        self.tape.free(kept.around)
        return halves

    def _forward(self, *, stop: bool) -> tuple[list[Kept], Piece | None]:
        """With `stop`, what recomputation needs: up to the last half's last product, or the mask behind it."""
        tape, block, s = self.tape, self.half, self.half.sizes
        keeps = stop or self.recompute != "full"
        halves = [Kept(x=tape.new(s.hidden)) for _ in range(2)]
        flying: list[Leaving] = []
        for half in halves:
            attended = block.attend(half, half.x)
            flying.append(block.started())
            tape.free(*attended.loose)
            if not keeps:
                block.drop_attention(half)
        for half in halves:
            out, sent = flying.pop(0)
            tape.free(sent)
            added = block.dropped(half, block.biased(out, self.model.output_bias))
            block.activate(half, block.residual(added))
            if not (stop and half is halves[1] and not self.model.dropout):
                flying.append(block.started())
            if not keeps:
                block.drop_mlp(half)
        if stop and not self.model.dropout:
            tape.free(tape.new(s.gathered))
        whole = self._closed(halves, flying, stop=stop)
        for half in [] if keeps else halves:
            tape.free(half.x, half.norms[1][0], *half.drops)
        return halves, whole

    def _closed(self, halves: list[Kept], flying: list[Leaving], *, stop: bool) -> Piece | None:
        """Both halves with what their MLPs add, side by side; what these made is held until then."""
        tape, block, made = self.tape, self.half, [out for out, _ in flying]
        if len(flying) == len(halves):
            for half, (out, sent) in zip(halves, flying, strict=True):
                tape.free(sent)
                added = block.dropped(half, block.biased(tape.hold(out), self.model.mlp_bias))
                made.append(block.residual(added))
        else:
            tape.free(*(sent for _, sent in flying))
        whole = None if stop else tape.new(self.sizes.hidden)
        tape.free(*made)
        return whole
