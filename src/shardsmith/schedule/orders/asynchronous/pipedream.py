"""PipeDream (Narayanan et al. 2019): 1F1B that never flushes; every stage updates its weights after each backward.

    rank 0: F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 ...
    rank 1: .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 ...

A "microbatch" is here what one update is made from. Once the pipeline is full no rank waits, and it empties once a
run, not once a step. The price: rank p computes up to P - p microbatches ahead of its own updates, keeps that many
versions of its weights (so that a backward sees those of its forward), and adds gradients that are up to P - 1 - p
updates old. What it trains is therefore not what one device would train.
"""

from __future__ import annotations

from shardsmith.errors import Fault
from shardsmith.schedule.closed_form import ClosedForm, Time
from shardsmith.schedule.ir import Action, Kind, Order
from shardsmith.schedule.rules import one_stage_faults, size_faults

DEFAULT_STAGES_PER_RANK = 1


def faults(*, pipeline: int, microbatches: int, stages_per_rank: int, source: str) -> list[Fault]:
    """What PipeDream forbids: anything but one stage per rank."""
    return [
        *size_faults(pipeline=pipeline, microbatches=microbatches, source=source),
        *one_stage_faults(schedule="pipedream", stages_per_rank=stages_per_rank, source=source),
    ]


def placement(*, pipeline: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Stage s lives on pipeline rank s."""
    assert stages_per_rank == 1, "pipedream holds one stage per rank"
    return tuple(range(pipeline))


def order(*, pipeline: int, microbatches: int, stages_per_rank: int = 1) -> Order:
    """A window of `microbatches` updates, from the empty pipeline until it is empty again."""
    ranks = []
    for rank in range(pipeline):
        ahead = min(pipeline - 1 - rank, microbatches)
        actions = [Action(Kind.F, rank, m) for m in range(ahead)]
        for m in range(microbatches):
            actions += [Action(Kind.F, rank, m + ahead)] if m + ahead < microbatches else []
            actions.append(Action(Kind.B, rank, m))
        ranks.append(tuple(actions))
    where = placement(pipeline=pipeline, stages_per_rank=stages_per_rank)
    return Order(name="pipedream", microbatches=microbatches, placement=where, ranks=tuple(ranks), asynchronous=True)


def closed_form(
    *, pipeline: int, microbatches: int, stages_per_rank: int, F: Time, I: Time, W: Time
) -> ClosedForm | None:
    """No rank idles in a full pipeline; to fill and to empty it takes (P-1)(F+I+W), once a run."""
    return ClosedForm(
        formula="0 while full",
        paper="Narayanan et al. 2019",
        idle=0,
        ideal=microbatches * (F + I + W),
        ramp=(pipeline - 1) * (F + I + W),
    )
