"""What a schedule costs, over arrays: the bubble for any times of F, I and W, and what a rank holds in flight.

The closed forms of `schedule.orders` say what is exact; this page continues them to unequal times and to any number
of microbatches, never below what playing the order gives.
"""

from __future__ import annotations

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
    others, whole = pipeline - 1.0, f + i + w
    rest = np.mod(microbatches, pipeline)
    missing = np.where(schedule == INTERLEAVED, np.where(rest > 0, pipeline - rest, 0.0), pipeline - microbatches)
    looped = (others + np.maximum(missing, 0.0) * (stages - 1.0)) * whole / stages
    filled = np.minimum(microbatches, pipeline) - 1.0
    # With few microbatches the weight gradients that exist fill the wait, one a microbatch.
    split = np.where(
        microbatches < pipeline, others * (f + i) - filled * np.minimum(w, i), others * (f + np.maximum(i - w, 0.0))
    )
    longest = np.maximum(np.maximum(f, i), np.maximum(w, 2.0 * (i - w)))
    vee = np.where(microbatches < 2.0 * pipeline, split, others * longest / 2.0)
    paired = others * np.maximum(f, (f + 2.0 * i - w) / 2.0)
    found = others * whole
    for which, idle in (
        (INTERLEAVED, looped),
        (LOOPED, looped),
        (ZB_H1, split),
        (ZB_V, vee),
        (DUALPIPE_V, paired),
    ):
        found = np.where(schedule == which, idle, found)
    return np.where(pipeline > 1, found, 0.0)


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
