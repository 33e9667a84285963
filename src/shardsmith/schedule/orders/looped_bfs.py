"""Looped breadth-first (Lamy-Poirier 2023): all microbatches through one stage before the next.

Stages are placed in a loop as in interleaving. A rank runs every microbatch through its first stage, then
through its second, and backward in the reverse order of stages. The bubble is that of interleaving; each
stage's weights are used in one stretch a pass, so sharded weights are gathered, and gradients reduced, once a
stage and pass instead of once a microbatch. The price is the memory of GPipe.
"""

from __future__ import annotations

from shardsmith.errors import Fault
from shardsmith.schedule.closed_form import ClosedForm, Time
from shardsmith.schedule.ir import Action, Kind, Order
from shardsmith.schedule.rules import looped_faults

DEFAULT_STAGES_PER_RANK = 2


def faults(*, pipeline: int, microbatches: int, stages_per_rank: int, source: str) -> list[Fault]:
    """What looping forbids: fewer than two stages per rank."""
    return looped_faults(
        schedule="looped_bfs",
        pipeline=pipeline,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        source=source,
    )


def placement(*, pipeline: int, stages_per_rank: int = DEFAULT_STAGES_PER_RANK) -> tuple[int, ...]:
    """Stage s lives on pipeline rank s % P."""
    return tuple(stage % pipeline for stage in range(pipeline * stages_per_rank))


def order(*, pipeline: int, microbatches: int, stages_per_rank: int = DEFAULT_STAGES_PER_RANK) -> Order:
    """The breadth-first order for any pipeline and microbatches >= 1."""
    ranks = []
    for rank in range(pipeline):
        mine = [chunk * pipeline + rank for chunk in range(stages_per_rank)]
        forward = [Action(Kind.F, stage, m) for stage in mine for m in range(microbatches)]
        backward = [Action(Kind.B, stage, m) for stage in reversed(mine) for m in range(microbatches)]
        ranks.append((*forward, *backward))
    where = placement(pipeline=pipeline, stages_per_rank=stages_per_rank)
    return Order(name="looped_bfs", microbatches=microbatches, placement=where, ranks=tuple(ranks))


def closed_form(
    *, pipeline: int, microbatches: int, stages_per_rank: int, F: Time, I: Time, W: Time
) -> ClosedForm | None:
    """Each rank idles (P-1)(F+I+W)/v where m >= P; with fewer microbatches the loop itself has to wait."""
    if microbatches < pipeline:
        return None
    return ClosedForm(
        formula="(P-1)(F+I+W)/v",
        paper="Lamy-Poirier 2023",
        idle=(pipeline - 1) * (F + I + W) / stages_per_rank,
        ideal=microbatches * (F + I + W),
    )
