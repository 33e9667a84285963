"""Dry runs of many plans, each beside what the closed forms say of the same rank."""

from __future__ import annotations

from collections.abc import Mapping

from shardsmith.design.footprint.record import computed
from shardsmith.engine.dryrun.rank import dry_run_rank
from shardsmith.engine.runtime import environment
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.layout.record import Compared
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Optimisation


def compared_all(plans: Mapping[str, tuple[Setup, float]]) -> dict[str, Compared]:
    """The first rank of every second of `plans`, which come with their imbalance, and the last one of the others."""
    shares = run_forked(_share, 2, list(plans.items()), join=False, timeout_s=400)
    return {name: one for share in shares for name, one in share.items()}


def _share(plans: list[tuple[str, tuple[Setup, float]]]) -> dict[str, Compared]:
    """Each of two processes runs one kind of rank."""
    last = environment.detect().rank
    found = {}
    for name, (setup, imbalance) in plans[last::2]:
        run = dry_run_rank(setup, (setup.plan.world - 1) * last, Optimisation(), imbalance=imbalance)
        found[name] = Compared(run=run, model=computed(setup, run.rank, imbalance=imbalance))
    return found
