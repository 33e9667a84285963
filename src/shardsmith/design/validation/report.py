"""Validate: predict a CSV of measured runs and say how far off every row, group and choice is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from shardsmith.design.cost.batch import Array
from shardsmith.design.cost.constants import constants, values
from shardsmith.design.cost.interval import interval
from shardsmith.design.cost.memory import StateBytes, peak
from shardsmith.design.cost.step import step
from shardsmith.design.validation.columns import require_columns
from shardsmith.design.validation.cross import Errors, errors, leave_out, refitted_by_one_row, scaled_by_one_row
from shardsmith.design.validation.ranking import Ranking, rankings
from shardsmith.design.validation.rows import Runs, Skipped, read_runs, target_of
from shardsmith.units import GB

Cross = Literal["none", "leave-one-group-out", "leave-one-source-out", "one-scalar-per-source", "one-refit-per-source"]
CROSSES: tuple[Cross, ...] = get_args(Cross)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Predictions beside measurements: seconds with their interval, errors, and quality of choice."""

    runs: Runs
    predicted: Array
    low: Array
    high: Array
    cross: Cross

    @property
    def errors(self) -> Errors:
        """Relative errors over all rows."""
        return errors(self.predicted, self.runs.seconds, self.runs.groups)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Rows that could not be scored, with reasons."""
        return self.runs.skipped

    @property
    def held(self) -> float:
        """Share of rows whose measured time lies inside the interval; NaN without rows."""
        inside = (self.runs.seconds >= self.low) & (self.runs.seconds <= self.high)
        return float(inside.mean()) if len(inside) else float("nan")

    @property
    def rankings(self) -> tuple[Ranking, ...]:
        """Sets of layouts of one job, each with order and regret of the pick."""
        return rankings(self.runs.rows, self.predicted, self.runs.seconds)


def validate(
    path: str | Path, *, cross: Cross = "none", moe: bool = False, constants_file: str | Path | None = None
) -> Validation:
    """Predictions for the scorable rows of `path`, by the shipped constants (those of a file over them), or
    (`cross`) by left-out fits.

    Raises `Refused` only for a file that cannot be read (F703) or lacks columns (F702); a bad row is skipped and named.
    """
    require_columns(path)
    runs, current = read_runs(path, moe=moe), values(constants_file)
    if cross == "none" or not len(runs.seconds):
        predicted = step(runs.batch, current).total if len(runs.seconds) else np.empty(0)
    elif cross == "one-refit-per-source":
        predicted = refitted_by_one_row(runs, constants())
    else:
        blocks = runs.groups if cross == "leave-one-group-out" else runs.sources
        predicted = leave_out(runs, blocks, constants())
        if cross == "one-scalar-per-source":
            predicted = scaled_by_one_row(predicted, runs.seconds, runs.sources, constants()["machine"].spread)
    low, high = interval(runs.batch, current, predicted) if len(predicted) else (predicted, predicted)
    return Validation(runs=runs, predicted=predicted, low=low, high=high, cross=cross)


def as_json(v: Validation) -> dict[str, Any]:
    """The validation as plain JSON values, with the keys that the verb promises."""
    pairs = zip(v.runs.rows, v.runs.groups, v.predicted, v.low, v.high, v.runs.seconds, strict=True)
    rows = [
        {
            "id": row["id"],
            "group": group,
            "predicted_s": float(predicted),
            "low_s": float(low),
            "high_s": float(high),
            "measured_s": float(measured),
            "error": float(predicted / measured - 1.0),
            "predicted_gb": float(held),
            "measured_gb": _finite(float(reported)),
        }
        for (row, group, predicted, low, high, measured), held, reported in zip(
            pairs, predicted_gb(v.runs), v.runs.memory_gb, strict=True
        )
    ]
    return {
        "cross": v.cross,
        "rows": rows,
        "skipped": [asdict(s) for s in v.skipped],
        "median_abs_error": _finite(v.errors.median),
        "mean_abs_error": _finite(v.errors.mean),
        "group_weighted_abs_error": _finite(v.errors.group_weighted),
        "interval_holds": _finite(v.held),
        "ranking": {r.name: {key: _finite(x) for key, x in asdict(r).items() if key != "name"} for r in v.rankings},
    }


def predicted_gb(runs: Runs) -> Array:
    """Peak memory of the fuller end stage of every row, in 1e9 bytes, by the declared bytes of its target."""
    declared = [target_of(row).memory for row in runs.rows]
    if not declared:
        return np.empty(0)
    held = StateBytes(
        weights=np.array([m.weights for m in declared]),
        gradients=np.array([m.gradients for m in declared]),
        states=np.array([m.states_sharded for m in declared]),
        logits=np.array([m.logits for m in declared]),
        gathered_layers=np.array([m.gathered_layers for m in declared]),
        gathered=np.array([m.gathered or m.weights for m in declared]),
        update=np.array([m.update for m in declared]),
        spare=np.array([m.spare for m in declared]),
    )
    fixed = np.array([m.fixed for m in declared])
    return np.asarray((peak(runs.batch, held) + fixed) / GB, dtype=np.float64)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def by_group(v: Validation) -> list[tuple[str, int, float, float]]:
    """Name, rows, mean error and bias (mean log ratio) of every group, worst first."""
    names = np.asarray(v.runs.groups)
    off = np.abs(v.predicted / v.runs.seconds - 1.0)
    bias = np.log(v.predicted / v.runs.seconds)
    found = [
        (str(n), int((names == n).sum()), float(off[names == n].mean()), float(bias[names == n].mean()))
        for n in np.unique(names)
    ]
    return sorted(found, key=lambda entry: -entry[2])
