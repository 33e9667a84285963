"""Learning-rate schedules: a function of the number of optimiser steps done, and of nothing else."""

from __future__ import annotations

import math

from shardsmith.specs.job import Optimisation


def learning_rate(settings: Optimisation, done: int, steps: int) -> float:
    """The rate of the optimiser step after `done` others, in a run of `steps`.

    All schedules rise linearly over `warmup_steps` (the last of them has the full rate) and end at `min_lr`:
    `linear` and `cosine` (Loshchilov and Hutter 2017) fall over `decay_steps` right after the warm-up
    (default: the rest of the run); `wsd` stays constant until the last `decay_steps` (default: a tenth of the
    run, rounded up) and falls linearly over those (warm-up, stable, decay; Hu et al. 2024).
    """
    if done < settings.warmup_steps:
        return settings.lr * (done + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    length = decay_length(settings, steps)
    begin = max(settings.warmup_steps, steps - length) if settings.schedule == "wsd" else settings.warmup_steps
    fallen = min(1.0, max(0, done - begin) / length) if length else 1.0
    left = 0.5 * (1.0 + math.cos(math.pi * fallen)) if settings.schedule == "cosine" else 1.0 - fallen
    return settings.min_lr + (settings.lr - settings.min_lr) * left


def decay_length(settings: Optimisation, steps: int) -> int:
    """Over how many steps the rate falls, in a run of `steps`."""
    if settings.decay_steps is not None:
        return settings.decay_steps
    return -(-steps // 10) if settings.schedule == "wsd" else max(0, steps - settings.warmup_steps)
