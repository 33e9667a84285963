"""Dry runs of several ranks, shared among forked processes: each rank is alone on fake tensors, so any number fits."""

from __future__ import annotations

import os
from collections.abc import Sequence

from shardsmith.engine.dryrun.rank import dry_run_rank
from shardsmith.engine.runtime import environment
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.layout.record import StepRecord
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Optimisation


def dry_run(
    setup: Setup,
    ranks: Sequence[int],
    optimisation: Optimisation | None = None,
    *,
    imbalance: float = 1.0,
    workers: int | None = None,
    timeout_s: float = 3600.0,
) -> list[StepRecord]:
    """The record of one step of each of the global `ranks` of a sound plan, in their order.

    Of a model with experts, those of each of these ranks receive `imbalance` times the mean (see `layout.routing`).
    `workers` processes (as many as there are CPUs) take the ranks in turn. Raises `RankFailed` with the error of
    the first that failed, or after `timeout_s`.
    """
    count = min(len(ranks), workers or len(os.sched_getaffinity(0)))
    shares = run_forked(
        _share, count, setup, tuple(ranks), optimisation or Optimisation(), imbalance, timeout_s=timeout_s, join=False
    )
    by_rank = {record.rank: record for share in shares for record in share}
    return [by_rank[rank] for rank in ranks]


def _share(setup: Setup, ranks: tuple[int, ...], optimisation: Optimisation, imbalance: float) -> list[StepRecord]:
    """The records of those `ranks` that are this worker's."""
    worker = environment.detect()
    mine = ranks[worker.rank :: worker.world]
    return [dry_run_rank(setup, rank, optimisation, imbalance=imbalance) for rank in mine]
