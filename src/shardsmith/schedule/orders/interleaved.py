"""Interleaved 1F1B (Narayanan et al. 2021): v stages per rank, placed in a loop.

Stage s lives on rank s % P, so a microbatch visits every rank v times and the bubble shrinks by v;
the price is v times as many messages and more live activations. Microbatches advance in groups of P:
a rank runs one group through its first stage, then through its second, and so on. `interleaved:G` takes groups
of G microbatches: between depth first (G = P, least memory) and breadth first (G = m, in which weights are used
in long stretches, as sharded ones like it) the bubble stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardsmith.errors import Fault
from shardsmith.schedule.closed_form import ClosedForm, Time
from shardsmith.schedule.ir import Action, Kind, Order
from shardsmith.schedule.rules import SMALL_GROUP, looped_faults
from shardsmith.units import counted

DEFAULT_STAGES_PER_RANK = 2


def faults(*, pipeline: int, microbatches: int, stages_per_rank: int, source: str) -> list[Fault]:
    """What interleaving forbids: fewer than two stages per rank."""
    return looped_faults(
        schedule="interleaved",
        pipeline=pipeline,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        source=source,
    )


def placement(*, pipeline: int, stages_per_rank: int = DEFAULT_STAGES_PER_RANK) -> tuple[int, ...]:
    """Stage s lives on pipeline rank s % P."""
    return tuple(stage % pipeline for stage in range(pipeline * stages_per_rank))


def order(
    *, pipeline: int, microbatches: int, stages_per_rank: int = DEFAULT_STAGES_PER_RANK, group: int | None = None
) -> Order:
    """The interleaved order for any pipeline and microbatches >= 1, in groups of `group` >= P (None: P).

    Where m is no multiple of the group, it is the order of the next multiple without the microbatches that do
    not exist. No dependency crosses microbatches, so what is left of a legal order is legal; building
    the last group at its own size instead deadlocks for some sizes (P = 4, v = 3, m = 5), and is never
    faster.
    """
    # A group larger than the step is the whole step.
    size = pipeline if group is None else min(group, max(microbatches, pipeline))
    assert size >= pipeline, f"groups of {size} leave some of {pipeline} ranks without work"
    visits = [
        (chunk, m)
        for first in range(0, microbatches, size)
        for chunk in range(stages_per_rank)
        for m in range(first, first + size)
    ]
    ranks = []
    for rank in range(pipeline):
        forwards = [Action(Kind.F, chunk * pipeline + rank, m) for chunk, m in visits]
        backwards = [Action(Kind.B, (stages_per_rank - 1 - chunk) * pipeline + rank, m) for chunk, m in visits]
        # Until the last stage can turn the first microbatch round, a rank has v-1 groups of forwards of its other
        # stages to do, and 2 for every rank between it and the last: one on the way there, one back.
        warm_up = min((stages_per_rank - 1) * size + 2 * (pipeline - 1 - rank), len(visits))
        actions = forwards[:warm_up]
        for i, backward in enumerate(backwards):
            actions.extend(forwards[warm_up + i : warm_up + i + 1])
            actions.append(backward)
        ranks.append(tuple(a for a in actions if a.microbatch < microbatches))
    where = placement(pipeline=pipeline, stages_per_rank=stages_per_rank)
    name = "interleaved" if group is None else f"interleaved:{group}"
    return Order(name=name, microbatches=microbatches, placement=where, ranks=tuple(ranks))


def closed_form(
    *, pipeline: int, microbatches: int, stages_per_rank: int, F: Time, I: Time, W: Time
) -> ClosedForm | None:
    """Each rank idles (P-1)(F+I+W)/v where m is a multiple of P; None where it is not."""
    if microbatches % pipeline:
        return None
    return ClosedForm(
        formula="(P-1)(F+I+W)/v",
        paper="Narayanan et al. 2021",
        idle=(pipeline - 1) * (F + I + W) / stages_per_rank,
        ideal=microbatches * (F + I + W),
    )


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """`interleaved:G`, offered like any file of this folder."""

    group: int

    DEFAULT_STAGES_PER_RANK = DEFAULT_STAGES_PER_RANK

    def faults(self, *, pipeline: int, microbatches: int, stages_per_rank: int, source: str) -> list[Fault]:
        """What interleaving forbids, and groups smaller than the pipeline (S015)."""
        sizes = {"pipeline": pipeline, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
        found = faults(**sizes, source=source)
        if self.group < pipeline:
            message = f"groups of {counted(self.group, 'microbatch')} for {pipeline} ranks"
            values = ((source, f"schedule = interleaved:{self.group}"), (source, f"pipeline = {pipeline}"))
            found.append(SMALL_GROUP.fault(message, *values, hint=f"schedule = interleaved:{pipeline} or interleaved"))
        return found

    def placement(self, *, pipeline: int, stages_per_rank: int = DEFAULT_STAGES_PER_RANK) -> tuple[int, ...]:
        """Stage s lives on pipeline rank s % P."""
        return placement(pipeline=pipeline, stages_per_rank=stages_per_rank)

    def order(self, *, pipeline: int, microbatches: int, stages_per_rank: int = DEFAULT_STAGES_PER_RANK) -> Order:
        """The interleaved order in groups of G."""
        return order(pipeline=pipeline, microbatches=microbatches, stages_per_rank=stages_per_rank, group=self.group)

    def closed_form(
        self, *, pipeline: int, microbatches: int, stages_per_rank: int, F: Time, I: Time, W: Time
    ) -> ClosedForm | None:
        """That of interleaving where m is a multiple of G; None where it is not."""
        if microbatches % self.group:
            return None
        sizes = {"pipeline": pipeline, "microbatches": pipeline, "stages_per_rank": stages_per_rank}
        form = closed_form(**sizes, F=F, I=I, W=W)
        assert form is not None, "P is a multiple of P"
        return replace(form, ideal=microbatches * (F + I + W))
