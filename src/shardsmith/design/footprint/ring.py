"""Attention across context ranks in bytes: `engine/runtime/ring_attention.py`, with the exchange of heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from shardsmith.design.footprint.attention import Attended, Three
from shardsmith.design.footprint.sizes import Sizes
from shardsmith.design.footprint.tape import Piece, Tape
from shardsmith.layout.axes.context import ring, ring_blocks
from shardsmith.layout.key_blocks import Block, Blocks


@dataclass(frozen=True)
class Ring:
    """Queries of this rank meet the keys and values of all, which travel; heads are exchanged for sequence before.

    Sums are kept in `wide`, and one part of keys and values is on its way while another is in use.
    """

    tape: Tape
    sizes: Sizes

    def forward(self, qkv: Three) -> Attended:
        """See `attention.Attention`."""
        tape, s = self.tape, self.sizes
        q, k, v = self._to_heads([s.queries, self._keys, self._keys], spread=2) if self._exchanges else qkv
        queries, keys_values = tape.new(s.queries), tape.new(2 * self._keys)
        if self._exchanges:
            tape.free(q)
        total, lse = tape.new(self._widened(s.queries)), tape.new(s.log_sums)
        here = self._hop(2 * self._keys, 1)
        for block in self._own:
            tape.free(*self._attend(block))
        for step in range(1, self._ranks):
            following = self._hop(2 * self._keys, step + 1)
            for block in self._blocks(step):
                self._merge(block, *self._attend(block))
            if following is not None:
                tape.free(here)
                here = following
        out = self._narrowed(total, s.queries)
        tape.free(here)
        if not self._exchanges:
            return Attended(out, [queries, keys_values, lse], loose=[*qkv])
        (rows,) = self._to_rows([s.queries])
        tape.free(k, v)
        return Attended(rows, [queries, keys_values, out, lse], loose=[*qkv])

    def backward(self, attended: Attended, grad: Piece) -> Three:
        """See `attention.Attention`; gradients of keys and values are two halves of one tensor."""
        tape, s = self.tape, self.sizes
        kept = [grad, *attended.kept]
        if self._exchanges:
            tape.free(attended.out)
            kept += self._to_heads([s.queries], spread=0)
        else:
            kept.append(attended.out)
        by_q, size = tape.new(self._widened(s.queries)), self._widened(2 * self._keys)
        here = self._hop(2 * self._keys, 1)
        own = self._block_gradients(self._own, size)
        travelling: list[Piece] = []
        for step in range(1, self._ranks):
            following = self._hop(2 * self._keys, step + 1)
            found = self._block_gradients(self._blocks(step), size)
            tape.free(*travelling)
            travelling = [found, tape.new(size)]
            if following is not None:
                tape.free(here)
                here = following
        tape.free(here, *travelling)
        narrow = self._narrowed(by_q, s.queries, keep=True), self._narrowed(own, 2 * self._keys, keep=True)
        if s.wide > s.narrow:
            tape.free(by_q, own)
        by_q, by_kv = narrow
        if not self._exchanges:
            tape.free(*kept)
            return by_q, by_kv, tape.hold(by_kv)
        grads = self._to_rows([s.queries, self._keys, self._keys])
        if self._spread:
            grads += [self._summed(), self._summed()]
            tape.free(*grads[1:3])
        tape.free(by_q, by_kv, *kept)
        return grads[0], grads[-2], grads[-1]

    @cached_property
    def _ranks(self) -> int:
        return ring(self.sizes.setup.plan)

    @cached_property
    def _exchanges(self) -> int:
        """Ranks that exchange heads, 0 where there is one."""
        ranks = self.sizes.setup.plan.ulysses
        return ranks if ranks > 1 else 0

    @cached_property
    def _spread(self) -> bool:
        """Whether there are fewer key/value heads than ranks that exchange them, so that each goes to several."""
        return self._exchanges > self.sizes.kv_heads

    @cached_property
    def _keys(self) -> int:
        """Bytes of the keys that this rank has once heads are exchanged."""
        return self.sizes.keys * max(1, self._exchanges // self.sizes.kv_heads)

    @cached_property
    def _by_source(self) -> list[Blocks]:
        return ring_blocks(self.sizes.setup, self.sizes.context)

    @property
    def _own(self) -> Blocks:
        return self._by_source[self._place]

    @property
    def _place(self) -> int:
        return self.sizes.context // self.sizes.setup.plan.ulysses

    def _blocks(self, step: int) -> Blocks:
        """What is computed against the keys that arrive in the `step`-th hop."""
        return self._by_source[(self._place - step) % self._ranks]

    def _widened(self, size: int) -> int:
        return size * self.sizes.wide // self.sizes.narrow

    def _narrowed(self, piece: Piece, size: int, *, keep: bool = False) -> Piece:
        """`piece` in the dtype of the computation."""
        if self.sizes.wide == self.sizes.narrow:
            return piece
        out = self.tape.new(size)
        if not keep:
            self.tape.free(piece)
        return out

    def _hop(self, size: int, step: int) -> Piece | None:
        return self.tape.new(size) if step < self._ranks else None

    def _part(self, block: Block) -> tuple[int, int]:
        """Bytes of a block's queries, and of their log-sum-exps."""
        s = self.sizes
        rows = s.length * max(1, self._exchanges)
        return tuple(size * _length(block.rows) // rows for size in (s.queries, s.log_sums))  # type: ignore[return-value]

    @contextmanager
    def _seen(self, block: Block) -> Iterator[None]:
        """Around a kernel: which keys are seen, as truths, and as what is added to scores while the kernel runs."""
        tape, pairs = self.tape, _length(block.rows) * _length(block.keys)
        if block.first is None:
            yield
            return
        bounds = [tape.new(pairs) for _ in range(2)]
        mask = tape.new(pairs)
        tape.free(*bounds)
        added = tape.new(pairs * self.sizes.narrow)
        tape.free(tape.new(pairs))
        yield
        tape.free(added, mask)

    def _attend(self, block: Block) -> tuple[Piece, Piece]:
        out, lse = self._part(block)
        with self._seen(block):
            found = self.tape.new(out), self.tape.new(lse)
        if block.first is not None:
            blind = self.tape.new(out), self.tape.new(lse)
            self.tape.free(*found)
            return blind
        return found

    def _merge(self, block: Block, more: Piece, more_lse: Piece) -> None:
        tape, (out, lse) = self.tape, self._part(block)
        widened = tape.new(self._widened(out)) if self.sizes.wide > self.sizes.narrow else None
        weight = tape.new(lse)
        tape.free(tape.new(lse), weight, widened)
        tape.free(tape.new(lse), more, more_lse)

    def _block_gradients(self, blocks: Blocks, size: int) -> Piece:
        """Gradients of one rank's keys and values, summed over blocks."""
        tape, s = self.tape, self.sizes
        rows = s.length * max(1, self._exchanges)
        found = tape.new(size)
        more: list[Piece] = []
        for block in blocks:
            out, lse = self._part(block)
            copy = tape.new(lse) if _length(block.rows) < rows else None
            keys = self._keys * _length(block.keys) // rows
            with self._seen(block):
                made = [tape.new(out), tape.new(keys), tape.new(keys)]
            tape.free(copy, *more)
            more = made
        tape.free(*more)
        return found

    def _to_heads(self, sizes: list[int], *, spread: int) -> list[Piece]:
        """Parts of `sizes` from rows to heads; the last `spread` of them are sent to several ranks."""
        tape = self.tape
        copies = [tape.new(size) for size in sizes[-spread:]] if self._spread and spread else []
        joined = tape.new(sum(sizes))
        arrived = tape.new(sum(sizes))
        tape.free(joined)
        parts = [tape.new(size) for size in sizes]
        tape.free(arrived, *copies)
        return parts

    def _to_rows(self, sizes: list[int]) -> list[Piece]:
        tape = self.tape
        joined, halves = tape.new(sum(sizes)), tape.new(sum(sizes))
        arrived = tape.new(sum(sizes))
        tape.free(halves)
        parts = [tape.new(size) for size in sizes]
        tape.free(arrived, joined)
        return parts

    def _summed(self) -> Piece:
        """A gradient of keys, summed over the ranks that had the same head."""
        return self._narrowed(self.tape.new(self._widened(self.sizes.keys)), self.sizes.keys)


def _length(part: slice) -> int:
    return int(part.stop - part.start)
