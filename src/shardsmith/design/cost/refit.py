"""Refit: constants moved by one user's own run, each as far as its prior and the run allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.constants import Constant
from shardsmith.design.cost.step import step

RUN_NOISE = 0.03
"""Log error of the median of a short run against what the same machine does on another day."""
ROUNDS = 6
"""Linearisations; each solves the linear problem exactly, and the model bends little within one sigma."""
SMALL = 1e-4


@dataclass(frozen=True, kw_only=True)
class Move:
    """How far one constant went: `before`, `after`, and the move in units of its spread between machines."""

    name: str
    before: float
    after: float
    sigmas: float

    @property
    def share(self) -> float:
        """Relative change, 0.1 for 10 % more."""
        return self.after / self.before - 1.0


@dataclass(frozen=True, kw_only=True)
class Refit:
    """Constants after a refit, the moves (widest first), and the run's seconds as predicted before and after."""

    values: dict[str, float]
    moves: tuple[Move, ...]
    before_s: Array
    after_s: Array
    measured_s: Array


def refit(batch: Batch, seconds: Array, start: Mapping[str, Constant], current: Mapping[str, float]) -> Refit:
    """Constants for the machine that ran `batch` in `seconds` a step, starting from `current`.

    The most probable constants given the runs, when each differs from one machine to the next log-normally
    by its `spread` and a run repeats within RUN_NOISE: Gauss-Newton on the posterior, in the space of the
    runs, so that one run is enough. Constants without spread stay; all stay inside their bounds.
    """
    free = [name for name, constant in start.items() if constant.spread > 0]
    spread = np.array([start[name].spread for name in free])
    origin = np.log([current[name] for name in free])
    least, most = (np.log([getattr(start[name], end) for name in free]) for end in ("least", "most"))
    measured, moved = np.log(seconds), np.zeros(len(free))

    def predicted(theta: Array) -> Array:
        constants = dict(current) | dict(zip(free, np.exp(origin + theta), strict=True))
        return np.asarray(np.log(step(batch, constants).total), dtype=np.float64)

    for _ in range(ROUNDS):
        here = predicted(moved)
        slopes = np.stack([(predicted(moved + SMALL * unit) - here) / SMALL for unit in np.eye(len(free))], axis=1)
        covered = slopes * spread**2
        gain = covered.T @ np.linalg.inv(covered @ slopes.T + RUN_NOISE**2 * np.eye(len(measured)))
        moved = np.clip(gain @ (measured - here + slopes @ moved), least - origin, most - origin)
    values = dict(current) | dict(zip(free, np.exp(origin + moved).tolist(), strict=True))
    moves = [
        Move(name=name, before=current[name], after=values[name], sigmas=float(by / spread[at]))
        for at, (name, by) in enumerate(zip(free, moved, strict=True))
    ]
    return Refit(
        values=values,
        moves=tuple(sorted(moves, key=lambda move: -abs(move.sigmas))),
        before_s=np.exp(predicted(np.zeros(len(free)))),
        after_s=np.exp(predicted(moved)),
        measured_s=seconds,
    )
