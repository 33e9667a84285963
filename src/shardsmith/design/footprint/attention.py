"""Attention over a whole sequence in bytes: in a fused kernel, or, with dropped probabilities, by plain products."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from shardsmith.design.footprint import drops
from shardsmith.design.footprint.sizes import Sizes
from shardsmith.design.footprint.tape import Piece, Tape

Three = tuple[Piece, Piece, Piece]
"""Queries, keys and values, or their gradients."""


@dataclass
class Attended:
    """What attention leaves: its output, what it `kept` for its backward pass, what is held until the block is left."""

    out: Piece
    kept: list[Piece]
    loose: list[Piece] = field(default_factory=list)


class Attention(Protocol):
    """Attention of a layer."""

    def forward(self, qkv: Three) -> Attended:
        """Takes over `qkv`."""

    def backward(self, attended: Attended, grad: Piece) -> Three:
        """Takes over what was kept, one hold of the output, and its gradient `grad`."""


@dataclass(frozen=True)
class Fused:
    """A kernel that keeps queries, keys, values, its output and the logarithms of the sums of exponentials."""

    tape: Tape
    sizes: Sizes

    def forward(self, qkv: Three) -> Attended:
        """See `Attention`."""
        out = self.tape.new(self.sizes.queries)
        return Attended(out, [*qkv, self.tape.new(self.sizes.log_sums)])

    def backward(self, attended: Attended, grad: Piece) -> Three:
        """See `Attention`."""
        tape, s = self.tape, self.sizes
        grads = tape.new(s.queries), tape.new(s.keys), tape.new(s.keys)
        tape.free(grad, *attended.kept, attended.out)
        return grads


@dataclass(frozen=True)
class Products:
    """Plain products with all probabilities in memory, some of which are dropped (`Attention._dropping`).

    `masked`: the stage has a mask already, else each layer makes one that is causal.
    """

    tape: Tape
    sizes: Sizes
    masked: bool

    def forward(self, qkv: Three) -> Attended:
        """See `Attention`."""
        tape, s, (q, k, v) = self.tape, self.sizes, qkv
        copies = [tape.new(s.queries) for _ in range(2)]
        mask = None if self.masked else self._mask()
        scores = tape.new(self._square)
        for _ in ("scaled", "masked", "softmax"):
            following = tape.new(self._square)
            tape.free(scores)
            scores = following
        left, kept = drops.dropped(tape, s.sequences * s.heads * s.length, s.length, self._square)
        product = tape.new(s.queries)
        tape.free(mask)
        return Attended(tape.new(s.queries), [q, *copies, scores, kept, left], loose=[product, k, v])

    def backward(self, attended: Attended, grad: Piece) -> Three:
        """See `Attention`."""
        tape, s = self.tape, self.sizes
        q, k, v, shares, mask, left = attended.kept
        tape.free(attended.out)
        by_v, by_left = tape.new(s.queries), tape.new(self._square)
        tape.free(left, v, grad)
        by_shares = drops.dropped_backward(tape, mask, by_left, self._square)
        by_scores = tape.new(self._square)
        tape.free(by_shares, shares)
        scaled = tape.new(self._square)
        tape.free(by_scores)
        by_q, by_k = tape.new(s.queries), tape.new(s.queries)
        tape.free(scaled, q, k)
        if s.heads > s.kv_heads:
            by_v, by_k = self._summed(by_v), self._summed(by_k)
        return by_q, by_k, by_v

    def _summed(self, grad: Piece) -> Piece:
        """Over the query heads that share a key/value head."""
        total = self.tape.new(self.sizes.keys)
        self.tape.free(grad)
        return total

    @property
    def _square(self) -> int:
        return self.sizes.sequences * self.sizes.heads * self.sizes.length**2 * self.sizes.narrow

    def _mask(self) -> Piece:
        """What is added to scores, from what is seen and what is not."""
        tape, square = self.tape, self.sizes.length**2
        ones, seen = tape.new(square), tape.new(square)
        tape.free(ones)
        mask = tape.new(square * self.sizes.narrow)
        tape.free(tape.new(square), seen)
        return mask
