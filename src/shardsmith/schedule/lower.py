"""From an order to programs: which rank sends what to whom, when, and when gradients are complete.

Why no program that comes out of here can deadlock, even if every batch of sends and receives blocks
until all of it has passed: the order is played once with unit times, which puts all compute actions
(at their starts) and all transfers (at the end of the action that made them, before any action that
starts then) on ONE line. Each rank's program is that line cut down to what concerns the rank, with
neighbouring transfers merged into a batch. Suppose ranks were stuck, and let t be the earliest
transfer on the line that has not passed. Whatever its sender and its receiver do before the batch
that holds t consists of computing, and of transfers earlier than t, which have passed; so both have
entered the batch that holds t. The two ends list the transfers of one pair and direction in the order
of the line, and the earlier ones have passed, so t meets its own other end and passes: a contradiction.
The same argument holds where an engine waits later than that (never before a batch, only for the
inputs of an action). Inputs arrive in time because a transfer stands on the line between the action
that made it and the one that uses it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from shardsmith.schedule.ir import Action, Kind, Order
from shardsmith.schedule.play import play


class Payload(str, Enum):
    """What passes between two stages."""

    ACTIVATION = "activation"
    """output of a stage's forward, to the next stage"""
    GRADIENT = "gradient"
    """gradient of a stage's input (from its B or I), to the previous stage"""


class Transfer(NamedTuple):
    """One message: what `stage` produced for `microbatch`, from pipeline rank `source` to `target`."""

    payload: Payload
    stage: int
    microbatch: int
    source: int
    target: int

    def __str__(self) -> str:
        text = f"{self.payload.value} of stage {self.stage}, microbatch {self.microbatch}"
        return f"{text}, rank {self.source} -> rank {self.target}"


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One batch: all `sends` and `receives` are issued together, each list in the order of the line."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


@dataclass(frozen=True, kw_only=True)
class Reduce:
    """Reduce the gradients of `stage`: the rank has done its last B or W of it, of the step or of a microbatch."""

    stage: int


@dataclass(frozen=True, kw_only=True)
class Unshard:
    """Make the sharded weights of `stage` whole: all now (per step), or one layer ahead of its use (per pass)."""

    stage: int


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """Keep only this rank's part of the weights of `stage` again."""

    stage: int


Gather = Literal["never", "per_step", "per_pass"]
Step = Action | Exchange | Reduce | Unshard | Reshard


@dataclass(frozen=True, kw_only=True)
class Program:
    """Per pipeline rank, everything it does in one step: `order` with communication added."""

    order: Order
    ranks: tuple[tuple[Step, ...], ...]


def transfer_of(action: Action, placement: tuple[int, ...]) -> Transfer | None:
    """The message that `action` makes, or None: W makes none, nor do the ends of the pipeline or hops within a rank."""
    if action.kind is Kind.W:
        return None
    payload, to = (
        (Payload.ACTIVATION, action.stage + 1) if action.kind is Kind.F else (Payload.GRADIENT, action.stage - 1)
    )
    if not 0 <= to < len(placement) or placement[to] == placement[action.stage]:
        return None
    return Transfer(payload, action.stage, action.microbatch, placement[action.stage], placement[to])


def lower(order: Order, *, gather: Gather = "never", reduce_each: bool = False) -> Program:
    """Add communication to a legal `order`: batches of transfers, reductions, and gathers of sharded weights.

    Between two compute actions a rank has at most one Exchange. Reduce(stage) stands directly behind
    the last B or W of that stage, or behind each of them (`reduce_each`). With `gather` "per_step" a
    stage's weights are whole from its first to its last F, B or I, with "per_pass" during each of them;
    W needs no weights.
    """
    played = play(order)
    starts = [[played.start[a] for a in actions] for actions in order.ranks]
    gaps: list[list[tuple[list[Transfer], list[Transfer]]]] = [
        [([], []) for _ in range(len(actions) + 1)] for actions in order.ranks
    ]
    # A rank makes one thing at a time, or the two of a pair, which end together: F sorts behind B.
    for action in sorted(played.end, key=lambda a: (played.end[a], order.placement[a.stage], a.kind)):
        transfer = transfer_of(action, order.placement)
        if transfer is not None:
            for rank, side in ((transfer.source, 0), (transfer.target, 1)):
                gaps[rank][bisect_left(starts[rank], played.end[action])][side].append(transfer)
    return Program(
        order=order, ranks=tuple(_weave(a, g, gather, reduce_each) for a, g in zip(order.ranks, gaps, strict=True))
    )


def _weave(
    actions: tuple[Action, ...],
    gaps: list[tuple[list[Transfer], list[Transfer]]],
    gather: Gather,
    reduce_each: bool,
) -> tuple[Step, ...]:
    backward = [i for i, action in enumerate(actions) if action.kind in (Kind.B, Kind.W)]
    reduced = set(backward) if reduce_each else {actions[i].stage: i for i in backward}.values()
    users = [i for i, action in enumerate(actions) if action.kind is not Kind.W]
    first = {actions[i].stage: i for i in reversed(users)}
    last = {actions[i].stage: i for i in users}
    unsharded = {"never": [], "per_step": first.values(), "per_pass": users}[gather]
    resharded = {"never": [], "per_step": last.values(), "per_pass": users}[gather]
    steps: list[Step] = []
    for i, (sends, receives) in enumerate(gaps):
        if i > 0:
            action = actions[i - 1]
            if i - 1 in unsharded:
                steps.append(Unshard(stage=action.stage))
            steps.append(action)
            if i - 1 in resharded:
                steps.append(Reshard(stage=action.stage))
            if i - 1 in reduced:
                steps.append(Reduce(stage=action.stage))
        if sends or receives:
            steps.append(Exchange(sends=tuple(sends), receives=tuple(receives)))
    return tuple(steps)


def reduced(steps: Sequence[Step]) -> set[Action]:
    """The actions of one rank directly behind which their stage's gradients are reduced."""
    found: set[Action] = set()
    latest: dict[int, Action] = {}
    for step in steps:
        if isinstance(step, Action):
            latest[step.stage] = step
        elif isinstance(step, Reduce):
            found.add(latest[step.stage])
    return found
