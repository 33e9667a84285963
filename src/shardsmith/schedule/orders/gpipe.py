"""GPipe (Huang et al. 2019): all forwards, then all backwards.

    rank 0: F0 F1 F2 F3 .  .  B0 B1 B2 B3
    rank 1: .  F0 F1 F2 F3 B0 B1 B2 B3 .

Every rank holds all m microbatches at once. Backwards run in the order of the forwards, as in 1F1B,
so that both sum gradients in the same sequence.
"""

from __future__ import annotations

from shardsmith.errors import Fault
from shardsmith.schedule.closed_form import ClosedForm, Time
from shardsmith.schedule.ir import Action, Kind, Order
from shardsmith.schedule.rules import one_stage_faults, size_faults

DEFAULT_STAGES_PER_RANK = 1


def faults(*, pipeline: int, microbatches: int, stages_per_rank: int, source: str) -> list[Fault]:
    """What GPipe forbids: anything but one stage per rank."""
    return [
        *size_faults(pipeline=pipeline, microbatches=microbatches, source=source),
        *one_stage_faults(schedule="gpipe", stages_per_rank=stages_per_rank, source=source),
    ]


def placement(*, pipeline: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Stage s lives on pipeline rank s."""
    assert stages_per_rank == 1, "gpipe holds one stage per rank"
    return tuple(range(pipeline))


def order(*, pipeline: int, microbatches: int, stages_per_rank: int = 1) -> Order:
    """The GPipe order for any pipeline and microbatches >= 1."""
    ranks = tuple(
        tuple(Action(kind, rank, m) for kind in (Kind.F, Kind.B) for m in range(microbatches))
        for rank in range(pipeline)
    )
    where = placement(pipeline=pipeline, stages_per_rank=stages_per_rank)
    return Order(name="gpipe", microbatches=microbatches, placement=where, ranks=ranks)


def closed_form(
    *, pipeline: int, microbatches: int, stages_per_rank: int, F: Time, I: Time, W: Time
) -> ClosedForm | None:
    """Each rank idles (P-1)(F+I+W), for any number of microbatches."""
    return ClosedForm(
        formula="(P-1)(F+I+W)",
        paper="Huang et al. 2019",
        idle=(pipeline - 1) * (F + I + W),
        ideal=microbatches * (F + I + W),
    )
