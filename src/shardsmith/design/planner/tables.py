"""Tables: the space multiplied out level by level: frames -> layered -> placed -> scheduled -> sharded plans.

A frame fixes the degrees and the size of a microbatch. The options of a level depend on few columns of the level
above, so they are listed once for many rows, and only multiplied out for rows that a bound has not ruled out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array
from shardsmith.design.cost.layouts import COLUMNS, Layouts
from shardsmith.design.planner.space import DEGREES, SHAPE, Index, Space

BLOCK = 12_000
"""Plans priced at once: what they need stays in the cache of one core."""

Options = Sequence[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Frames:
    """Frames as layouts, the number of their `shape`, the `group` of degrees that each belongs to, how many plans it
    stands for, and the seconds that none of them goes below (`bounds`, 0 where nobody has looked).
    """

    layouts: Layouts
    shape: Index
    group: Index
    below: Array
    bounds: Array

    def __len__(self) -> int:
        return len(self.group)

    def select(self, which: NDArray[np.bool_] | Index) -> Frames:
        """The frames that `which` names, in its order."""
        return Frames(
            layouts=self.layouts.select(which),
            shape=self.shape[which],
            group=self.group[which],
            below=self.below[which],
            bounds=self.bounds[which],
        )


def frames_of(space: Space) -> Frames:
    """Every frame of `space`, those of a shape together, the smallest microbatch first."""
    shapes = dict(zip(SHAPE, space.shapes.T, strict=True))
    found = choices([shapes["data"]], 2, lambda row: space.cuts(row[0]))
    at, entry = found.expand()
    rest = dict.fromkeys([name for name in COLUMNS if name not in SHAPE], np.zeros(len(space.shapes)))
    rest |= dict.fromkeys(("replicate", "schedule", "stages_per_rank"), np.ones(len(space.shapes)))
    rest["chunk"] = np.full(len(space.shapes), float(space.base.loss_chunk or 0))
    each = Layouts(**rest | shapes)
    layouts = each.select(at).with_(microbatch=found.values[entry, 0], microbatches=found.values[entry, 1])
    group = distinct([shapes[name] for name in DEGREES]).place[at]
    below = _ends(space, each)[at] * _ways(space, layouts)
    return Frames(layouts=layouts, shape=at, group=group, below=below, bounds=np.zeros(len(at)))


def _ends(space: Space, p: Layouts) -> Array:
    """Placements of each shape, times ways to shard its states."""
    placed = choices([p.tensor, p.context, p.data, p.pipeline], 1, lambda row: [(i,) for i in space.placements(row)])
    return np.asarray(placed.counts * sharded(space, p)[0].counts, dtype=np.float64)


def _ways(space: Space, p: Layouts) -> Array:
    """Ways to run the layers of each frame, with every schedule that goes with each."""
    layers = choices([p.tensor, p.context, np.mod(p.microbatch, 2)], 3, lambda row: space.inner(*row))
    cut, ways = distinct([p.pipeline, p.microbatches]), np.zeros(len(p))
    sizes = [p.pipeline[cut.first].astype(int).tolist(), p.microbatches[cut.first].astype(int).tolist()]
    for overlap in np.unique(layers.values[:, 2]).astype(int).tolist():
        alike = layers.sums(layers.values[:, 2] == overlap)
        ways += alike * np.array([len(space.pipelines(n, m, overlap)) for n, m in zip(*sizes, strict=True)])[cut.place]
    return ways


@dataclass(frozen=True, kw_only=True)
class Distinct:
    """The different ones of some rows: the `first` row of each, and the `place` among them of every row."""

    first: Index
    place: Index


def distinct(columns: Sequence[NDArray[Any]]) -> Distinct:
    """The different rows of `columns`, which hold whole numbers from 0 on. Sorts nothing where numbers are small."""
    code, kinds = np.zeros(len(columns[0]), dtype=np.intp), 1
    for column in columns:
        number = column.astype(np.intp)
        place, count = _ranked(number, int(number.max(initial=0)) + 1)
        if count > 1:
            code, kinds = code * count + place, kinds * count
        if kinds > LARGEST_CODE:
            code, kinds = _ranked(code, kinds)
    place, count = _ranked(code, kinds)
    first = np.empty(count, dtype=np.intp)
    first[place[::-1]] = np.arange(len(place))[::-1]
    return Distinct(first=first, place=place)


LARGEST_CODE = 2**40
"""A code of several columns stays below this times the number of one column's values, so that it fits 64 bits."""


