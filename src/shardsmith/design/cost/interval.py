"""The interval that a prediction carries: how far left-out measured runs of its kind were off."""

from __future__ import annotations

import numpy as np

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.kernels import GENERATIONS, Constants, layer

COVERAGE = 0.8
"""Share of left-out measured runs that lies inside the interval."""
KINDS = ("fused", "unfused", "launch_bound", "new_device", "experts")
"""Kinds of cases whose left-out errors differ: by attention, by launches, by a device no varied source measured, by
experts, whose kernels change from release to release."""


def kind(b: Batch, c: Constants) -> Array:
    """Index into KINDS of every case; the widest that applies."""
    work = layer(b, c).forward
    bound = work < 2.0 * c["launch"] * b.launches
    new = (b.generation == GENERATIONS.index("blackwell")) | (b.generation == GENERATIONS.index("other"))
    dense = np.where(new, 3.0, np.where(bound, 2.0, np.where(b.flash > 0, 0.0, 1.0)))
    return np.where(b.moe_layers > 0, 4.0, dense)


def interval(b: Batch, c: Constants, seconds: Array) -> tuple[Array, Array]:
    """Lower and upper seconds around `seconds` that hold 80 % of left-out runs of the same kind."""
    widths = np.array([c[f"interval_{name}"] for name in KINDS])[kind(b, c).astype(int)]
    return seconds * np.exp(-widths), seconds * np.exp(widths)


def half_widths(b: Batch, c: Constants, predicted: Array, measured: Array) -> dict[str, float]:
    """The log half-width of each kind that holds 80 % of these left-out predictions; kinds without rows are absent."""
    error, kinds = np.abs(np.log(predicted / measured)), kind(b, c)
    return {
        f"interval_{name}": float(np.quantile(error[kinds == i], COVERAGE))
        for i, name in enumerate(KINDS)
        if (kinds == i).any()
    }
