"""DualPipeV (DeepSeek-AI 2025): two stages per rank in a V, forward and backward run in pairs.

In the steady phase a rank computes a forward of one stage together with a backward of its other stage: an FB, so
that the communication of one hides under the computation of the other. Weight gradients are split off only while
filling and emptying. S = 2P stages stand on P ranks as in ZB-V.
"""

from __future__ import annotations

from shardsmith.errors import Fault
from shardsmith.schedule.closed_form import ClosedForm, Time
from shardsmith.schedule.ir import Action, Kind, Order
from shardsmith.schedule.rules import FEW_MICROBATCHES, size_faults, two_stage_faults
from shardsmith.units import counted

DEFAULT_STAGES_PER_RANK = 2


def faults(*, pipeline: int, microbatches: int, stages_per_rank: int, source: str) -> list[Fault]:
    """What DualPipeV forbids: anything but two stages per rank, and fewer than 2P microbatches."""
    found = [
        *size_faults(pipeline=pipeline, microbatches=microbatches, source=source),
        *two_stage_faults(schedule="dualpipe_v", stages_per_rank=stages_per_rank, source=source),
    ]
    if not found and microbatches < 2 * pipeline:
        ranks = counted(pipeline, "rank")
        message = f"dualpipe_v on {ranks} needs at least {2 * pipeline} microbatches, not {microbatches}"
        values = ((source, f"microbatches = {microbatches}"), (source, f"pipeline = {pipeline}"))
        hint = f"microbatches = {2 * pipeline}, or schedule = zb_v (any number)"
        found.append(FEW_MICROBATCHES.fault(message, *values, hint=hint))
    return found


def placement(*, pipeline: int, stages_per_rank: int = 2) -> tuple[int, ...]:
    """Stages go down the ranks and come back up: 0 .. P-1, P-1 .. 0."""
    assert stages_per_rank == 2, "dualpipe_v holds two stages per rank"
    return (*range(pipeline), *reversed(range(pipeline)))


def order(*, pipeline: int, microbatches: int, stages_per_rank: int = 2) -> Order:
    """The DualPipeV order for microbatches >= 2P."""
    built = [_Rank(rank, pipeline) for rank in range(pipeline)]
    for rank in built:
        rank.build(microbatches)
    return Order(
        name="dualpipe_v",
        microbatches=microbatches,
        placement=placement(pipeline=pipeline, stages_per_rank=stages_per_rank),
        ranks=tuple(tuple(rank.actions) for rank in built),
        pairs=frozenset(action for rank in built for action in rank.pairs),
    )


class _Rank:
    """One rank's list while it is written: `down` is its early stage, `up` its late one."""

    def __init__(self, rank: int, pipeline: int) -> None:
        self.rank, self.pipeline = rank, pipeline
        self.down, self.up = rank, 2 * pipeline - 1 - rank
        self.actions: list[Action] = []
        self.pairs: list[Action] = []
        self._next: dict[tuple[Kind, int], int] = {}
        self._deferred: list[Action] = []

    def build(self, microbatches: int) -> None:
        """The eight phases; each microbatch goes down, up, and back through both stages."""
        below = self.pipeline - 1 - self.rank
        for _ in range(2 * below):
            self.forward(self.down)
        for _ in range(self.rank + 1):
            self.forward(self.down)
            self.forward(self.up)
        for _ in range(below):
            self.backward(self.up, split=True)
            self.weights()
            self.forward(self.up)
        for step in range(microbatches - 2 * self.pipeline + self.rank + 1):
            # The deepest rank has nothing to pair its first backward with yet: its input is made by the forward itself.
            self.pair(self.down, self.up, apart=step == 0 and below == 0)
            self.pair(self.up, self.down)
        for _ in range(below):
            self.backward(self.up)
            self.pair(self.up, self.down)
        split, half = False, (self.rank + 1) // 2
        for step in range(self.rank + 1):
            split = split or (step == half and self.rank % 2 == 1)
            self.backward(self.up, split=split)
            split = split or (step == half and self.rank % 2 == 0)
            self.backward(self.down, split=split)
        for _ in range(below):
            self.weights()
            self.backward(self.down, split=True)
        while self._deferred:
            self.weights()

    def forward(self, stage: int) -> None:
        """The next forward of `stage`."""
        self.actions.append(self._take(Kind.F, stage))

    def backward(self, stage: int, *, split: bool = False) -> None:
        """The next backward of `stage`, whole or its input half with the weights put off."""
        action = self._take(Kind.B, stage)
        if split:
            self._deferred.append(action._replace(kind=Kind.W))
            action = action._replace(kind=Kind.I)
        self.actions.append(action)

    def weights(self) -> None:
        """The oldest weight gradient put off."""
        self.actions.append(self._deferred.pop(0))

    def pair(self, forward: int, backward: int, *, apart: bool = False) -> None:
        """A forward of one stage and a backward of the other, run as one unless `apart`."""
        self.forward(forward)
        if not apart:
            self.pairs.append(self.actions[-1])
        self.backward(backward)

    def _take(self, kind: Kind, stage: int) -> Action:
        m = self._next.get((kind, stage), 0)
        self._next[kind, stage] = m + 1
        return Action(kind, stage, m)


def closed_form(
    *, pipeline: int, microbatches: int, stages_per_rank: int, F: Time, I: Time, W: Time
) -> ClosedForm | None:
    """Each rank idles (S/2-1)(FB+B-3W), all for one stage, with FB = F + B; holds where F = I = W.

    With other times the filling phases do not fit into each other as drawn, and no formula is printed.
    """
    if not F == I == W or microbatches < 2 * pipeline:
        return None
    # F, I and W are per rank, that is of both its stages.
    one = (F + 2 * (I + W) - 3 * W) / 2
    return ClosedForm(
        formula="(S/2-1)(FB+B-3W)",
        paper="DeepSeek-AI 2025",
        idle=(pipeline - 1) * one,
        ideal=microbatches * (F + I + W),
    )
