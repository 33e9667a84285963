"""The vocabulary of schedules: Action, Order, and what an action needs.

An Order names compute only. Who sends what to whom, and when gradients are reduced, follows from it
in `lower.py`; a schedule never mentions a peer, a clock or a process group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """What a rank computes."""

    F = "F"
    """forward of one microbatch through one stage"""
    B = "B"
    """whole backward: gradient of the input and of the weights"""
    I = "I"
    """backward for the input only (the first half of a split backward)"""
    W = "W"
    """backward for the weights only (the second half)"""

    __hash__ = str.__hash__  # actions are dictionary keys by the hundred thousand; Enum's own hash is far slower


class Action(NamedTuple):
    """`kind` of work on global `stage` for `microbatch`; written like `F2.5` (stage 2, microbatch 5)."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


@dataclass(frozen=True, kw_only=True)
class Order:
    """Per pipeline rank, the actions in the order in which it performs them.

    `ranks[p]` is the list of pipeline rank p; `placement[s]` is the pipeline rank that owns stage s.
    `pairs` holds every F that runs together with the B behind it as one piece of work (an FB): both start
    when the inputs of both are there, and both end together. An `asynchronous` order has no flush: a stage updates
    its weights after each backward, and its microbatches are a window of a run that goes on.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]
    pairs: frozenset[Action] = frozenset()
    asynchronous: bool = False

    @property
    def pipeline(self) -> int:
        """Number of pipeline ranks."""
        return len(self.ranks)

    @property
    def stages(self) -> int:
        """Number of global stages."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Global stages that live on pipeline rank `rank`, ascending."""
        return tuple(s for s, r in enumerate(self.placement) if r == rank)


def needs(action: Action, stages: int) -> tuple[tuple[Action, ...], ...]:
    """What must have finished before `action` starts: every entry needs ONE of its alternatives.

    The gradient that arrives from the next stage is made by its B or by its I, whichever the order has.
    """
    kind, stage, m = action
    if kind is Kind.F:
        return () if stage == 0 else ((Action(Kind.F, stage - 1, m),),)
    if kind is Kind.W:
        return ((Action(Kind.I, stage, m),),)
    own: tuple[tuple[Action, ...], ...] = ((Action(Kind.F, stage, m),),)
    if stage == stages - 1:
        return own
    return (*own, (Action(Kind.B, stage + 1, m), Action(Kind.I, stage + 1, m)))
