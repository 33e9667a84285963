"""Regenerate fitted constants and docs/accuracy.md from the measured runs in package data (needs scipy).

python -m shardsmith.design.validation.regenerate [docs/accuracy.md]
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import tomli_w

from shardsmith.design.cost.constants import constants
from shardsmith.design.cost.fit import fit
from shardsmith.design.cost.interval import half_widths
from shardsmith.design.cost.step import step
from shardsmith.design.validation.accuracy import accuracy_page
from shardsmith.design.validation.cross import leave_out
from shardsmith.design.validation.rows import read_runs

DATA = Path(str(files("shardsmith.design.cost") / "data"))
DIGITS = 4
"""Significant digits of a fitted constant; more would be noise."""


def regenerate() -> dict[str, float]:
    """Fitted constants and interval widths from package data: widths from leave-one-source-out errors.

    A user's machine is a new source, so that is how far off a prediction for it is. Runs with experts are in no fit, so
    their errors are left out as they are.
    """
    runs, start = read_runs(DATA / "runs.csv"), constants()
    fitted = fit(runs.batch, runs.seconds, runs.groups, start)
    left_out = leave_out(runs, runs.sources, start)
    sparse = read_runs(DATA / "runs.csv", moe=True)
    found = half_widths(sparse.batch, fitted, step(sparse.batch, fitted).total, sparse.seconds)
    return fitted | found | half_widths(runs.batch, fitted, left_out, runs.seconds)


def write(found: Mapping[str, float]) -> None:
    """Put new values into constants.toml; everything else there stays."""
    path = DATA / "constants.toml"
    text = path.read_text(encoding="utf-8")
    head = text[: text.index("\n[") + 1]
    tables = tomllib.loads(text)
    for name, value in found.items():
        tables[name]["value"] = float(f"{value:.{DIGITS}g}")
    path.write_text(head + tomli_w.dumps(tables), encoding="utf-8")


if __name__ == "__main__":
    write(regenerate())
    constants.cache_clear()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(accuracy_page(DATA / "runs.csv"), encoding="utf-8")
