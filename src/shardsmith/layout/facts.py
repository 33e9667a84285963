"""What the axes state about a plan, in shared words: pieces of a tensor, collectives, bytes of a ring."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

CommAxis = Literal["tensor", "pipeline", "data", "context", "expert"]
CommKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "receive"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of one full tensor that a rank holds: `shape` elements per dim, from `offsets` on.

    `tensor_dim` is the dim that the tensor axis cuts (None: the rank holds the whole tensor).
    `partial_over_tensor` says that each tensor rank computes only its part of this gradient's sum, so
    that the sum over the tensor axis is still to be taken. `copy` counts the tensor ranks that hold this same
    part of a tensor that is cut (None: no other does); their gradients are to be summed too.
    `expert` says that the expert mesh cuts it: then its replicas, and the ranks over which ZeRO shards it, are
    those of that mesh. `zero_dim` is the dim whose rows ZeRO shards.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    tensor_dim: int | None = None
    partial_over_tensor: bool = False
    copy: int | None = None
    expert: bool = False
    zero_dim: int = 0

    @property
    def numel(self) -> int:
        """Number of elements that the rank holds; 0 where a short dim leaves it nothing."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index ranges into the full tensor, one a dim."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True)
class CollectiveCount:
    """`count` calls of one kind on one axis for one purpose, in one training step of one rank.

    `bytes` is their payload summed over all calls: the full tensor for an all-reduce, the output of an
    all-gather, the input of a reduce-scatter or all-to-all, the message of a send or receive. Where an all-to-all
    carries tokens to experts, its payload is the buffer of the rank that owns them, wherever they go.
    """

    axis: CommAxis
    kind: CommKind
    purpose: str
    count: int
    bytes: int


def ring_bytes(kind: CommKind, payload: float, ranks: int) -> float:
    """Bytes that each of `ranks` ranks sends when a ring moves `payload` bytes.

    2(n-1)/n of the payload for an all-reduce (a reduce-scatter, then an all-gather), (n-1)/n for either
    half (Patarasuk and Yuan 2009) and for an all-to-all whose parts are equal; a message itself for a send,
    nothing for a receive.
    """
    if kind == "send":
        return payload
    if kind == "receive":
        return 0.0
    return (2 if kind == "all_reduce" else 1) * payload * (ranks - 1) / ranks


def merged(counts: Iterable[CollectiveCount]) -> tuple[CollectiveCount, ...]:
    """`counts` with equal axis, kind and purpose added up; what never happens is left out."""
    sums: dict[tuple[CommAxis, CommKind, str], tuple[int, int]] = {}
    for c in counts:
        key = (c.axis, c.kind, c.purpose)
        calls, size = sums.get(key, (0, 0))
        sums[key] = (calls + c.count, size + c.bytes)
    return tuple(
        CollectiveCount(axis=axis, kind=kind, purpose=purpose, count=calls, bytes=size)
        for (axis, kind, purpose), (calls, size) in sums.items()
        if calls
    )
