"""What a schedule costs, over arrays: the bubble for any times of F, I and W, and what a rank holds in flight.

The closed forms of `schedule.orders` say what is exact; this page continues them to unequal times and to any number
of microbatches, never below what playing the order gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shardsmith.design.cost.batch import Array

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "looped_bfs", "zb_h1", "zb_v", "dualpipe_v")
"""Schedules by index."""
GPIPE, ONE_F_ONE_B, INTERLEAVED, LOOPED, ZB_H1, ZB_V, DUALPIPE_V = map(float, range(len(SCHEDULES)))


def bubble(schedule: Array, pipeline: Array, microbatches: Array, stages: Array, f: Array, i: Array, w: Array) -> Array:
    """Idle time of a rank in a step, in the unit of f, i and w: one microbatch through all `stages` of a rank.

    0 without a pipeline. gpipe and 1F1B (P-1)(F+I+W); loops that over v, and more where the last group of an
    interleaved order is not full, or a breadth-first one has fewer microbatches than ranks.
    """
    every = _Cases(*np.broadcast_arrays(schedule, pipeline, microbatches, stages, f, i, w))
    found: Array = (every.pipeline - 1.0) * every.whole
    for which, idle in _IDLE:
        rows = np.flatnonzero(np.isin(every.schedule, which))
        if len(rows):
            found[rows] = idle(_Cases(*(column[rows] for column in every)))
    return np.where(pipeline > 1, found, 0.0)


class _Cases(NamedTuple):
    schedule: Array
    pipeline: Array
    microbatches: Array
    stages: Array
    f: Array
    i: Array
    w: Array

    @property
    def whole(self) -> Array:
        """One microbatch through a rank."""
        return self.f + self.i + self.w


def _looped(c: _Cases) -> Array:
    rest = np.mod(c.microbatches, c.pipeline)
    unfilled = np.where(rest > 0, c.pipeline - rest, 0.0)
    missing = np.where(c.schedule == INTERLEAVED, unfilled, np.maximum(c.pipeline - c.microbatches, 0.0))
    return (c.pipeline - 1.0 + missing * (c.stages - 1.0)) * c.whole / c.stages


def _split(c: _Cases) -> Array:
    others, filled = c.pipeline - 1.0, np.minimum(c.microbatches, c.pipeline) - 1.0
    # With few microbatches the weight gradients that exist fill the wait, one a microbatch.
    few = others * (c.f + c.i) - filled * np.minimum(c.w, c.i)
    return np.where(c.microbatches < c.pipeline, few, others * (c.f + np.maximum(c.i - c.w, 0.0)))


def _vee(c: _Cases) -> Array:
    longest = np.maximum(np.maximum(c.f, c.i), np.maximum(c.w, 2.0 * (c.i - c.w)))
    return np.where(c.microbatches < 2.0 * c.pipeline, _split(c), (c.pipeline - 1.0) * longest / 2.0)


def _paired(c: _Cases) -> Array:
    return (c.pipeline - 1.0) * np.maximum(c.f, (c.f + 2.0 * c.i - c.w) / 2.0)


_IDLE: tuple[tuple[tuple[float, ...], Callable[[_Cases], Array]], ...] = (
    ((INTERLEAVED, LOOPED), _looped),
    ((ZB_H1,), _split),
    ((ZB_V,), _vee),
    ((DUALPIPE_V,), _paired),
)
"""Idle time under the schedules that do not wait as 1F1B does."""


def in_flight(schedule: Array, pipeline: Array, microbatches: Array, stages: Array, rank: Array) -> Array:
    """Most (stage, microbatch) pairs that pipeline `rank` holds at once, deferred weight gradients included.

    One pair is one of the rank's `stages`: with v of them, 1/v of its layers.
    """
    every = microbatches * stages
    first = pipeline - rank
    found = np.where(schedule == ONE_F_ONE_B, np.minimum(first, every), every)
    warm = (stages - 1.0) * pipeline + 2.0 * (first - 1.0) + 1.0
    found = np.where(schedule == INTERLEAVED, np.minimum(warm, every), found)
    found = np.where(schedule == ZB_H1, np.minimum(pipeline, every), found)
    found = np.where(schedule == ZB_V, np.minimum(2.0 * pipeline, every), found)
    return np.where(schedule == DUALPIPE_V, np.minimum(2.0 * pipeline + 1.0, every), found)


def as_fast(schedule: int, pipeline: int, microbatches: int) -> int | None:
    """The schedule that takes exactly as long as another with the same stages, and never holds more; None if none."""
    if schedule == GPIPE:
        return int(ONE_F_ONE_B)
    if schedule == LOOPED and microbatches % pipeline == 0:
        return int(INTERLEAVED)
    return None
