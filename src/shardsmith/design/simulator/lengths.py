"""Lengths: how long everything in a step takes, before anybody waits for anybody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardsmith.errors import Code
from shardsmith.schedule.ir import Kind

NEGATIVE = Code(
    code="S401",
    title="a length below zero",
    because="nothing takes less than no time, and a simulation of such lengths would run backwards",
)


@dataclass(frozen=True, kw_only=True)
class StageLengths:
    """Seconds of one stage: its compute actions for one microbatch, and its communication on the data axis.

    `forward`, `input_grad` and `weight_grad` include what the tensor axis adds inside the action (of which
    `tensor_forward` and `tensor_backward` are communication, for the picture). `reduce` is the reduction of
    the stage's gradients, in `buckets` equal parts that become ready one after another during the backward
    that precedes it; `gather` makes sharded weights whole once, half of it ahead of the first layer's need
    when it streams. `transfer` is the time a message to the next or previous stage spends on the wire.
    """

    forward: float
    input_grad: float
    weight_grad: float
    tensor_forward: float = 0.0
    tensor_backward: float = 0.0
    transfer: float = 0.0
    reduce: float = 0.0
    buckets: int = 1
    gather: float = 0.0

    def of(self, kind: Kind) -> float:
        """Seconds of one action."""
        backward = self.input_grad + self.weight_grad
        return {Kind.F: self.forward, Kind.B: backward, Kind.I: self.input_grad, Kind.W: self.weight_grad}[kind]


@dataclass(frozen=True, kw_only=True)
class StepLengths:
    """Seconds of everything in a step. `slow` multiplies the compute of single ranks (stragglers).

    `pair_gain` is the share of the shorter half that an FB saves by running both together (0: none).
    `end` is what every rank does once the gradients are complete: norm, clipping, optimiser, gathers.
    """

    stages: tuple[StageLengths, ...]
    slow: Mapping[int, float] = field(default_factory=dict)
    pair_gain: float = 0.0
    end: float = 0.0

    def __post_init__(self) -> None:
        numbers = [v for s in self.stages for v in vars(s).values()] + [*self.slow.values(), self.end]
        worst = min(numbers, default=0.0)
        if worst < 0:
            raise NEGATIVE.refuse(f"a length is {worst}", ("lengths", str(worst)), hint="0 or more")
