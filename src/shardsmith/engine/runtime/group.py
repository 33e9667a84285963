"""Group: the ranks that communicate along one axis, and every collective the engine uses.

A group of one rank takes the same path and sends nothing, so no caller ever asks for the size.
All tensors are split and joined along dim 0: activations are laid out sequence first.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from shardsmith.engine.runtime import progress
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.timeline import LaneKind


@dataclass(frozen=True, kw_only=True)
class Arriving:
    """A hop of a ring under way: what was `sent` must not change, nor `value` be read, before `wait` returns it."""

    sent: Tensor
    value: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """What the rank before sent."""
        for work in self.works:
            work.wait()
        return self.value


@dataclass(frozen=True, kw_only=True)
class Group:
    """`ranks` (global) that share an axis; `index` is this process's place among them.

    `handle` is the torch process group, None where the group is this rank alone.
    """

    axis: LaneKind
    ranks: tuple[int, ...]
    index: int
    recorder: Recorder = field(compare=False)
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def all_reduce(self, x: Tensor, purpose: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce `x` in place over the group; returns it."""
        if self.handle is not None:
            with self._call("all_reduce", purpose, x):
                dist.all_reduce(x, op, group=self.handle)
        return x

    def all_reduce_async(self, x: Tensor, purpose: str) -> dist.Work | None:
        """Start summing `x` in place; wait on the returned work (None: nothing to wait for)."""
        if self.handle is None:
            return None
        self._note("all_reduce", purpose)
        work: dist.Work = dist.all_reduce(x, group=self.handle, async_op=True)
        return self.recorder.launched(self.axis, "all_reduce", purpose, _bytes(x), work)

    def all_gather(self, x: Tensor, purpose: str) -> Tensor:
        """Join the ranks' `x` [n, ...] along dim 0 -> [n x size, ...]."""
        if self.handle is None:
            return x
        x = x.contiguous()
        out = x.new_empty((x.shape[0] * self.size, *x.shape[1:]))
        with self._call("all_gather", purpose, out):
            dist.all_gather_single(out, x, group=self.handle)
        return out

    def reduce_scatter(self, x: Tensor, purpose: str) -> Tensor:
        """Sum `x` [n x size, ...] over the ranks and keep this rank's part [n, ...] of dim 0."""
        if self.handle is None:
            return x
        x = x.contiguous()
        assert x.shape[0] % self.size == 0, f"dim 0 of {tuple(x.shape)} is not a multiple of {self.size} ranks"
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        with self._call("reduce_scatter", purpose, x):
            dist.reduce_scatter_single(out, x, group=self.handle)
        return out

    def all_gather_async(self, x: Tensor, purpose: str) -> tuple[dist.Work | None, Tensor]:
        """Start to join the ranks' flat `x` [n] -> [n x size]; wait for the work before reading the result."""
        if self.handle is None:
            return None, x
        self._note("all_gather", purpose)
        out = x.new_empty(x.numel() * self.size)
        work: dist.Work = dist.all_gather_single(out, x, group=self.handle, async_op=True)
        return self.recorder.launched(self.axis, "all_gather", purpose, _bytes(out), work), out

    def reduce_scatter_async(self, x: Tensor, purpose: str) -> tuple[dist.Work | None, Tensor]:
        """Start to sum flat `x` [n x size] over the ranks, keeping this rank's part [n]."""
        if self.handle is None:
            return None, x
        self._note("reduce_scatter", purpose)
        out = x.new_empty(x.numel() // self.size)
        work: dist.Work = dist.reduce_scatter_single(out, x, group=self.handle, async_op=True)
        return self.recorder.launched(self.axis, "reduce_scatter", purpose, _bytes(x), work), out

    def all_to_all(self, x: Tensor, purpose: str) -> Tensor:
        """Send part i of dim 0 of `x` [n x size, ...] to rank i; parts arrive in the order of the ranks."""
        if self.handle is None:
            return x
        x = x.contiguous()
        assert x.shape[0] % self.size == 0, f"dim 0 of {tuple(x.shape)} is not a multiple of {self.size} ranks"
        out = torch.empty_like(x)
        with self._call("all_to_all", purpose, out):
            dist.all_to_all_single(out, x, group=self.handle)
        return out

    def exchange_async(
        self, x: Tensor, sent: list[int], received: list[int], purpose: str, *, payload: int
    ) -> tuple[dist.Work | None, Tensor]:
        """Start to send `sent[i]` rows of `x` to rank i and to receive `received[i]` from it, in the order of ranks.

        `payload` is what is counted in bytes. Wait for the work before reading the result.
        """
        if self.handle is None:
            return None, x
        self._note("all_to_all", purpose)
        out = x.new_empty((sum(received), *x.shape[1:]))
        work: dist.Work = dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.handle, async_op=True)
        return self.recorder.launched(self.axis, "all_to_all", purpose, payload, work), out

    def pass_on(self, x: Tensor, purpose: str) -> Arriving:
        """Start to send `x` to the next rank of the ring, and to receive as much from the one before."""
        assert self.handle is not None, "a ring has at least two ranks"
        self._note("send", purpose)
        x = x.contiguous()
        after, before = self.ranks[(self.index + 1) % self.size], self.ranks[self.index - 1]
        value = torch.empty_like(x)
        operations = [
            dist.P2POp(dist.isend, x, after, self.handle),
            dist.P2POp(dist.irecv, value, before, self.handle),
        ]
        self.recorder.count(self.axis, "send", purpose, _bytes(x))
        works = dist.batch_isend_irecv(operations)
        works[-1] = self.recorder.launched(self.axis, "receive", purpose, _bytes(x), works[-1])
        return Arriving(sent=x, value=value, works=works)

    def _call(self, kind: str, purpose: str, payload: Tensor) -> AbstractContextManager[None]:
        self._note(kind, purpose)
        return self.recorder.communicating(self.axis, kind, purpose, _bytes(payload))

    def _note(self, kind: str, purpose: str) -> None:
        progress.joining(f"{kind} {purpose}", group=self.axis, ranks=self.ranks)

    def part(self, x: Tensor) -> Tensor:
        """This rank's part of dim 0 of a replicated `x` [n x size, ...] (a view, nothing is sent)."""
        if self.handle is None:
            return x
        rows = x.shape[0] // self.size
        return x[self.index * rows : (self.index + 1) * rows]


