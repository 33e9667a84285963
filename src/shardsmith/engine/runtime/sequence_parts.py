"""How a sequence is cut over the context axis, as one rank sees it, and attention across the cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]

from shardsmith.engine.runtime import ring_attention
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.key_blocks import Block, Blocks, key_blocks
from shardsmith.engine.runtime.noise import Noise, cut
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.engine.runtime.ring_attention import Exchange, Ring
from shardsmith.layout.axes.context import places


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
    """Dropout of attention probabilities: masks of a pass, the first query head of this tensor rank, rate and layer."""

    noise: Noise
    first_head: int
    rate: float
    layer: int


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
            out: Tensor = attend_traced(q_SBHE, k_SBGE, v_SBGE, self.documents, *names, self.window, scale)[0]
            return out
        ring = self.ring(scale, None if dropped is None else _Keep(view=self, dropped=dropped, heads=q_SBHE.shape[2]))
        return ring_attention.ring_attention(q_SBHE, k_SBGE, v_SBGE, self.exchange, ring)

    @property
    def exchange(self) -> Exchange:
        """Heads for sequence among the ulysses ranks."""
        return Exchange(group=self.parts.ulysses)

    def ring(self, scale: float, keep: _Keep | None = None) -> Ring:
        """The ring of a pass."""
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
    """Dropout factors of a pass by block; drawn for each block anew, as they are named by what they cover."""

    view: View
    dropped: Dropped
    heads: int

    def __call__(self, block: Block, source: int) -> Tensor:
        """Factors [B, heads of this rank, rows, keys]."""
        parts, d = self.view.parts, self.dropped
        each = self.heads // parts.ulysses.size
        first = d.first_head + parts.ulysses.index * each
        rows, keys = cut(self.view.around[parts.ring.index], block.rows), cut(self.view.around[source], block.keys)
        return d.noise.attention(range(first, first + each), rows, keys, self.view.length, d.rate, d.layer)


# A compiler cannot look into what follows: inside a compiled block attention is one operator on names of groups. It is
# not counted by the recorder.


@torch.library.custom_op("shardsmith::context_attention", mutates_args=())
def attend_traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    ring: str,
    ulysses: str,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `View.attend` computes, and for its backward keys with values, log-sum-exps, exchanged queries and output.

    The last two are empty where nothing is exchanged.
    """
    view = _named(ring, ulysses).view(len(q), documents, window)
    out, (queries, keys_values, whole, lse) = ring_attention.forward(q, k, v, view.exchange, view.ring(scale))
    if not ulysses:
        queries, whole = q.new_empty(0), q.new_empty(0)
    return out, keys_values, lse, queries, whole


@torch.library.custom_op("shardsmith::context_attention_backward", mutates_args=())
def backward_traced(
    grad: Tensor,
    saved: list[Tensor],
    documents: Tensor | None,
    heads: int,
    ring: str,
    ulysses: str,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    view = _named(ring, ulysses).view(len(grad), documents, window)
    grads = ring_attention.backward(grad, tuple(saved), heads, view.exchange, view.ring(scale))
    # An operator's outputs must not share memory, which gradients of keys and values may.
    return grads[0].contiguous(), grads[1].clone(memory_format=torch.contiguous_format), grads[2].contiguous()


@attend_traced.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    ring: str,
    ulysses: str,
    window: int | None,
    scale: float,
) -> tuple[Tensor, ...]:
    rows, sequences, heads, width = q.shape
    ranks = _group(ulysses).size
    keys = max(k.shape[2], ranks) // ranks
    wide = torch.promote_types(q.dtype, torch.float32)
    exchanged = (ranks * rows, sequences, heads // ranks, width) if ulysses else (0,)
    return (
        q.new_empty(q.shape),
        k.new_empty((2, ranks * rows, sequences, keys, width)),
        q.new_empty((sequences, heads // ranks, ranks * rows), dtype=wide),
        q.new_empty(exchanged),
        q.new_empty(exchanged),
    )


@backward_traced.register_fake
def _(
    grad: Tensor,
    saved: list[Tensor],
    documents: Tensor | None,
    heads: int,
    ring: str,
    ulysses: str,
    window: int | None,
    scale: float,
) -> tuple[Tensor, ...]:
    keys = grad.new_empty((*grad.shape[:2], heads, grad.shape[3]))
    return grad.new_empty(grad.shape), keys, torch.empty_like(keys)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, _, ctx.documents, *ctx.names, ctx.window, ctx.scale = inputs
    out, keys_values, lse, queries, whole = output
    ctx.heads, exchanged = k.shape[2], bool(ctx.names[1])
    ctx.save_for_backward(queries if exchanged else q, keys_values, whole if exchanged else out, lse)


def _backward(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    saved = list(ctx.saved_tensors)
    grads = backward_traced(grad, saved, ctx.documents, ctx.heads, *ctx.names, ctx.window, ctx.scale)
    return *grads, None, None, None, None, None


attend_traced.register_autograd(_backward, setup_context=_keep_for_backward)


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
