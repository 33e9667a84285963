"""1F1B with a flush (Narayanan et al. 2021, the synchronous form of PipeDream's schedule).

    rank 0: F0 F1 .  B0 F2 B1 F3 B2 .  B3
    rank 1: .  F0 B0 F1 B1 F2 B2 F3 B3 .

The bubble of GPipe, but rank p holds at most min(P - p, m) microbatches.
"""

from __future__ import annotations

from shardsmith.errors import Fault
from shardsmith.schedule.closed_form import ClosedForm, Time
from shardsmith.schedule.ir import Action, Kind, Order
from shardsmith.schedule.rules import one_stage_faults, size_faults

DEFAULT_STAGES_PER_RANK = 1


def faults(*, pipeline: int, microbatches: int, stages_per_rank: int, source: str) -> list[Fault]:
    """What 1F1B forbids: anything but one stage per rank."""
    return [
        *size_faults(pipeline=pipeline, microbatches=microbatches, source=source),
        *one_stage_faults(schedule="one_f_one_b", stages_per_rank=stages_per_rank, source=source),
    ]


def placement(*, pipeline: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Stage s lives on pipeline rank s."""
    assert stages_per_rank == 1, "one_f_one_b holds one stage per rank"
    return tuple(range(pipeline))


def order(*, pipeline: int, microbatches: int, stages_per_rank: int = 1) -> Order:
    """The 1F1B order for any pipeline and microbatches >= 1, also with fewer microbatches than ranks."""
    ranks = []
    for rank in range(pipeline):
        warm_up = min(pipeline - 1 - rank, microbatches)
        actions = [Action(Kind.F, rank, m) for m in range(warm_up)]
        for m in range(microbatches):
            if m + warm_up < microbatches:
                actions.append(Action(Kind.F, rank, m + warm_up))
            actions.append(Action(Kind.B, rank, m))
        ranks.append(tuple(actions))
    where = placement(pipeline=pipeline, stages_per_rank=stages_per_rank)
    return Order(name="one_f_one_b", microbatches=microbatches, placement=where, ranks=tuple(ranks))


def closed_form(
    *, pipeline: int, microbatches: int, stages_per_rank: int, F: Time, I: Time, W: Time
) -> ClosedForm | None:
    """Each rank idles (P-1)(F+I+W), for any number of microbatches: 1F1B saves memory, not time."""
    return ClosedForm(
        formula="(P-1)(F+I+W)",
        paper="Narayanan et al. 2021",
        idle=(pipeline - 1) * (F + I + W),
        ideal=microbatches * (F + I + W),
    )
