"""Lengths: how long everything in a step takes, before anybody waits for anybody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardsmith.errors import Code
from shardsmith.schedule.ir import Kind
from shardsmith.timeline import LaneKind

NEGATIVE = Code(
    code="S401",
    title="a length below zero",
    because="nothing takes less than no time, and a simulation of such lengths would run backwards",
)


@dataclass(frozen=True, kw_only=True)
class StageLengths:
    """Seconds of one stage: its compute actions for one microbatch, and its communication.

    `forward`, `input_grad` and `weight_grad` include what tensor, context and expert communication adds inside the
    action; `inside` says how much of forward and of backward that is, by lane, for the picture. `transfer` is the time
    a message to the next or previous stage spends on the wire; for the share `blocking` of it the sender computes
    nothing. `reduce` is the reduction of the stage's gradients, in `buckets` equal parts that become ready one after
    another during the backward that completes them. `gather` makes sharded weights whole once; the share `alongside`
    of it may run beside the compute that waits for it, layer by layer (and of a reduction after every microbatch).
    """

    forward: float
    input_grad: float
    weight_grad: float
    inside: Mapping[LaneKind, tuple[float, float]] = field(default_factory=dict)
    transfer: float = 0.0
    blocking: float = 0.0
    reduce: float = 0.0
    buckets: int = 1
    gather: float = 0.0
    alongside: float = 1.0

    def of(self, kind: Kind) -> float:
        """Seconds of one action."""
        backward = self.input_grad + self.weight_grad
        return {Kind.F: self.forward, Kind.B: backward, Kind.I: self.input_grad, Kind.W: self.weight_grad}[kind]

    def slowed(self, kind: Kind, factor: float) -> float:
        """Seconds of one action on a rank that computes `factor` times as long; communication takes what it takes."""
        sent = 0.0 if kind is Kind.W else sum(pair[kind is not Kind.F] for pair in self.inside.values())
        whole = self.of(kind)
        return whole + (factor - 1.0) * max(whole - sent, 0.0)

    def numbers(self) -> list[float]:
        """Every figure, for checking."""
        inside = [seconds for pair in self.inside.values() for seconds in pair]
        return [value for value in vars(self).values() if isinstance(value, (int, float))] + inside


@dataclass(frozen=True, kw_only=True)
class StepLengths:
    """Seconds of everything in a step. `slow` multiplies the compute of single pipeline ranks (stragglers).

    `pair_gain` is the share of the shorter half that an FB saves by running both together (0: none).
    `end` is what every rank does once gradients are complete: norm, clipping, optimiser, gathers.
    """

    stages: tuple[StageLengths, ...]
    slow: Mapping[int, float] = field(default_factory=dict)
    pair_gain: float = 0.0
    end: float = 0.0

    def __post_init__(self) -> None:
        numbers = [v for s in self.stages for v in s.numbers()] + [*self.slow.values(), self.end]
        worst = min(numbers, default=0.0)
        if worst < 0:
            raise NEGATIVE.refuse(f"a length is {worst}", ("lengths", str(worst)), hint="0 or more")
