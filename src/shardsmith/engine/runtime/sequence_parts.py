"""How a sequence is cut over the context axis, as one rank sees it, and attention across the cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]

from shardsmith.engine.runtime import ring_attention
from shardsmith.engine.runtime.block_attention import wide
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.noise import Noise
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.engine.runtime.ring_attention import Exchange, Ring
from shardsmith.layout.axes.context import places
from shardsmith.layout.key_blocks import Block, Blocks, key_blocks


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The context axis as ring x ulysses: the parts of a ulysses group, all neighbours, make up one of the ring."""

    ring: Group
    ulysses: Group

    @property
    def count(self) -> int:
        """Into how many parts sequences are cut."""
        return self.ring.size * self.ulysses.size

    @property
    def index(self) -> int:
        """Which part this rank holds."""
        return self.ring.index * self.ulysses.size + self.ulysses.index

    def places(self, rows: int) -> tuple[range, range]:
        """The places in the sequence of the `rows` rows that this rank holds."""
        return places(rows * self.count, self.count, self.index)

    def places_of(self, rows: int, device: torch.device) -> Tensor:
        """The same as one tensor [rows]."""
        return _flat(self.places(rows), device)

    def split(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of an `x` that has the whole sequence along `dim`."""
        if self.count == 1:
            return x
        held = places(x.shape[dim], self.count, self.index)
        return torch.cat([x.narrow(dim, r.start, len(r)) for r in held], dim)

    def view(self, rows: int, documents_BS: Tensor | None, window: int | None) -> View:
        """What queries see where this rank holds `rows` rows; `documents_BS` number those of the whole sequence."""
        length = rows * self.count
        return View(parts=self, length=length, documents=documents_BS, window=window)


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Dropout of attention probabilities: the masks of a layer, the first query head of this tensor rank, the rate."""

    noise: Noise
    first_head: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class View:
    """What this rank's queries see in one pass over sequences of `length` places."""

    parts: Parts
    length: int
    documents: Tensor | None
    window: int | None

    def attend(
        self, q_SBHE: Tensor, k_SBGE: Tensor, v_SBGE: Tensor, scale: float, dropped: Dropped | None = None
    ) -> Tensor:
        """Causal attention of this rank's rows to those of all ranks, [S, B, H, E]: S are this rank's rows."""
        if torch.compiler.is_compiling():
            names = (_name(self.parts.ring), _name(self.parts.ulysses))
            keys, drop = (None, (0.0, 0))
            if dropped is not None:
                keys, drop = dropped.noise.keys_B, (dropped.rate, dropped.first_head)
            rest = (self.documents, keys, *names, self.window, scale, *drop)
            out: Tensor = attend_traced(q_SBHE, k_SBGE, v_SBGE, *rest)[0]
            return out
        return ring_attention.ring_attention(q_SBHE, k_SBGE, v_SBGE, self.exchange, self.ring(scale, dropped))

    def of(self, sequences: slice) -> View:
        """The same for some sequences of the microbatch."""
        return self if self.documents is None else replace(self, documents=self.documents[sequences])

    @property
    def exchange(self) -> Exchange:
        """Heads for sequence among the ulysses ranks."""
        return Exchange(group=self.parts.ulysses)

    def ring(self, scale: float, dropped: Dropped | None = None) -> Ring:
        """The ring of a pass."""
        keep = None if dropped is None else _Keep(view=self, dropped=dropped)
        return Ring(group=self.parts.ring, blocks=self.blocks, scale=scale, keep=keep)

    @cached_property
    def around(self) -> tuple[tuple[range, range], ...]:
        """The places that each rank of the ring holds, once heads are exchanged for sequence."""
        ranks = self.parts.ring.size
        return tuple(places(self.length, ranks, index) for index in range(ranks))

    @cached_property
    def blocks(self) -> list[Blocks]:
        """What is to be computed against the keys of each rank of the ring."""
        documents = None if self.documents is None else self.documents.cpu().numpy()
        window = None if self.window is None or self.window >= self.length else self.window
        return key_blocks(self.around, self.parts.ring.index, documents, window)


@dataclass(frozen=True, kw_only=True)
class _Keep:
    """Dropout factors by block; made for each anew, as they are named by what they cover."""

    view: View
    dropped: Dropped

    def __call__(self, block: Block, source: int, like: Tensor) -> Tensor:
        """Factors [B, heads, rows, keys] for queries `like` [B, heads, rows, E]."""
        parts, dropped = self.view.parts, self.dropped
        rows = self._places(parts.ring.index, block.rows, like.device)
        keys = self._places(source, block.keys, like.device)
        ones = torch.ones(*like.shape[:3], len(keys), dtype=wide(like.dtype), device=like.device)
        first = dropped.first_head + parts.ulysses.index * like.shape[1]
        return dropped.noise.drop_probabilities(ones, dropped.rate, first, rows, keys)

    def _places(self, rank: int, rows: slice, device: torch.device) -> Tensor:
        """The places of some rows of a rank of the ring."""
        return _flat(self.view.around[rank], device)[rows]


def _flat(held: tuple[range, ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(r.start, r.stop, device=device) for r in held])


# A compiler cannot look into what follows: inside a compiled block attention is one operator on names of groups. It is
# not counted by the recorder.


@torch.library.custom_op("shardsmith::context_attention", mutates_args=())
def attend_traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    drop_keys: Tensor | None,
    ring: str,
    ulysses: str,
    window: int | None,
    scale: float,
    rate: float,
    first_head: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `View.attend` computes, and for its backward queries, keys with values, log-sum-exps and exchanged output.

    The last is empty where nothing is exchanged.
    """
    view = _named(ring, ulysses).view(len(q), documents, window)
    around = view.ring(scale, _named_noise(drop_keys, rate, first_head))
    out, (queries, keys_values, whole, lse) = ring_attention.forward(q, k, v, view.exchange, around)
    # An operator's outputs must not be its inputs, nor share memory among themselves.
    queries = queries.clone() if queries.data_ptr() == q.data_ptr() else queries
    return out, queries, keys_values, lse, whole if ulysses else q.new_empty(0)


@torch.library.custom_op("shardsmith::context_attention_backward", mutates_args=())
def backward_traced(
    grad: Tensor,
    saved: list[Tensor],
    heads: int,
    documents: Tensor | None,
    drop_keys: Tensor | None,
    ring: str,
    ulysses: str,
    window: int | None,
    scale: float,
    rate: float,
    first_head: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    view = _named(ring, ulysses).view(len(grad), documents, window)
    around = view.ring(scale, _named_noise(drop_keys, rate, first_head))
    grads = ring_attention.backward(grad, tuple(saved), heads, view.exchange, around)
    return grads[0].contiguous(), grads[1].clone(memory_format=torch.contiguous_format), grads[2].contiguous()


@attend_traced.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    drop_keys: Tensor | None,
    ring: str,
    ulysses: str,
    window: int | None,
    scale: float,
    rate: float,
    first_head: int,
) -> tuple[Tensor, ...]:
    rows, sequences, heads, width = q.shape
    ranks = _group(ulysses).size
    keys = max(k.shape[2], ranks) // ranks
    wide = torch.promote_types(q.dtype, torch.float32)
    return (
        q.new_empty(q.shape),
        q.new_empty((sequences, heads // ranks, ranks * rows, width)),
        k.new_empty((2, sequences, keys, ranks * rows, width)),
        q.new_empty((sequences, heads // ranks, ranks * rows), dtype=wide),
        q.new_empty((ranks * rows, sequences, heads // ranks, width) if ulysses else (0,)),
    )


@backward_traced.register_fake
def _(
    grad: Tensor,
    saved: list[Tensor],
    heads: int,
    documents: Tensor | None,
    drop_keys: Tensor | None,
    ring: str,
    ulysses: str,
    window: int | None,
    scale: float,
    rate: float,
    first_head: int,
) -> tuple[Tensor, ...]:
    keys = grad.new_empty((*grad.shape[:2], heads, grad.shape[3]))
    return grad.new_empty(grad.shape), keys, torch.empty_like(keys)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, k, _, *ctx.rest = inputs
    out, queries, keys_values, lse, whole = output
    ctx.heads = k.shape[2]
    ctx.save_for_backward(queries, keys_values, whole if whole.numel() else out, lse)


def _backward(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    grads = backward_traced(grad, list(ctx.saved_tensors), ctx.heads, *ctx.rest)
    return *grads, *[None] * len(ctx.rest)


attend_traced.register_autograd(_backward, setup_context=_keep_for_backward)


def _named_noise(keys: Tensor | None, rate: float, first_head: int) -> Dropped | None:
    return None if keys is None else Dropped(noise=Noise(keys_B=keys), first_head=first_head, rate=rate)


def _name(group: Group) -> str:
    """The name of a process group; empty for a group of one rank."""
    return "" if group.handle is None else str(group.handle.group_name)


def _named(ring: str, ulysses: str) -> Parts:
    return Parts(ring=_group(ring), ulysses=_group(ulysses))


def _group(name: str) -> Group:
    """The group of that name, which no recorder listens to."""
    if not name:
        return Group(axis="context", ranks=(0,), index=0, recorder=Recorder(0))
    handle = _resolve_process_group(GroupName(name))
    ranks = tuple(dist.get_process_group_ranks(handle))
    return Group(axis="context", ranks=ranks, index=handle.rank(), recorder=Recorder(0), handle=handle)
