"""Bounded: the best plans of a space, best first, with what no plan below can beat ruled out unseen.

Every level has a bound that its plans cannot go below: a frame the work of its layers with all groups on the fastest
links, a placed and scheduled frame its pipeline without any data communication; and for memory the states sharded
as far as they go. Bounds only ever dismiss what is slower than the plans kept, so the answer is that of brute force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.held import Share, held
from shardsmith.design.cost.layouts import MOST_HIDDEN, PAIRED, Layouts, batch_of, layouts_of
from shardsmith.design.cost.price import peak
from shardsmith.design.cost.step import Pass, compose, jitter, least, least_data, one_pass
from shardsmith.design.planner.space import DEGREES, Index, Space
from shardsmith.design.planner.tables import (
    Frames,
    distinct,
    frames_of,
    joined,
    layered,
    placed,
    scheduled,
    sharded,
)
from shardsmith.plan.precision import Precision, precision
from shardsmith.plan.setup import Setup
from shardsmith.units import DTYPE_BYTES

BLOCK = 12_000
"""Plans priced at once: what they need stays in the cache of one core."""
FIRST, LARGEST = 32, 2048
"""Frames in the first block, which only has to set a mark for the others, and in the largest."""


@dataclass(kw_only=True)
class Found:
    """What a search has kept: the best plan of every combination of degrees, and the front of time and memory."""

    best: Array
    """Seconds of the best plan that fits, a combination of degrees each; infinity where none does."""
    plans: dict[int, Layouts] = field(default_factory=dict)
    front: Layouts | None = None
    front_seconds: Array = field(default_factory=lambda: np.empty(0))
    front_bytes: Array = field(default_factory=lambda: np.empty(0))
    smallest: Layouts | None = None
    """The plan with the least memory, whether it fits or not."""
    smallest_bytes: float = np.inf
    searched: int = 0
    total: float = 0.0

    @property
    def dismissed(self) -> int:
        """Plans that were never priced, because a bound ruled them out."""
        return int(self.total) - self.searched

    def mark(self, count: int) -> float:
        """Seconds that a plan must beat to be among the best `count` combinations of degrees."""
        return float(np.partition(self.best, count - 1)[count - 1]) if len(self.best) >= count else np.inf

    def ranked(self) -> list[Layouts]:
        """The best plan of each combination of degrees, fastest first."""
        order = sorted(self.plans, key=lambda at: self.best[at])
        return [self.plans[at] for at in order]


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """A search for the `count` best combinations of degrees whose ranks hold no more than `limit` bytes."""

    space: Space
    limit: float
    count: int = 1
    bound: bool = True
    """Whether bounds dismiss anything: without, every plan is priced (small spaces only)."""

    @cached_property
    def frames(self) -> Frames:
        """All frames, `shape` numbering their combinations of degrees."""
        frames = frames_of(self.space)
        _, group = distinct(np.stack([getattr(frames.layouts, name) for name in DEGREES], axis=1))
        return replace(frames, shape=group)

    @cached_property
    def bounds(self) -> Array:
        """Seconds that no plan of each frame goes below."""
        return self.frame_bounds(self.frames.layouts)

    @cached_property
    def thin(self) -> Bounded:
        """The same search among the usual plans only."""
        return replace(self, space=self.space.thin())

    def run(self) -> Found:
        """The best plans. Nothing found leaves `best` at infinity, and `smallest` says what comes nearest."""
        frames = self.frames
        count = int(frames.shape.max(initial=-1)) + 1
        found = Found(best=np.full(count, np.inf), total=float(frames.below.sum()))
        if not self.bound:
            self._layer(frames.layouts, frames.shape, found)
        elif len(frames):
            self.thin._search(frames, self.bounds, found)
            found.searched = 0
            self._search(frames, self.bounds, found)
        return found

    def best_where(self, wanted: Callable[[Layouts], NDArray[np.bool_]]) -> tuple[Layouts, float] | None:
        """The fastest of the usual plans among frames that are `wanted`, with its seconds; None where none fits."""
        mask = wanted(self.frames.layouts)
        found = Found(best=np.full(int(self.frames.shape.max(initial=-1)) + 1, np.inf))
        if mask.any():
            self.thin._with(count=1)._search(self.frames.select(mask), self.bounds[mask], found)
        if not found.plans:
            return None
        return found.ranked()[0], float(found.best.min())

    def _with(self, count: int) -> Bounded:
        return replace(self, count=count)

    def layouts_of(self, setup: Setup) -> Layouts:
        """A plan as layouts of this search."""
        return layouts_of([setup.plan], setup.model, setup.workload)

    def _search(self, frames: Frames, seconds: Array, found: Found) -> None:
        """Visit frames in the order of their bounds, until none can lead to a plan that is kept."""
        order = np.argsort(seconds, kind="stable")
        at, size = 0, FIRST
        while at < len(order) and seconds[order[at]] < found.mark(self.count):
            block = order[at : at + size]
            block = block[self._open(seconds[block], frames.shape[block], found)]
            self._layer(frames.layouts.select(block), frames.shape[block], found)
            at, size = at + size, min(2 * size, LARGEST)

    def frame_bounds(self, p: Layouts) -> Array:
        """Seconds that no plan of each frame goes below: every choice inside a layer at its best, links at theirs."""
        s, found = self.space.subject, []
        for q in _blocks(p):
            b = batch_of(s, q, self._kinds)
            b = replace(
                _near(b),
                sequence_parallel=np.where(q.tensor > 1, 1.0, 0.0),
                overlap_tensor=np.full(len(q), MOST_HIDDEN),
                overlap_expert=np.maximum(b.overlap_expert, PAIRED),
            )
            found.append(self._work(b, one_pass(b, s.constants)))
        return np.concatenate(found)

    @property
    def _kinds(self) -> Precision:
        return precision(self.space.base, self.space.subject.workload)

    def _least_data(self, p: Layouts, b: Batch) -> Array:
        """Seconds of data communication at the least, given what must be sharded to fit; infinity if nothing fits."""
        s, kinds = self.space.subject, self._kinds
        widths = float(DTYPE_BYTES[kinds.reduce]), float(DTYPE_BYTES[kinds.param])
        found = np.full(len(p), np.inf)
        for level in (1, 2, 3):
            size = peak(s, self._most_sharded(p, float(level)), b, kinds)
            seconds = least_data(b, s.constants, level, *widths)
            found = np.where(size <= self.limit, np.minimum(found, seconds), found)
        return found

    def _work(self, b: Batch, one: Pass) -> Array:
        """Seconds of all microbatches on the mean rank and the least bubble: no schedule and no split goes below.

        A V leaves at least half of the longest third of a microbatch a rank, a loop 1/v of a microbatch.
        """
        c = self.space.subject.constants
        mean = (b.layers * (one.forward + one.backward) + one.head + one.embedding) / b.pipeline
        loops = np.maximum(np.floor_divide(b.layers + 2.0, b.pipeline), 1.0)
        idle = (b.pipeline - 1.0) * mean * np.minimum(1.0 / 6.0, 1.0 / loops)
        return (b.microbatches * mean + idle + c["step_fixed"]) * jitter(b, c)

    def _layer(self, p: Layouts, group: Index, found: Found) -> None:
        """Go through every way to run the layers of some frames."""
        s = self.space.subject
        q, parent = layered(self.space, p)
        group = group[parent]
        for start in range(0, len(q), BLOCK):
            part = np.arange(start, min(start + BLOCK, len(q)))
            one, where = q.select(part), group[part]
            if self.bound:
                b = batch_of(s, one, self._kinds)
                near = replace(_near(b), overlap_expert=np.maximum(b.overlap_expert, PAIRED))
                bound = self._work(near, one_pass(near, s.constants))
                keep = self._open(bound, where, found)
                keep[keep] = self._least_first(one.select(keep), b.select(keep)) <= self.limit
                order = np.flatnonzero(keep)[np.argsort(bound[keep], kind="stable")]
                one, where = one.select(order), where[order]
            if len(one):
                self._place(one, where, found)

    def _place(self, p: Layouts, group: Index, found: Found) -> None:
        """Go through every placement of some layered plans, and every schedule."""
        s, moe = self.space.subject, self.space.subject.model.experts is not None
        every, parent = placed(self.space, p)
        group = group[parent]
        for start in range(0, len(every), BLOCK):
            part = np.arange(start, min(start + BLOCK, len(every)))
            q, where = every.select(part), group[part]
            b = batch_of(s, q, self._kinds)
            passed = one_pass(b, s.constants)
            if self.bound and not moe:
                keep = np.flatnonzero(self._open(self._work(b, passed), where, found))
                q, where, passed = q.select(keep), where[keep], passed.select(keep)
            if len(q):
                self._schedule(q, where, None if moe else passed, found)

    def _schedule(self, p: Layouts, group: Index, passed: Pass | None, found: Found) -> None:
        """Go through every schedule; `passed` is the layers' time where no schedule changes it."""
        s = self.space.subject
        q, parent = scheduled(self.space, p)
        for start in range(0, len(q), BLOCK):
            part = np.arange(start, min(start + BLOCK, len(q)))
            one, above = q.select(part), parent[part]
            b = batch_of(s, one, self._kinds)
            layers = one_pass(b, s.constants) if passed is None else passed.select(above)
            seconds = least(b, s.constants, layers)
            keep = self._open(seconds, group[above], found)
            if self.bound and keep.any():
                seconds[keep] += self._least_data(one.select(keep), b.select(keep))
                keep &= self._open(seconds, group[above], found)
            if keep.any():
                self._shard(
                    one.select(keep), group[above][keep], seconds[keep], layers.select(np.flatnonzero(keep)), found
                )

    def _shard(self, p: Layouts, group: Index, bounds: Array, passed: Pass, found: Found) -> None:
        """Price every way to shard the states of some scheduled plans, the most promising first."""
        s = self.space.subject
        order = np.argsort(bounds, kind="stable")
        step, at = BLOCK // 16, 0
        while at < len(order):
            part = order[at : at + step]
            part = part[self._open(bounds[part], group[part], found)]
            at += step
            if not len(part):
                continue
            q, parent = sharded(self.space, p.select(part))
            b = batch_of(s, q, self._kinds)
            seconds = compose(b, s.constants, passed.select(part[parent])).total
            self._keep(q, group[part][parent], seconds, peak(s, q, b, self._kinds), found)

    def _open(self, seconds: Array, group: Index, found: Found) -> NDArray[np.bool_]:
        """Which of these bounds can still lead to a plan that is kept."""
        if not self.bound:
            return np.ones(len(seconds), dtype=bool)
        return (seconds < found.best[group]) & (seconds < found.mark(self.count))

    def _least_first(self, p: Layouts, b: Batch) -> Array:
        """Bytes that the first rank holds at least: a layer less than the mean, 1F1B's microbatches in flight."""
        s, kinds = self.space.subject, self._kinds
        layers, one = s.model.layers, np.ones(len(p))
        mean = np.where(p.pipeline > 1, np.maximum(np.floor_divide(layers, p.pipeline) - 1.0, 0.0), layers)
        dense = np.minimum(mean, s.model.experts.first_dense if s.model.experts else layers)
        alone = np.where(p.pipeline > 1, 0.0, 1.0)
        share = Share(dense=dense, sparse=mean - dense, embedding=alone, head=alone, rank=0.0 * one)
        sizes = [held(s, self._most_sharded(p, level), b, kinds, share).total for level in (2.0, 3.0)]
        return np.minimum(*sizes)

    def _most_sharded(self, p: Layouts, level: float) -> Layouts:
        """Plans with states at a ZeRO level and spread as widely as they can be."""
        one = np.ones(len(p))
        zero = np.where(p.data * p.context > 1, level, 0.0)
        return replace(p, zero=zero, per_step=0.0 * one, replicate=one)

    def _keep(self, p: Layouts, group: Index, seconds: Array, size: Array, found: Found) -> None:
        if not len(p):
            return
        found.searched += len(p)
        least_held = int(np.argmin(size))
        if size[least_held] < found.smallest_bytes:
            found.smallest, found.smallest_bytes = p.select(np.array([least_held])), float(size[least_held])
        fits = np.flatnonzero(size <= self.limit)
        order = fits[np.lexsort((size[fits], seconds[fits]))]
        groups, first = np.unique(group[order], return_index=True)
        for at, row in zip(groups, order[first], strict=True):
            if seconds[row] < found.best[at]:
                found.best[at], found.plans[int(at)] = seconds[row], p.select(np.array([row]))
        _extend_front(found, p.select(order), seconds[order], size[order])


