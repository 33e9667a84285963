"""Leave-out predictions: every block of rows predicted by constants that never saw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array
from shardsmith.design.cost.constants import Constant
from shardsmith.design.cost.fit import fit
from shardsmith.design.cost.refit import RUN_NOISE, refit
from shardsmith.design.cost.step import step
from shardsmith.design.validation.rows import Runs


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative errors |predicted / measured - 1| of rows: plain, middle, and with every group counted alike."""

    mean: float
    median: float
    group_weighted: float


def errors(predicted: Array, measured: Array, groups: Sequence[str]) -> Errors:
    """Errors of `predicted` against `measured`; NaN where there are no rows."""
    off, names = np.abs(predicted / measured - 1.0), np.asarray(groups)
    if not len(off):
        return Errors(mean=float("nan"), median=float("nan"), group_weighted=float("nan"))
    by_group = [off[names == name].mean() for name in np.unique(names)]
    return Errors(mean=float(off.mean()), median=float(np.median(off)), group_weighted=float(np.mean(by_group)))


def leave_out(runs: Runs, blocks: Sequence[str], start: Mapping[str, Constant]) -> Array:
    """Seconds predicted for each row by constants fitted, from the priors, on all rows outside its block."""
    predicted, names, groups = np.empty(len(runs.seconds)), np.asarray(blocks), np.asarray(runs.groups)
    for name in np.unique(names):
        left = names == name
        rest = np.flatnonzero(~left)
        constants = fit(runs.batch.select(rest), runs.seconds[rest], list(groups[rest]), start)
        predicted[left] = step(runs.batch.select(np.flatnonzero(left)), constants).total
    return predicted


def middle(predicted: Array, rows: NDArray[np.intp]) -> int:
    """The row of middle predicted time among `rows`: chosen without looking at any measurement."""
    order: NDArray[np.intp] = np.argsort(predicted[rows], kind="stable")
    return int(rows[order[(len(rows) - 1) // 2]])


def refitted_by_one_row(runs: Runs, start: Mapping[str, Constant]) -> Array:
    """Seconds predicted for each source by constants fitted without it, then refitted to ONE of its rows.

    As a user does with `validate --refit`. The row is its `middle` one, and keeps its unfitted prediction, so
    that it does not count as known.
    """
    predicted, names = np.empty(len(runs.seconds)), np.asarray(runs.sources)
    groups = np.asarray(runs.groups)
    for name in np.unique(names):
        rows, rest = np.flatnonzero(names == name), np.flatnonzero(names != name)
        constants = fit(runs.batch.select(rest), runs.seconds[rest], list(groups[rest]), start)
        predicted[rows] = step(runs.batch.select(rows), constants).total
        known = middle(predicted, rows)
        moved = refit(runs.batch.select(np.array([known])), runs.seconds[[known]], start, constants).values
        others = rows[rows != known]
        predicted[others] = step(runs.batch.select(others), moved).total
    return predicted


def scaled_by_one_row(predicted: Array, measured: Array, sources: Sequence[str], spread: float) -> Array:
    """Predictions with ONE factor a source, set from one of its rows as a user with one measured run would.

    The factor is the most probable one where machines differ by `spread` and a run repeats within RUN_NOISE, as in a
    refit: one run is not believed to the last percent. The row is the `middle` one; itself it keeps its unscaled
    prediction, so that it does not count as known.
    """
    trust = spread**2 / (spread**2 + RUN_NOISE**2)
    scaled, names = predicted.copy(), np.asarray(sources)
    for name in np.unique(names):
        rows = np.flatnonzero(names == name)
        known = middle(predicted, rows)
        others = rows[rows != known]
        scaled[others] = predicted[others] * (measured[known] / predicted[known]) ** trust
    return scaled
