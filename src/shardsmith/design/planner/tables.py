"""Tables: the space multiplied out level by level: frames -> layered -> placed -> scheduled -> sharded plans.

A frame fixes the degrees and the size of a microbatch. The options of a level depend on few columns of the level
above, so they are listed once for many rows, and only multiplied out for rows that a bound has not ruled out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array
from shardsmith.design.cost.layouts import Layouts
from shardsmith.design.planner.space import SHAPE, Index, Space

Options = Sequence[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Frames:
    """Frames as layouts, the row of their shape, and how many plans each stands for."""

    layouts: Layouts
    shape: Index
    below: Array

    def __len__(self) -> int:
        return len(self.shape)

    def select(self, which: NDArray[np.bool_]) -> Frames:
        """The frames that the mask `which` names."""
        return Frames(layouts=self.layouts.select(which), shape=self.shape[which], below=self.below[which])


def frames_of(space: Space) -> Frames:
    """Every frame of `space`."""
    shapes = space.shapes
    found = _expand(shapes[:, 5:6], 2, lambda row: space.cuts(row[0]))
    at, cut = found.parent, found.values
    columns = dict(zip(SHAPE, shapes[at].T, strict=True))
    count, one = len(at), np.ones(len(at))
    layouts = Layouts(
        **columns,
        replicate=one,
        order=one * 0.0,
        zero=one * 0.0,
        per_step=one * 0.0,
        schedule=one,
        stages_per_rank=one,
        weighed=one * 0.0,
        microbatch=cut[:, 0],
        microbatches=cut[:, 1],
        sequence_parallel=one * 0.0,
        recompute=one * 0.0,
        overlap=one * 0.0,
        chunk=np.full(count, float(space.base.loss_chunk or 0)),
    )
    return Frames(layouts=layouts, shape=at, below=_below(space, layouts))


def _below(space: Space, p: Layouts) -> Array:
    """Plans that each frame stands for."""
    keys = np.stack([p.tensor, p.context, p.data, p.pipeline, p.microbatches, p.expert * p.expert_tensor], axis=1)
    unique, place = distinct(keys)
    counts = [
        len(space.placements((t, c, d, n)))
        * sum(len(space.pipelines(n, m, overlap)) for _, _, overlap in space.inner(t, c))
        * len(space.sharding(t, c, d, e))
        for t, c, d, n, m, e in unique.astype(int).tolist()
    ]
    return np.array(counts, dtype=float)[place]


def distinct(rows: Array) -> tuple[Array, Index]:
    """The different ones among `rows` of whole numbers, and which of them each row is."""
    code = np.zeros(len(rows), dtype=np.int64)
    for column in rows.T.astype(np.int64):
        _, code = np.unique(code * (int(column.max(initial=0)) + 1) + column, return_inverse=True)
    _, first, place = np.unique(code, return_index=True, return_inverse=True)
    return rows[first], place.reshape(-1)


@dataclass(frozen=True, kw_only=True)
class Expanded:
    """Rows multiplied out: the row that each came from, and the option that it takes."""

    parent: Index
    values: Array


def _expand(rows: Array, width: int, options: Callable[[list[int]], Options]) -> Expanded:
    """Each row of whole numbers with each of its options of `width` numbers, in order."""
    unique, place = distinct(rows)
    lists = [options(row) for row in unique.astype(int).tolist()]
    flat = np.array([entry for found in lists for entry in found], dtype=float).reshape(-1, width)
    sizes = np.array([len(found) for found in lists], dtype=np.intp)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp) if len(sizes) else sizes
    counts = sizes[place] if len(place) else np.empty(0, dtype=np.intp)
    parent = np.repeat(np.arange(len(place)), counts)
    within = np.arange(len(parent)) - np.repeat(np.cumsum(counts) - counts, counts)
    values = flat[np.repeat(starts[place], counts) + within] if len(parent) else flat[:0]
    return Expanded(parent=parent, values=values)


def layered(space: Space, p: Layouts) -> tuple[Layouts, Index]:
    """Layouts with each way to run a layer, and the row that each came from."""
    found = _expand(np.stack([p.tensor, p.context], axis=1), 3, lambda row: space.inner(*row))
    split, again, overlap = found.values.T
    out = replace(p.select(found.parent), sequence_parallel=split, recompute=again, overlap=overlap)
    return out, found.parent


def placed(space: Space, p: Layouts) -> tuple[Layouts, Index]:
    """Layouts in each placement that differs, and the row that each came from."""
    keys = np.stack([p.tensor, p.context, p.data, p.pipeline], axis=1)
    found = _expand(keys, 1, lambda row: [(i,) for i in space.placements(row)])
    return replace(p.select(found.parent), order=found.values[:, 0]), found.parent


def scheduled(space: Space, p: Layouts) -> tuple[Layouts, Index]:
    """Layouts under each schedule, and the row that each came from."""
    keys = np.stack([p.pipeline, p.microbatches, p.overlap], axis=1)
    found = _expand(keys, 3, lambda row: space.pipelines(*row))
    schedule, each, weighed = found.values.T
    out = replace(p.select(found.parent), schedule=schedule, stages_per_rank=each, weighed=weighed)
    return out, found.parent


def sharded(space: Space, p: Layouts) -> tuple[Layouts, Index]:
    """Layouts at each ZeRO level, gathering and number of replicas, and the row that each came from."""
    keys = np.stack([p.tensor, p.context, p.data, p.expert * p.expert_tensor], axis=1)
    found = _expand(keys, 3, lambda row: space.sharding(*row))
    zero, step, copies = found.values.T
    return replace(p.select(found.parent), zero=zero, per_step=step, replicate=copies), found.parent


def everything(space: Space) -> Layouts:
    """Every plan of a small space, multiplied out: for tests and for a search without bounds."""
    p, _ = layered(space, frames_of(space).layouts)
    p, _ = placed(space, p)
    p, _ = scheduled(space, p)
    return sharded(space, p)[0]


def joined(parts: Sequence[Layouts]) -> Layouts:
    """Layouts one after another."""
    return Layouts(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Layouts)})
