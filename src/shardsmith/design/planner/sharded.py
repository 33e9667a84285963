"""Sharded: every way to spread the states of plans, priced from parts that many of them share.

Seconds of gathers and reductions depend on degrees and placement, bytes of states on the split of the layers as well;
what goes through the pipeline and what microbatches hold depends on the scheduled plan. Each is computed once, and a
plan is a sum of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array, Batch, Columns
from shardsmith.design.cost.held import kept_layer, moving, states, with_reserve, without_reserve
from shardsmith.design.cost.layouts import Layouts, batch_of
from shardsmith.design.cost.price import decisive, share_of
from shardsmith.design.cost.schedules import DUALPIPE_V, ZB_V
from shardsmith.design.cost.step import Flow, Pass, Sharding, data_exposed, flow, sharding, with_gathers
from shardsmith.design.planner.space import Index, Space
from shardsmith.design.planner.tables import Choices, Distinct, distinct, sharded, with_options
from shardsmith.plan.precision import Precision

ROUNDING = 1024.0
"""Bytes that a bound on bytes allows for sums that are rounded."""


@dataclass(frozen=True, kw_only=True)
class Ways:
    """The ways to shard the states of `placed` plans, and what each of them costs; one kind of plans shares its ways.

    Gathers and reductions layer by layer (`streams`) only lengthen the passes, and so the slowest rank's work, by
    `longer` a layer: all that no overlap hides. `after` comes on top at the end of a step, at the least.
    """

    space: Space
    kinds: Precision
    placed: Layouts

    @cached_property
    def _table(self) -> tuple[Choices, Layouts]:
        p = self.placed
        return sharded(self.space, p, p.pipeline, p.replicate_kv, p.expert, p.expert_tensor, p.order)

    @property
    def choices(self) -> Choices:
        """The options of each placed plan."""
        return self._table[0]

    @cached_property
    def spread(self) -> Sharding:
        """Seconds of every option."""
        s = self.space.subject
        return sharding(batch_of(s, self._table[1], self.kinds), s.constants)

    @cached_property
    def streams(self) -> NDArray[np.bool_]:
        """Options that gather or reduce each microbatch."""
        return np.greater(self.spread.gather + self.spread.reduce, 0.0)

    @cached_property
    def longer(self) -> Array:
        """Seconds by which every option lengthens a layer's passes, at the least."""
        hidden = self.space.subject.columns["overlap_shard"]
        return (1.0 - hidden) * (2.0 * self.spread.gather + self.spread.reduce)

    @cached_property
    def after(self) -> Array:
        """Seconds that every option takes at the end of a step, at the least."""
        hidden = self.space.subject.columns["overlap_data"]
        return self.spread.update + self.spread.tied + (1.0 - hidden) * self.spread.left

    @cached_property
    def kept(self) -> tuple[Array, Array]:
        """Bytes that a layer of each placed plan keeps for a microbatch's backward, as recomputed and in full."""
        s, p = self.space.subject, self.placed
        return kept_layer(s, p, batch_of(s, p, self.kinds))

    @cached_property
    def _least(self) -> tuple[Array, Array, Array]:
        """Of each kind: the least `after` without and with streams, and the least `longer` of those that stream."""
        never, often = np.where(self.streams, np.inf, self.after), np.where(self.streams, self.after, np.inf)
        longer = self.choices.least(np.where(self.streams, self.longer, np.inf))
        # Where no option streams, `often` is infinite already.
        return self.choices.least(never), self.choices.least(often), np.where(np.isfinite(longer), longer, 0.0)

    def floor(self, row: Index | slice, whole: Array, streamed: Array, passes: Array) -> Array:
        """Seconds that no way to shard the plans `row` goes below: `whole` ones in the pipeline without streams, and
        at least `streamed` with them, of which `passes` layers become longer.
        """
        kind = self.choices.rows.place[row]
        never, often, longer = self._least
        return np.minimum(whole + never[kind], streamed + passes * longer[kind] + often[kind])


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """Scheduled plans, each from `row` of the placed ones: their layers' `one`, the seconds `handed` from stage to
    stage, their `flow`, and in parts the floor of it: `streamed` seconds, and `passes` layers that can get longer.
    """

    layouts: Layouts
    row: Index
    one: Pass
    handed: Array
    flow: Flow
    streamed: Array
    passes: Array

    @classmethod
    def of(cls, layouts: Layouts, row: Index, one: Pass, handed: Array, b: Batch, flow: Flow) -> Scheduled:
        """With the floor of `flow`: longer passes shorten nothing but the ends' part of the bubble."""
        layers = (b.layers - b.fullest) * (one.forward + one.backward)
        others = np.maximum(b.pipeline * flow.mean - flow.slowest, 1e-30)
        floor = b.microbatches * flow.slowest + flow.passing + flow.idle * np.minimum(layers / others, 1.0)
        passes = b.microbatches * np.minimum(b.fullest, b.last)
        return cls(layouts=layouts, row=row, one=one, handed=handed, flow=flow, streamed=floor, passes=passes)

    def select(self, which: Index) -> Scheduled:
        """The plans that `which` names, in its order."""
        return Scheduled(
            layouts=self.layouts.select(which),
            row=self.row[which],
            one=self.one.select(which),
            handed=self.handed[which],
            flow=self.flow.select(which),
            streamed=self.streamed[which],
            passes=self.passes[which],
        )


