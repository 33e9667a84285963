"""ZB-H1 (Qi et al. 2023): 1F1B with the backward split, weight gradients filling what was idle.

    rank 0: F0 F1 .  I0 W0 F2 I1 W1 F3 I2 W2 I3 W3
    rank 1: .  F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3

Rank p puts off its first p weight gradients: the gradient of the input goes upstream at once, and the
weight gradients that are left over fill the wait at the end. Memory stays that of 1F1B's first rank.
"""

from __future__ import annotations

from shardsmith.errors import Fault
from shardsmith.schedule.closed_form import ClosedForm, Time
from shardsmith.schedule.ir import Action, Kind, Order
from shardsmith.schedule.rules import one_stage_faults, size_faults

DEFAULT_STAGES_PER_RANK = 1


def faults(*, pipeline: int, microbatches: int, stages_per_rank: int, source: str) -> list[Fault]:
    """What ZB-H1 forbids: anything but one stage per rank."""
    return [
        *size_faults(pipeline=pipeline, microbatches=microbatches, source=source),
        *one_stage_faults(schedule="zb_h1", stages_per_rank=stages_per_rank, source=source),
    ]


def placement(*, pipeline: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Stage s lives on pipeline rank s."""
    assert stages_per_rank == 1, "zb_h1 holds one stage per rank"
    return tuple(range(pipeline))


def order(*, pipeline: int, microbatches: int, stages_per_rank: int = 1) -> Order:
    """The ZB-H1 order for any pipeline and microbatches >= 1."""
    ranks = []
    for rank in range(pipeline):
        warm_up = min(pipeline - 1 - rank, microbatches)
        actions = [Action(Kind.F, rank, m) for m in range(warm_up)]
        weights = iter(range(microbatches))
        for m in range(microbatches):
            if m + warm_up < microbatches:
                actions.append(Action(Kind.F, rank, m + warm_up))
            actions.append(Action(Kind.I, rank, m))
            if m >= rank:
                actions.append(Action(Kind.W, rank, next(weights)))
        actions.extend(Action(Kind.W, rank, m) for m in weights)
        ranks.append(tuple(actions))
    where = placement(pipeline=pipeline, stages_per_rank=stages_per_rank)
    return Order(name="zb_h1", microbatches=microbatches, placement=where, ranks=tuple(ranks))


def closed_form(
    *, pipeline: int, microbatches: int, stages_per_rank: int, F: Time, I: Time, W: Time
) -> ClosedForm | None:
    """Each rank idles (P-1)(F+I-W) where m >= P and W is no longer than I; elsewhere no formula holds."""
    if microbatches < pipeline or W > I:
        return None
    return ClosedForm(
        formula="(P-1)(F+I-W)",
        paper="Qi et al. 2023",
        idle=(pipeline - 1) * (F + I - W),
        ideal=microbatches * (F + I + W),
    )
