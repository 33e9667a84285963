"""Fit of the cost model's constants to measured runs: few constants, priors with reasons, robust residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.constants import Constant
from shardsmith.design.cost.step import step

TYPICAL_ERROR = 0.08
"""Log error of one typical row: how much a prior of one sigma counts against a row."""
LARGE_ERROR = 0.10
"""Log error from which a residual counts linearly instead of squared."""


def group_weights(groups: Sequence[str]) -> Array:
    """Weights of rows that make every group count alike; their squares sum to the number of rows."""
    _, place, count = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    return np.sqrt(len(place) / (len(count) * count[place]))


def fit(
    batch: Batch, seconds: Array, groups: Sequence[str], start: Mapping[str, Constant], *, evaluations: int = 40
) -> dict[str, float]:
    """Constants that fit `seconds`, started at the priors (never warm) and held near them by their widths.

    Constants without a width are declared and stay. Needs scipy, which only fitting uses.
    """
    from scipy.optimize import least_squares

    free = [name for name, constant in start.items() if constant.width > 0]
    prior = np.log([start[name].prior for name in free])
    width = np.array([start[name].width for name in free])
    weights, measured = group_weights(groups), np.log(seconds)
    fixed = {name: constant.prior for name, constant in start.items()}

    def residuals(point: NDArray[np.float64]) -> NDArray[np.float64]:
        constants = fixed | dict(zip(free, np.exp(point), strict=True))
        error = (np.log(step(batch, constants).total) - measured) * weights
        scaled = np.abs(error) / LARGE_ERROR
        soft = np.sign(error) * LARGE_ERROR * np.sqrt(2.0 * (np.sqrt(1.0 + scaled**2) - 1.0))
        return np.concatenate([soft / TYPICAL_ERROR, (point - prior) / width])

    lower, upper = (np.log([getattr(start[name], end) for name in free]) for end in ("least", "most"))
    found = least_squares(
        residuals,
        np.clip(prior, lower + 1e-9, upper - 1e-9),
        bounds=(lower, upper),
        x_scale=width,
        max_nfev=evaluations,
    )
    return fixed | {name: float(value) for name, value in zip(free, np.exp(found.x), strict=True)}
