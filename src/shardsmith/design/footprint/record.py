"""A step of one rank, computed: what a dry run finds by running it."""

from __future__ import annotations

from shardsmith.design.footprint.step import footprint
from shardsmith.layout.collectives import collectives
from shardsmith.layout.flops import rank_flops
from shardsmith.layout.record import StepRecord
from shardsmith.layout.routing import StatedRouting
from shardsmith.plan.mesh import mesh_of
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import settled


def computed(setup: Setup, rank: int, *, imbalance: float = 1.0) -> StepRecord:
    """Memory, collectives and FLOPs of global `rank` in one step of a legal plan, with AdamW.

    Experts of this rank receive `imbalance` times the mean (see `layout.routing`).
    """
    setup = settled(setup)
    routing = None if setup.model.experts is None else StatedRouting(setup, rank, imbalance)
    return StepRecord(
        rank=rank,
        pipeline_rank=mesh_of(setup.plan).coord(rank).pipeline,
        memory=footprint(setup, rank, routing),
        collectives=collectives(setup, rank, routing),
        flops=rank_flops(setup, rank, routing),
    )
