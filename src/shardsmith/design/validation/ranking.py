"""Quality of choice: would the predicted best layout have been a good one to run?"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardsmith.design.cost.batch import Array
from shardsmith.design.validation.rows import Row, source_of

MODEL_KEYS = (
    "layers",
    "hidden",
    "heads",
    "vocab",
    "seq_len",
    "gpus",
    "global_batch",
    "gpu",
    "precision",
)
LAYOUT_KEYS = ("tp", "pp", "cp", "dp", "micro_batch", "vpp", "recompute")


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """One set of layouts of one job: how well their order was predicted, and what the pick would have cost."""

    name: str
    source: str
    rows: int
    kendall_tau: float
    pair_order: float
    regret: float
    best_in_top3: bool


def rankings(rows: Sequence[Row], predicted: Array, measured: Array, *, least: int = 4) -> tuple[Ranking, ...]:
    """All sets of at least `least` layouts of one model, batch, cluster and dated section; repeats averaged."""
    sets: dict[tuple[str, ...], dict[tuple[str, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for at, row in enumerate(rows):
        job = (source_of(row), _section(row), *(row.get(key, "") for key in MODEL_KEYS))
        sets[job][tuple(row.get(key, "") for key in LAYOUT_KEYS)].append(at)
    found = []
    for job, layouts in sets.items():
        if len(layouts) < least:
            continue
        truth = np.array([measured[places].mean() for places in layouts.values()])
        guess = np.array([predicted[places].mean() for places in layouts.values()])
        name = f"{job[2]} layers x {job[3]}, {job[4]} heads, {job[7]} devices, batch {job[8]} {job[1]}".strip()
        found.append(_ranking(name, job[0], truth, guess))
    return tuple(found)


def _section(row: Row) -> str:
    found = re.search(r'section "([^"]*)" ?(\d\d-\d\d)?', row.get("notes", ""))
    return f"{found.group(1)} {found.group(2) or ''}".strip() if found else ""


def _ranking(name: str, source: str, truth: Array, guess: Array) -> Ranking:
    apart = 0.05 if source == "BIGS" else 0.02
    i, j = np.triu_indices(len(truth), 1)
    same = np.sign(guess[i] - guess[j]) == np.sign(truth[i] - truth[j])
    clear = np.abs(np.log(truth[i] / truth[j])) > apart
    return Ranking(
        name=name,
        source=source,
        rows=len(truth),
        kendall_tau=float(2.0 * same.mean() - 1.0),
        pair_order=float(same[clear].mean()) if clear.any() else float("nan"),
        regret=float(truth[guess.argmin()] / truth.min() - 1.0),
        best_in_top3=bool(truth.argmin() in np.argsort(guess)[:3]),
    )