def _ranked(number: Index, limit: int) -> tuple[Index, int]:
    """The rank of each of these numbers below `limit` among the different ones, and how many those are."""
    if limit > 8 * len(number) + 4096:
        found, place = np.unique(number, return_inverse=True)
        return place.reshape(-1), len(found)
    there = np.zeros(limit, dtype=np.intp)
    there[number] = 1
    ranks = np.cumsum(there)
    return ranks[number] - 1, int(ranks[-1]) if limit else 0


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The options of many rows, listed once for all rows that have the same.

    Options stand in `values`, one a row; those of the `owner`-th kind of rows are `sizes[owner]` from `starts[owner]`
    on. `rows` says which are the different rows and of which kind each is.
    """

    rows: Distinct
    values: Array
    sizes: Index
    starts: Index

    @property
    def counts(self) -> Index:
        """Options of each row."""
        return self.sizes[self.rows.place]

    @property
    def owner(self) -> Index:
        """The kind of rows of every option."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def expand(self, which: Index | slice = slice(None)) -> tuple[Index, Index]:
        """The rows `which` with each of their options: position in `which`, and row of `values`."""
        return self.expand_kinds(self.rows.place[which])

    def expand_kinds(self, kinds: Index) -> tuple[Index, Index]:
        """As `expand`, of rows of these `kinds`."""
        counts = self.sizes[kinds]
        parent = np.repeat(np.arange(len(kinds)), counts)
        # Where the options of each begin, less what stands before them here.
        return parent, np.repeat(self.starts[kinds] - np.cumsum(counts) + counts, counts) + np.arange(len(parent))

    def sums(self, of: NDArray[np.bool_] | Array) -> Array:
        """The sum of `of`, a number an option, over the options of each row."""
        found = np.bincount(self.owner, weights=of, minlength=len(self.sizes))
        return np.asarray(found[self.rows.place], dtype=np.float64)


def choices(columns: Sequence[Array], width: int, options: Callable[[list[int]], Options]) -> Choices:
    """The options, of `width` numbers each, of rows of whole numbers."""
    rows = distinct(columns)
    kinds = np.stack([column[rows.first] for column in columns], axis=1).astype(int).tolist()
    lists = [options(kind) for kind in kinds]
    sizes = np.array([len(found) for found in lists], dtype=np.intp)
    values = np.array([entry for found in lists for entry in found], dtype=float).reshape(-1, width)
    return Choices(rows=rows, values=values, sizes=sizes, starts=np.cumsum(sizes) - sizes)


def layered(space: Space, p: Layouts) -> tuple[Layouts, Index]:
    """Layouts with each way to run a layer, and the row that each came from."""
    found = choices([p.tensor, p.context, np.mod(p.microbatch, 2)], 3, lambda row: space.inner(*row))
    parent, entry = found.expand()
    split, again, overlap = found.values[entry].T
    return p.select(parent).with_(sequence_parallel=split, recompute=again, overlap=overlap), parent


def placed(space: Space, p: Layouts) -> tuple[Layouts, Index]:
    """Layouts in each placement that differs, and the row that each came from."""
    keys = [p.tensor, p.context, p.data, p.pipeline]
    found = choices(keys, 1, lambda row: [(i,) for i in space.placements(row)])
    parent, entry = found.expand()
    return p.select(parent).with_(order=found.values[entry, 0]), parent


def scheduled(space: Space, p: Layouts, *, every: bool = True) -> Iterator[tuple[Layouts, Index]]:
    """Layouts under each schedule, or under each that can be the best one, some rows at a time, and the row that each
    came from.
    """
    options = space.pipelines if every else space.contenders
    found = choices([p.pipeline, p.microbatches, p.overlap], 3, lambda row: options(*row))
    for part in parts_of(found.counts):
        parent, entry = found.expand(part)
        schedule, each, weighed = found.values[entry].T
        rows = parent + part.start
        yield p.select(rows).with_(schedule=schedule, stages_per_rank=each, weighed=weighed), rows


def schedules(space: Space, p: Layouts) -> Index:
    """How many schedules each layout can have."""
    rows = distinct([p.pipeline, p.microbatches, p.overlap])
    kinds = np.stack([column[rows.first] for column in (p.pipeline, p.microbatches, p.overlap)], axis=1)
    counts = [len(space.pipelines(*kind)) for kind in kinds.astype(int).tolist()]
    return np.array(counts, dtype=np.intp)[rows.place]


def parts_of(counts: Index) -> Iterator[slice]:
    """Slices of rows that make about `BLOCK` options together, of `counts` each."""
    ends, start = np.cumsum(counts), 0
    while start < len(counts):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + BLOCK, side="right")))
        yield slice(start, stop)
        start = stop


def sharded(space: Space, p: Layouts, *also: Array) -> tuple[Choices, Layouts]:
    """The ways to shard the states of some plans, as choices of kinds of plans, and as layouts of one of each kind.

    Plans of a kind agree in the degrees that decide the options, and in the columns `also`.
    """
    keys = [p.tensor, p.context, p.data, p.expert * p.expert_tensor, *also]
    found = choices(keys, 3, lambda row: space.sharding(*row[:4]))
    return found, with_options(p.select(found.rows.first[found.owner]), found.values)


def with_options(p: Layouts, values: Array) -> Layouts:
    """Plans with ZeRO level, gathering and number of replicas as `values` say, one row a plan."""
    zero, step, copies = values.T
    return p.with_(zero=zero, per_step=step, replicate=copies)


def everything(space: Space) -> Layouts:
    """Every plan of a small space, multiplied out: for tests."""
    p, _ = layered(space, frames_of(space).layouts)
    p, _ = placed(space, p)
    p = joined([part for part, _ in scheduled(space, p)])
    found, _ = sharded(space, p)
    parent, entry = found.expand()
    return with_options(p.select(parent), found.values[entry])


def joined(parts: Sequence[Layouts]) -> Layouts:
    """Layouts one after another."""
    return Layouts(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS})
