"""ClosedForm: what a schedule costs by formula, where a formula is exact."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Time = Fraction | float
"""A length in any unit; a Fraction where results must be exact."""


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """Idle time of every rank in one step with equal stages and free communication.

    `ideal` is the time a rank computes and `idle` the time it waits, both in the unit of the given
    F, I and W; `formula` is `idle` in symbols: P ranks, v stages per rank, m microbatches. `ramp` is what the
    step takes longer because ranks start (and end) one after another without any of them waiting in between:
    steps that follow at once overlap it, a single step seen from outside does not.
    """

    formula: str
    paper: str
    idle: Time
    ideal: Time
    ramp: Time = 0

    @property
    def step_time(self) -> Time:
        """Length of the step, from the first rank's start to the last rank's end: ideal + idle + ramp."""
        return self.ideal + self.idle + self.ramp

    @property
    def bubble_of_step(self) -> float:
        """Idle share of the step, 0 to 1, ramp included."""
        return float(1 - self.ideal / self.step_time)

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over computing time, ramp included: how much longer the step is than ideal."""
        return float(self.step_time / self.ideal - 1)

    def as_json(self) -> dict[str, Any]:
        """The form as plain JSON values, times in the unit of F, I and W."""
        return {
            "formula": self.formula,
            "paper": self.paper,
            "idle": float(self.idle),
            "ramp": float(self.ramp),
            "step_time": float(self.step_time),
            "bubble_of_step": self.bubble_of_step,
            "bubble_over_ideal": self.bubble_over_ideal,
        }