def ring_all_reduce(x: Tensor, group: Group) -> None:
    """Sum `x` in place by the explicit ring: N-1 reduce-scatter hops, then N-1 all-gather hops.

    Every hop sends one chunk of ceil(numel / N) elements to the next rank, so a rank sends
    2(N-1)/N of the tensor in 2(N-1) messages (Patarasuk and Yuan 2009). The backend's own all-reduce is
    what training uses; this one is there to be counted and compared.
    """
    if group.handle is None or x.numel() == 0:
        return
    n, at = group.size, group.index
    chunk = math.ceil(x.numel() / n)
    flat = x.new_zeros(n * chunk)
    flat[: x.numel()] = x.reshape(-1)
    parts = list(flat.split(chunk))
    incoming = torch.empty_like(parts[0])
    for hop in range(n - 1):
        _pass_on(parts[(at - hop) % n], incoming, group, "ring reduce")
        parts[(at - hop - 1) % n] += incoming
    for hop in range(n - 1):
        _pass_on(parts[(at + 1 - hop) % n], incoming, group, "ring gather")
        parts[(at - hop) % n].copy_(incoming)
    x.copy_(flat[: x.numel()].view_as(x))


def _pass_on(out: Tensor, incoming: Tensor, group: Group, purpose: str) -> None:
    after, before = group.ranks[(group.index + 1) % group.size], group.ranks[group.index - 1]
    operations = [
        dist.P2POp(dist.isend, out.contiguous(), after, group.handle),
        dist.P2POp(dist.irecv, incoming, before, group.handle),
    ]
    with group.recorder.communicating(group.axis, "send", purpose, _bytes(out)):
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