@dataclass(frozen=True, kw_only=True)
class Shardings:
    """Every way to shard the states of the plans `rows`; `wait` is the factor on a step of this many ranks."""

    ways: Ways
    rows: Scheduled
    wait: float

    @cached_property
    def _split(self) -> tuple[Distinct, Index]:
        """Rows by kind and split of the layers, and the kind of each."""
        p, s = self.rows.layouts, self.ways.space.subject
        folded = (p.schedule == ZB_V) | (p.schedule == DUALPIPE_V)
        kind = self.ways.choices.rows.place[self.rows.row]
        rows = distinct([kind, s.split.rows(p), folded])
        return rows, kind[rows.first]

    @cached_property
    def _starts(self) -> Index:
        """Where the states of each kind and split begin in `_states`, whose options stand in the order of its kind."""
        sizes = self.ways.choices.sizes[self._split[1]]
        return np.cumsum(sizes) - sizes

    @cached_property
    def _states(self) -> list[Array]:
        """Bytes of states of every option of every kind and split, on each decisive rank."""
        s, (rows, kind), choices = self.ways.space.subject, self._split, self.ways.choices
        parent, entry = choices.expand_kinds(kind)
        p = with_options(self.rows.layouts.select(rows.first[parent]), choices.values[entry])
        return [states(s, p, self.ways.kinds, share_of(s, p, where)).total for where in decisive(s.model)]

    @cached_property
    def _moving(self) -> list[Array]:
        """Bytes that microbatches of every row hold, on each decisive rank."""
        s, p = self.ways.space.subject, self.rows.layouts
        kept = self.ways.kept[0][self.rows.row], self.ways.kept[1][self.rows.row]
        return [moving(s, p, share_of(s, p, where), kept).total for where in decisive(s.model)]

    @cached_property
    def _by_bytes(self) -> tuple[Array, Array, Array, Array]:
        """For every kind and split (rows), by rising bytes of states on the first rank: those bytes, and of all options
        up to there the least `after` without and with streams, and the least `longer`.
        """
        choices, (_, kind) = self.ways.choices, self._split
        parent, entry = choices.expand_kinds(kind)
        place = parent, np.arange(len(parent)) - self._starts[parent]
        empty = np.full((len(kind), int(choices.sizes.max())), np.inf)
        size, never, often, longer = (empty.copy() for _ in range(4))
        streams, after = self.ways.streams[entry], self.ways.after[entry]
        size[place] = self._states[0]
        never[place], often[place] = np.where(streams, np.inf, after), np.where(streams, after, np.inf)
        longer[place] = np.where(streams, self.ways.longer[entry], np.inf)
        order = np.argsort(size, axis=1, kind="stable")
        never, often, longer = (
            np.minimum.accumulate(np.take_along_axis(column, order, axis=1), axis=1)
            for column in (never, often, longer)
        )
        return np.take_along_axis(size, order, axis=1), never, often, np.where(np.isfinite(longer), longer, 0.0)

    def floor(self, limit: float) -> Array:
        """Seconds that no plan of each row goes below whose first rank holds at most `limit` bytes; infinite where all
        hold more.
        """
        size, never, often, longer = self._by_bytes
        place, width = self._split[0].place, size.shape[1]
        # One sorted list of all kinds: each stands a distance from the one before that no rank's bytes reach.
        far = 2.0**46
        room = np.clip(without_reserve(limit) - self._moving[0] + ROUNDING, -1.0, far / 2.0)
        steps = np.minimum(size, far - 1.0) + far * np.arange(len(size))[:, None]
        found = np.searchsorted(steps.ravel(), far * place + room, side="right") - width * place
        at = place, np.maximum(found - 1, 0)
        rows = self.rows
        seconds = np.minimum(rows.flow.total + never[at], rows.streamed + rows.passes * longer[at] + often[at])
        return np.where(found > 0, seconds, np.inf) * self.wait

    def priced(self, which: Index, below: Array, limit: float) -> Sharded:
        """Of the plans of the rows `which` those that hold no more than `limit` bytes and whose own bound is `below`
        what a plan of their row must beat.
        """
        ways, rows = self.ways, self.rows
        kind, place = ways.choices.rows.place[rows.row[which]], self._split[0].place[which]
        parent, entry = ways.choices.expand_kinds(kind)
        at = entry + (self._starts[place] - ways.choices.starts[kind])[parent]
        found = _Rows(parent=parent, row=which[parent], entry=entry, at=at)
        # Most plans hold too much on the first rank already.
        size = self._held(0, found)
        keep = np.flatnonzero(size <= limit)
        found, size = found.select(keep), size[keep]
        streamed = rows.streamed[found.row] + rows.passes[found.row] * ways.longer[found.entry]
        whole = np.where(ways.streams[found.entry], streamed, rows.flow.total[found.row])
        keep = np.flatnonzero((whole + ways.after[found.entry]) * self.wait < below[found.parent])
        found, size = found.select(keep), size[keep]
        for where in range(1, len(self._states)):
            size = np.maximum(size, self._held(where, found))
        keep = np.flatnonzero(size <= limit)
        found, size = found.select(keep), size[keep]
        seconds = self._seconds(found.row, found.entry)
        return Sharded(shardings=self, rows=found, seconds=seconds, size=size)

    def _held(self, where: int, found: _Rows) -> Array:
        """Bytes of plans on a decisive rank."""
        return with_reserve(self._states[where][found.at] + self._moving[where][found.row])

    def _seconds(self, row: Index, entry: Index) -> Array:
        s, rows, spread = self.ways.space.subject, self.rows, self.ways.spread.select(entry)
        total = rows.flow.total[row]
        whole = (rows.one.forward + rows.one.backward)[row]
        streams = np.flatnonzero(self.ways.streams[entry])
        if len(streams):
            some = rows.select(row[streams])
            b = batch_of(s, some.layouts, self.ways.kinds)
            one = with_gathers(b, s.constants, some.one, spread.select(streams))
            total[streams] = flow(b, s.constants, one, some.handed).total
            whole[streams] = one.forward + one.backward
        b = batch_of(s, rows.layouts.select(row), self.ways.kinds)
        seconds: Array = (total + data_exposed(b, s.constants, whole, spread) + spread.update) * self.wait
        return seconds


@dataclass(frozen=True, kw_only=True)
class _Rows(Columns):
    """Plans as their row with one of its options: `parent` is the place of the row among those asked for, `entry` the
    row of the options' values, `at` that of their states.
    """

    parent: Index
    row: Index
    entry: Index
    at: Index


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """Plans with their seconds and the bytes of their fullest rank."""

    shardings: Shardings
    rows: _Rows
    seconds: Array
    size: Array

    def layouts(self, which: Index) -> Layouts:
        """The plans that `which` names."""
        found, rows = self.shardings, self.rows.select(which)
        return with_options(found.rows.layouts.select(rows.row), found.ways.choices.values[rows.entry])
