"""Bounded: the best plans of a space, best first, with what no plan below can beat ruled out unseen.

Every level has a bound that its plans cannot go below: a frame the work of its layers with all groups on the fastest
links, a placed and scheduled frame its pipeline and the cheapest way to shard its states; and for memory the states
sharded as far as they go. Bounds only ever dismiss what is slower than the plans kept, so the answer is that of
brute force.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.experts import Experts, experts
from shardsmith.design.cost.kernels import Constants, Dense, dense_kernels
from shardsmith.design.cost.layouts import RECOMPUTE, Layouts, batch_of, hidden_share, layouts_of
from shardsmith.design.cost.pipeline import hop
from shardsmith.design.cost.schedules import DUALPIPE_V
from shardsmith.design.cost.step import Pass, flow, one_pass, waiting
from shardsmith.design.planner.found import Found, Joint, Leanest, Rivals
from shardsmith.design.planner.least import first_rank_bytes, frame_bytes
from shardsmith.design.planner.sharded import Scheduled, Shardings, Ways
from shardsmith.design.planner.space import Index, Space
from shardsmith.design.planner.tables import (
    BLOCK,
    Distinct,
    Frames,
    distinct,
    frames_of,
    layered,
    placed,
    scheduled,
    schedules,
)
from shardsmith.plan.precision import Precision, precision
from shardsmith.plan.setup import Setup

FIRST, LARGEST = 256, 2048
"""Frames in the first block, which only has to set a mark for the others, and in the largest."""
WIDE = 16
"""Blocks of frames whose bounds are tightened at once."""
AT_ONCE = 512
"""Scheduled plans whose shardings are priced before the mark is looked at again."""
DECIDING_DEGREES = ("tensor", "replicate_kv", "context", "ulysses", "expert", "expert_tensor")
"""Columns that decide what a layer takes, beside the microbatch,"""
INSIDE = ("sequence_parallel", "recompute", "overlap")
"""how it is run,"""
STRIDES = ("tensor_stride", "context_stride")
"""and where its groups stand;"""
DECIDING_DENSE = ("tensor", "replicate_kv", "context", "microbatch", "sequence_parallel", "overlap")
"""what its kernels take,"""
DECIDING_ROUTED = ("tensor", "context", "expert", "expert_tensor", "microbatch", "overlap")
"""and those of routed experts."""

Kernels = TypeVar("Kernels", Dense, Experts)


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """A search for the `count` best combinations of degrees whose ranks hold no more than `limit` bytes."""

    space: Space
    limit: float
    count: int = 1
    bound: bool = True
    """Whether bounds dismiss anything: without, every plan is priced (small spaces only)."""

    @cached_property
    def every(self) -> Frames:
        """All frames."""
        return frames_of(self.space)

    @cached_property
    def frames(self) -> Frames:
        """The frames with plans that may fit, by rising bound; without bounds all."""
        frames = self.every
        if not self.bound or not len(frames):
            return frames
        # A shape whose smallest microbatch does not fit fits with none.
        shapes = distinct([frames.shape])
        fits = frame_bytes(self.space.subject, frames.layouts.select(shapes.first), self.kinds) <= self.limit
        frames = frames.select(fits[shapes.place])
        bounds = self._frame_bounds(frames)
        return replace(frames, bounds=bounds).select(np.argsort(bounds, kind="stable"))

    @cached_property
    def thin(self) -> Bounded:
        """The same search among the usual plans only."""
        return replace(self, space=self.space.thin())

    def run(self, below: float = np.inf) -> Found:
        """The best plans that take less than `below` seconds. Nothing found leaves `best` at infinity."""
        return self._run(self.frames, below)

    def within(self, limit: float) -> Found:
        """The fastest plan whose ranks hold no more than `limit` bytes."""
        return replace(self, limit=limit, count=1)._run(self.frames, np.inf)

    def run_beside(self, wanted: Sequence[NDArray[np.bool_]]) -> tuple[Found, Rivals]:
        """The best plans, and the fastest in each of these sets of frames: one search, as most frames serve both."""
        frames = self.frames
        kinds = distinct([mask * 1.0 for mask in wanted]) if wanted else distinct([frames.bounds * 0.0])
        sets = np.array([mask[kinds.first] for mask in wanted], dtype=bool).reshape(len(wanted), len(kinds.first))
        rivals = Rivals(best=np.full(len(kinds.first), np.inf), limit=self.limit, sets=sets)
        return self._run(frames, np.inf, (rivals, kinds.place)), rivals

    def _run(self, frames: Frames, below: float, beside: tuple[Found, Index] | None = None) -> Found:
        count = int(frames.group.max(initial=-1)) + 1
        best = Found(best=np.full(count, np.inf), limit=self.limit, total=float(self.every.below.sum()), ceiling=below)
        found = best
        if beside is not None:
            groups = distinct([frames.group, beside[1]])
            parts = [(best, frames.group[groups.first]), (beside[0], beside[1][groups.first])]
            found = Joint(best=np.empty(len(groups.first)), limit=self.limit, parts=parts)
            frames = replace(frames, group=groups.place)
        if not self.bound:
            self._layer(frames, found)
        elif len(frames):
            self.thin._search(frames, found)
            # The whole space has the usual plans too: whichever search met more, none counts twice.
            usual, found.searched, found.priced = (found.searched, found.priced), 0, 0
            self._search(frames, found, LARGEST)
            found.searched, found.priced = max(usual[0], found.searched), max(usual[1], found.priced)
        best.searched, best.priced = found.searched, found.priced
        return best

    def leanest(self, enough: float = -np.inf) -> Leanest:
        """The plan with the least memory, whether it fits or not; or one that holds no more than `enough` bytes."""
        frames = self.every
        found = Leanest(best=np.full(int(frames.group.max(initial=-1)) + 1, np.inf), limit=np.inf)
        bounds = frame_bytes(self.space.subject, frames.layouts, self.kinds)
        order, size = np.argsort(bounds, kind="stable"), FIRST
        while len(order) and bounds[order[0]] < found.limit > enough:
            self._layer(frames.select(order[:size]), found)
            order, size = order[size:], min(2 * size, LARGEST)
        return found

    def layouts_of(self, setup: Setup) -> Layouts:
        """A plan as layouts of this search."""
        return layouts_of([setup.plan], setup.model, setup.workload)

    def _search(self, frames: Frames, found: Found, size: int = FIRST) -> None:
        """Visit frames, by rising bound and `size` of them first, until none can lead to a plan that is kept."""
        rest = np.arange(len(frames))
        while len(rest):
            thresholds = found.threshold(self.count)
            rest = rest[: np.searchsorted(rest, np.searchsorted(frames.bounds, thresholds.max()))]
            rest = rest[np.less(frames.bounds[rest], thresholds[frames.group[rest]])]
            some, rest = self._tightened(frames.select(rest[: WIDE * size]), found), rest[WIDE * size :]
            for at in range(0, len(some), size):
                part = np.arange(at, min(at + size, len(some)))
                part = part[self._open(some.bounds[part], some.group[part], found)]
                if len(part):
                    self._layer(some.select(part), found)
            size = min(2 * size, LARGEST)

    @property
    def kinds(self) -> Precision:
        """The dtypes of states."""
        return precision(self.space.base, self.space.subject.workload)

    @property
    def _wait(self) -> float:
        """The factor on a step of so many ranks: the same for every plan."""
        return float(waiting(np.array(float(self.space.world)), self.space.subject.constants))

    def _passes(self, p: Layouts, rows: Distinct, *, near: bool = False, paired: bool = False, **fixed: Array) -> Pass:
        """What layers and ends of every plan take, computed once for all that are the same in `rows`.

        With `near` all groups stand on neighbouring ranks; `paired` plans hide dispatch as DualPipe does; columns of
        the Batch can be `fixed` to one value.
        """
        s = self.space.subject
        one = p.select(rows.first)
        one = one.with_(schedule=np.full(len(one), DUALPIPE_V)) if paired else one
        fixed |= dict.fromkeys(STRIDES, np.ones(1)) if near else {}
        parts = []
        for start in range(0, max(len(one), 1), BLOCK):
            part = one.select(np.arange(start, min(start + BLOCK, len(one))))
            dense = self._shared(part, DECIDING_DENSE, dense_kernels)
            routed = self._shared(part, DECIDING_ROUTED, experts) if s.model.experts else None
            parts.append(one_pass(batch_of(s, part, self.kinds, **fixed), s.constants, dense, routed))
        return Pass.joined(parts).select(rows.place)

    def _shared(self, p: Layouts, names: Sequence[str], kernels: Callable[[Batch, Constants], Kernels]) -> Kernels:
        """`kernels` of every plan, computed once for all that agree in the columns `names`."""
        rows = distinct([getattr(p, name) for name in names])
        found = kernels(batch_of(self.space.subject, p.select(rows.first), self.kinds), self.space.subject.constants)
        return found.select(rows.place)

    def _frame_bounds(self, frames: Frames) -> Array:
        """Seconds that no plan of each frame goes below: every choice inside a layer at its best, links at theirs."""
        return self._shape_bounds(frames.layouts, frames.shape)

    def _tightened(self, frames: Frames, found: Found) -> Frames:
        """Of some frames those that can still be kept, by rising bound: a recomputation leaves room for a microbatch,
        and layers take its time.
        """
        bounds, rest = np.full(len(frames), np.inf), np.arange(len(frames))
        split = frames.layouts.with_(sequence_parallel=np.where(frames.layouts.tensor > 1, 1.0, 0.0))
        for again in np.arange(float(len(RECOMPUTE))):
            p = split.select(rest).with_(recompute=np.full(len(rest), again))
            fits = first_rank_bytes(self.space.subject, p, self.kinds) <= found.limit
            some = rest[fits]
            if again == 0:
                # What recomputes nothing is the fastest, and has the bound of its frame.
                bounds[some], rest = frames.bounds[some], rest[~fits]
            elif len(some):
                bounds[some] = np.minimum(bounds[some], self._shape_bounds(p.select(fits), frames.shape[some]))
        keep = np.flatnonzero(self._open(bounds, frames.group, found))
        return replace(frames, bounds=bounds).select(keep[np.argsort(bounds[keep], kind="stable")])

    def _shape_bounds(self, p: Layouts, shape: Index) -> Array:
        """Seconds that no plan of each `shape` with this microbatch and recomputation goes below."""
        shapes, split = distinct([shape]), p.with_(sequence_parallel=np.where(p.tensor > 1, 1.0, 0.0))
        one = split.select(shapes.first)
        alike = distinct([getattr(one, name) for name in DECIDING_DEGREES]).place[shapes.place]
        rows, hidden = distinct([alike, split.microbatch, split.recompute]), self._most_hidden(split)
        # Cutting the sequence saves time on what is wide, and costs a second call and, with some software, a gather.
        work = [
            self._work(q, self._passes(q, rows, near=True, paired=True, overlap_tensor=hidden))
            for q in (split, p.with_(sequence_parallel=0.0 * p.tensor))
        ]
        return self._waited(np.minimum(*work))

    def _most_hidden(self, p: Layouts) -> Array:
        """The largest share of tensor communication that any overlap hides from one of these plans."""
        bits = np.array([0, *self.space.policies], dtype=np.float64)
        one = p.select(np.zeros(len(bits), dtype=np.intp)).with_(overlap=bits, sequence_parallel=np.ones(len(bits)))
        return np.array([hidden_share(self.space.subject, one).max()])

    def _near_bounds(self, p: Layouts, alike: Sequence[Array | Index]) -> Array:
        """Seconds that no plan goes below, all groups on neighbouring ranks; plans `alike` take the same a layer."""
        return self._waited(self._work(p, self._passes(p, distinct(alike), near=True, paired=True)))

    def _waited(self, seconds: Array) -> Array:
        """Of so many seconds in the pipeline, those of the step without anything that depends on states."""
        return (seconds + self.space.subject.constants["step_fixed"]) * self._wait

    def _work(self, p: Layouts, one: Pass) -> Array:
        """Seconds of all microbatches on the mean rank and the least bubble: no schedule and no split goes below.

        A V leaves at least half of the longest third of a microbatch a rank, a loop 1/v of a microbatch.
        """
        layers = float(self.space.subject.model.layers)
        mean = (layers * (one.forward + one.backward) + one.head + one.embedding) / p.pipeline
        loops = np.maximum(np.floor_divide(layers + 2.0, p.pipeline), 1.0)
        idle = (p.pipeline - 1.0) * np.minimum(1.0 / 6.0, 1.0 / loops)
        return (p.microbatches + idle) * mean

    def _layer(self, frames: Frames, found: Found) -> None:
        """Go through every way to run the layers of some frames."""
        q, parent = layered(self.space, frames.layouts)
        group, p = frames.group[parent], frames.layouts
        kinds = distinct([getattr(p, name) for name in (*DECIDING_DEGREES, "microbatch")]).place[parent]
        for start in range(0, len(q), BLOCK):
            part = np.arange(start, min(start + BLOCK, len(q)))
            if self.bound:
                part = self._promising(q, part, kinds, group, found)
            if len(part):
                one = q.select(part)
                alike = distinct([kinds[part], *(getattr(one, name) for name in INSIDE)]).place
                self._place(one, alike, group[part], found)

    def _promising(self, q: Layouts, part: Index, kinds: Index, group: Index, found: Found) -> Index:
        """Of the layered plans `part` those that may fit and be kept, by rising bound."""
        # Recomputing nothing takes the least time: one bound for all that differ in it.
        one = q.select(part)
        light = one.with_(recompute=np.zeros(len(part)))
        bound = self._near_bounds(light, [kinds[part], one.sequence_parallel, one.overlap])
        part = part[self._open(bound, group[part], found)]
        part = part[first_rank_bytes(self.space.subject, q.select(part), self.kinds) <= found.limit]
        one = q.select(part)
        bound = self._near_bounds(one, [kinds[part], *(getattr(one, name) for name in INSIDE)])
        keep = np.flatnonzero(self._open(bound, group[part], found))
        return part[keep[np.argsort(bound[keep], kind="stable")]]

    def _place(self, p: Layouts, alike: Index, group: Index, found: Found) -> None:
        """Go through every placement of some layered plans, and every schedule."""
        every, parent = placed(self.space, p)
        group, alike = group[parent], alike[parent]
        for start in range(0, len(every), BLOCK):
            part = np.arange(start, min(start + BLOCK, len(every)))
            q, where = every.select(part), group[part]
            b = batch_of(self.space.subject, q, self.kinds)
            rows = distinct([alike[part], b.tensor_stride, b.context_stride])
            plain = self._passes(q, rows)
            paired = self._passes(q, rows, paired=True) if self.space.subject.model.experts else plain
            work = self._work(q, paired)
            keep = np.flatnonzero(self._open(self._waited(work), where, found))
            q, where, work = q.select(keep), where[keep], work[keep]
            limit = found.limit if self.bound else np.inf
            ways = Ways(space=self.space, kinds=self.kinds, placed=q, limit=limit)
            found.searched += int((ways.choices.counts * schedules(self.space, q)).sum())
            passes = q.microbatches * self.space.subject.model.layers / q.pipeline
            bound = ways.fastest.floor(work, work, passes) * self._wait
            wide = np.flatnonzero(self._open(bound, where, found))
            if len(wide):
                self._schedule(ways, wide, where, plain.select(keep), paired.select(keep), found)

    def _schedule(self, ways: Ways, wide: Index, group: Index, plain: Pass, paired: Pass, found: Found) -> None:
        """Go through every schedule of the placed plans `wide`; layers take `plain`, or `paired` under DualPipe."""
        s = self.space.subject
        handed = hop(batch_of(s, ways.placed, self.kinds), s.constants)
        for q, at in scheduled(self.space, ways.placed.select(wide), every=not self.bound):
            row = wide[at]
            one = plain.select(row)
            if s.model.experts:
                one = one.where(q.schedule != DUALPIPE_V, paired.select(row))
            b = batch_of(s, q, self.kinds)
            rows = Scheduled.of(q, row, one, handed[row], b, flow(b, s.constants, one, handed[row]))
            fastest = ways.fastest.select(row)
            seconds = fastest.floor(rows.flow.total, rows.streamed, rows.passes) * self._wait
            keep = np.flatnonzero(self._open(seconds, group[row], found))
            if len(keep):
                self._shard(ways, rows.select(keep), seconds[keep], group[row[keep]], found)

    def _shard(self, ways: Ways, rows: Scheduled, bounds: Array, group: Index, found: Found) -> None:
        """Price every way to shard the states of some scheduled plans, the most promising first."""
        shardings = Shardings(ways=ways, rows=rows, wait=self._wait)
        order = np.arange(len(group))
        if self.bound:
            bounds = np.maximum(bounds, shardings.floor())
            order = np.flatnonzero(self._open(bounds, group, found))
            order = order[np.argsort(bounds[order], kind="stable")]
        for at in range(0, len(order), AT_ONCE):
            part = order[at : at + AT_ONCE]
            part = part[self._open(bounds[part], group[part], found)]
            if len(part):
                below = found.threshold(self.count)[group[part]] if self.bound else np.full(len(part), np.inf)
                plans = shardings.priced(part, below)
                found.priced += len(plans.seconds)
                found.keep(plans.seconds, plans.size, group[part][plans.rows.parent], plans.layouts)

    def _open(self, seconds: Array, group: Index, found: Found) -> NDArray[np.bool_]:
        """Which of these bounds can still lead to a plan that is kept."""
        if not self.bound:
            return np.ones(len(seconds), dtype=bool)
        return np.less(seconds, found.threshold(self.count)[group])
