"""ZB-V (Qi et al. 2024): two stages per rank in a V, no rank waits where F, I and W take the same time.

Rank p holds stages p and 2P-1-p, so the first and the last stage share a rank: a microbatch that has
turned round comes straight back, and its backward starts P slots earlier than in a loop. The peak of
activations is that of 1F1B.
"""

from __future__ import annotations

from shardsmith.errors import Fault
from shardsmith.schedule.closed_form import ClosedForm, Time
from shardsmith.schedule.ir import Action, Kind, Order
from shardsmith.schedule.rules import size_faults, two_stage_faults

DEFAULT_STAGES_PER_RANK = 2


def faults(*, pipeline: int, microbatches: int, stages_per_rank: int, source: str) -> list[Fault]:
    """What ZB-V forbids: anything but two stages per rank."""
    return [
        *size_faults(pipeline=pipeline, microbatches=microbatches, source=source),
        *two_stage_faults(schedule="zb_v", stages_per_rank=stages_per_rank, source=source),
    ]


def placement(*, pipeline: int, stages_per_rank: int = 2) -> tuple[int, ...]:
    """Stages go down the ranks and come back up: 0 .. P-1, P-1 .. 0."""
    assert stages_per_rank == 2, "zb_v holds two stages per rank"
    return (*range(pipeline), *reversed(range(pipeline)))


def order(*, pipeline: int, microbatches: int, stages_per_rank: int = 2) -> Order:
    """The ZB-V order for any pipeline and microbatches >= 1.

    It is laid out for at least 2P microbatches; those that do not exist are left out, which no dependency
    notices, since none crosses microbatches.
    """
    laid_out = max(microbatches, 2 * pipeline)
    ranks = []
    for rank in range(pipeline):
        actions = _rank(rank, pipeline, laid_out)
        ranks.append(tuple(a for a in actions if a.microbatch < microbatches))
    where = placement(pipeline=pipeline, stages_per_rank=stages_per_rank)
    return Order(name="zb_v", microbatches=microbatches, placement=where, ranks=tuple(ranks))


def _rank(rank: int, pipeline: int, microbatches: int) -> list[Action]:
    """Down (the early stage) and up (the late one) of one rank, filled, kept busy, emptied."""
    down, up = rank, 2 * pipeline - 1 - rank
    done: dict[tuple[Kind, int], int] = {}
    actions: list[Action] = []

    def do(kind: Kind, stage: int) -> None:
        m = done.get((kind, stage), 0)
        done[kind, stage] = m + 1
        actions.append(Action(kind, stage, m))

    def backward(stage: int) -> None:
        do(Kind.I, stage)
        do(Kind.W, stage)

    for _ in range(2 * (pipeline - rank) - 1):  # until this rank's first microbatch has turned round
        do(Kind.F, down)
    for _ in range(rank):
        do(Kind.F, up)
        do(Kind.F, down)
    for _ in range(pipeline - rank):
        do(Kind.F, up)
        backward(up)
    while done[Kind.F, up] < done[Kind.F, down] or done[Kind.F, down] < microbatches:
        if done[Kind.F, down] < microbatches:
            do(Kind.F, down)
        backward(down)
        do(Kind.F, up)
        backward(up)
    for _ in range(rank):  # input gradients first: ranks upstream wait for them
        do(Kind.I, down)
        do(Kind.I, up)
    for _ in range(pipeline - rank):
        do(Kind.I, down)
        do(Kind.W, down)
    for stage in (up, down):
        while done[Kind.W, stage] < done[Kind.I, stage]:
            do(Kind.W, stage)
    return actions


def closed_form(
    *, pipeline: int, microbatches: int, stages_per_rank: int, F: Time, I: Time, W: Time
) -> ClosedForm | None:
    """No rank waits between its first and last action where F = I = W and m >= 2P; elsewhere no formula holds.

    The first microbatch still takes (P-1) stages of forward, F/2 each, to reach the last rank: the ramp.
    """
    if not F == I == W or microbatches < 2 * pipeline:
        return None
    return ClosedForm(
        formula="0",
        paper="Qi et al. 2024",
        idle=0 * F,
        ideal=microbatches * (F + I + W),
        ramp=(pipeline - 1) * F / 2,
    )
