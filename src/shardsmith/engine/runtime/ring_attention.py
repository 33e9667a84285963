"""Causal attention over a sequence whose parts lie on several ranks: a ring, an exchange of heads, or both.

Legend: S rows of the sequence on this rank, B sequences, H query heads, G key/value heads, E head_dim; U ranks of the
exchange. Tensors of a model are [S, B, heads, E]. Inside, a rank works on U x S rows of 1/U of the heads, and keys
travel with values, [2, B, G / U, U x S, E]: each hop is under way while the keys that are here are attended to (Liu
et al. 2023). Saved for backward is this rank's own part alone; backward sends keys and values around again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardsmith.engine.runtime.block_attention import Seen, attend, attend_backward, merge, wide
from shardsmith.engine.runtime.group import Arriving, Group
from shardsmith.layout.key_blocks import Block, Blocks

Keep = Callable[[Block, int, Tensor], Tensor]
"""Dropout factors [B, H / U, rows, keys] of a block, against the keys of a rank of the ring, for its queries."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Heads for sequence (Jacobs et al. 2023) among the ranks of `group`, whose parts are zig-zag.

    Rank i gets the i-th share of the heads with the rows of all ranks: first those from the head of the sequence, then
    those from its tail, which mirror them. With fewer key/value heads than ranks each is sent to several.
    """

    group: Group

    def to_heads(self, parts: Sequence[Tensor], purpose: str) -> list[Tensor]:
        """`parts` [S, B, heads, E] -> [U x S, B, heads / U, E], in one call."""
        ranks = self.group.size
        if ranks == 1:
            return list(parts)
        shares = [_spread(x, ranks).unflatten(2, (ranks, -1)).movedim(2, 0) for x in parts]
        arrived = self.group.all_to_all(torch.cat(shares, 3), purpose)
        heads, tails = zip(*(x.chunk(2) for x in arrived), strict=True)
        pieces = [x.split([x.shape[3] for x in shares], 2) for x in (*heads, *reversed(tails))]
        # Each whole in memory of its own, so that none keeps another alive.
        return [torch.cat(of_one) for of_one in zip(*pieces, strict=True)]

    def to_rows(self, parts: Sequence[Tensor], purpose: str) -> list[Tensor]:
        """The way back: `parts` [U x S, B, heads, E] -> [S, B, U x heads, E], in one call."""
        ranks = self.group.size
        if ranks == 1:
            return list(parts)
        pieces = torch.cat(list(parts), 2).chunk(2 * ranks)
        halves = [x for pair in zip(pieces[:ranks], pieces[: -ranks - 1 : -1], strict=True) for x in pair]
        arrived = self.group.all_to_all(torch.cat(halves), purpose).unflatten(0, (ranks, -1))
        return [x.movedim(0, 2).flatten(2, 3).contiguous() for x in arrived.split([x.shape[2] for x in parts], 3)]


def _spread(x: Tensor, ranks: int) -> Tensor:
    """`x` [S, B, heads, E] with each head as often as it takes for every rank to have one."""
    heads = x.shape[2]
    return x if heads >= ranks else x.repeat_interleave(ranks // heads, 2)


def _gathered(grad: Tensor, heads: int) -> Tensor:
    """The gradient of `_spread`: copies [S, B, n x heads, E] summed to `heads` heads, in float32 or wider."""
    if grad.shape[2] == heads:
        return grad
    total: Tensor = grad.unflatten(2, (heads, -1)).sum(3, dtype=wide(grad.dtype))
    return total.to(grad.dtype)


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The ranks around which keys and values travel; `blocks[r]`: what this rank's queries see of rank r's keys."""

    group: Group
    blocks: Sequence[Blocks]
    scale: float
    keep: Keep | None = None

    def forward(self, q: Tensor, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        """(out [S, B, H, E], lse [B, H, S]) of queries [B, H, S, E] over keys and values [2, B, G, S, E] of all."""
        sequences, heads, rows, width = q.shape
        out = q.new_empty((rows, sequences, heads, width), dtype=wide(q.dtype))
        total, lse = heads_first(out), out.new_empty((sequences, heads, rows))
        arriving = self._start(keys_values, "keys_values_forward", 1)
        # The own part comes first: in it every query sees itself, and merging needs that it has seen something.
        for block in self.blocks[self.group.index]:
            at = block.rows
            total[:, :, at], lse[:, :, at] = self._attend(q, keys_values, block, self.group.index)
        for step in range(1, self.group.size):
            assert arriving is not None, "every step but the last starts the next hop"
            here, source = arriving.wait(), (self.group.index - step) % self.group.size
            arriving = None  # and with it what was sent
            arriving = self._start(here, "keys_values_forward", step + 1)
            for block in self.blocks[source]:
                merge(total[:, :, block.rows], lse[:, :, block.rows], *self._attend(q, here, block, source))
        return out.to(q.dtype), lse

    def backward(self, grad: Tensor, q: Tensor, keys_values: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `q` and `keys_values`, in float32 or wider; `grad` is that of `out`.

        Gradients of keys and values travel one hop behind them: each rank adds its part, and the last hop brings them
        home, where the own part waits.
        """
        grad_q = torch.zeros_like(q, dtype=wide(q.dtype))
        saved = (heads_first(grad), q, heads_first(out), lse)
        arriving = self._start(keys_values, "keys_values_backward", 1)
        own = self._backward(saved, keys_values, grad_q, self.group.index)
        travelling: Arriving | None = None
        for step in range(1, self.group.size):
            assert arriving is not None, "every step but the last starts the next hop"
            here, source = arriving.wait(), (self.group.index - step) % self.group.size
            arriving = None  # and with it what was sent
            arriving = self._start(here, "keys_values_backward", step + 1)
            found = self._backward(saved, here, grad_q, source)
            if travelling is not None:
                found += travelling.wait()
                travelling = None
            travelling = self.group.pass_on(found, "keys_values_gradients")
        if travelling is not None:
            own += travelling.wait()
        return grad_q, own

    def _start(self, keys_values: Tensor, purpose: str, step: int) -> Arriving | None:
        """Send on what is needed at `step`, if there is such a step."""
        return self.group.pass_on(keys_values, purpose) if step < self.group.size else None

    def _attend(self, q: Tensor, keys_values: Tensor, block: Block, source: int) -> tuple[Tensor, Tensor]:
        k, v = keys_values[:, :, :, block.keys]
        q = q[:, :, block.rows]
        return attend(q, k, v, self._seen(block, source, q), self.scale)

    def _backward(self, saved: tuple[Tensor, ...], keys_values: Tensor, grad_q: Tensor, source: int) -> Tensor:
        """Gradients of the keys and values of `source`; those of the queries are added to `grad_q`."""
        found = torch.zeros_like(keys_values, dtype=grad_q.dtype)
        for block in self.blocks[source]:
            grad, q, out, lse = (x[:, :, block.rows] for x in saved)
            k, v = keys_values[:, :, :, block.keys]
            more = attend_backward(grad, q, k, v, out, lse, self._seen(block, source, q), self.scale)
            for total, part in zip((grad_q[:, :, block.rows], *found[:, :, :, block.keys]), more, strict=True):
                total.add_(part)
        return found

    def _seen(self, block: Block, source: int, q: Tensor) -> Seen:
        keep = None if self.keep is None else self.keep(block, source, q)
        return Seen(causal=block.kind == "causal", mask=mask_of(block, q.device), keep=keep)


def mask_of(block: Block, device: torch.device) -> Tensor | None:
    """True where a query sees a key: bool [B or 1, 1, rows, keys]; None unless the block is masked."""
    if block.first is None or block.last is None:
        return None
    place = torch.arange(block.keys.stop - block.keys.start, device=device)
    first, last = (torch.from_numpy(x).to(device)[:, None, :, None] for x in (block.first, block.last))
    return (place >= first) & (place < last)


def heads_first(x: Tensor) -> Tensor:
    """[S, B, heads, E] -> [B, heads, S, E], a view."""
    return x.permute(1, 2, 0, 3)


def forward(
    q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, ring: Ring
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Attention of this rank's rows [S, B, heads, E] to those of all, and what `backward` needs of it."""
    q, k, v = (heads_first(x) for x in exchange.to_heads((q, k, v), "heads_forward"))
    # Kernels are faster on heads that lie together, and these copies are what is kept.
    q, keys_values = q.contiguous(), torch.stack((k, v))
    out, lse = ring.forward(q, keys_values)
    (rows,) = exchange.to_rows((out,), "heads_forward")
    return rows, (q, keys_values, out, lse)


def backward(
    grad: Tensor, saved: tuple[Tensor, ...], heads: int, exchange: Exchange, ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values [S, B, heads, E], of which the latter two have `heads` heads."""
    q, keys_values, out, lse = saved
    (grad,) = exchange.to_heads((grad,), "heads_backward")
    grad_q, grad_kv = (x.to(q.dtype) for x in ring.backward(grad, q, keys_values, out, lse))
    parts = [x.permute(2, 0, 1, 3) for x in (grad_q, *grad_kv)]
    grad_q, grad_k, grad_v = exchange.to_rows(parts, "heads_backward")
    return grad_q, _gathered(grad_k, heads), _gathered(grad_v, heads)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, ring: Ring) -> Tensor:
    """Causal attention of this rank's queries [S, B, H, E] to the keys and values [S, B, G, E] of all ranks."""
    out: Tensor = _RingAttention.apply(q, k, v, exchange, ring)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, ring: Ring) -> Tensor:
        out, saved = forward(q, k, v, exchange, ring)
        ctx.exchange, ctx.ring, ctx.heads = exchange, ring, k.shape[2]
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(grad, ctx.saved_tensors, ctx.heads, ctx.exchange, ctx.ring), None, None