STRIDES = ("tensor_stride", "context_stride", "data_stride", "pipeline_stride")


def _near(b: Batch) -> Batch:
    """The same plans with every group on neighbouring ranks."""
    return replace(b, **dict.fromkeys(STRIDES, np.ones(len(b))))


def _blocks(p: Layouts) -> Iterator[Layouts]:
    for start in range(0, len(p), BLOCK):
        yield p.select(np.arange(start, min(start + BLOCK, len(p))))


def _extend_front(found: Found, p: Layouts, seconds: Array, size: Array) -> None:
    """Keep plans, sorted by time, that hold less than every faster one."""
    below = np.minimum.accumulate(size) if len(size) else size
    lead = np.flatnonzero(np.concatenate([[True], size[1:] < below[:-1]])) if len(size) else np.empty(0, dtype=np.intp)
    parts, times, sizes = [p.select(lead)], [seconds[lead]], [size[lead]]
    if found.front is not None:
        parts, times, sizes = [found.front, *parts], [found.front_seconds, *times], [found.front_bytes, *sizes]
    every, t, m = joined(parts), np.concatenate(times), np.concatenate(sizes)
    order = np.lexsort((m, t))
    t, m = t[order], m[order]
    keep = np.concatenate([[True], m[1:] < np.minimum.accumulate(m)[:-1]]) if len(m) else np.empty(0, dtype=bool)
    found.front, found.front_seconds, found.front_bytes = every.select(order[keep]), t[keep], m[keep]
