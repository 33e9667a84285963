"""A user's own run: the refit of the constants to the log that it left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardsmith.design.cost.constants import constants, write_values
from shardsmith.design.cost.layouts import batch_of, layouts_of
from shardsmith.design.cost.refit import Move, Refit, refit
from shardsmith.design.cost.subject import subject_of
from shardsmith.design.validation.logs import Load, RunLog, read_log
from shardsmith.errors import Code
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.units import counted, format_seconds

OTHER_RUN = Code(
    code="F723",
    title="the log cannot be of this plan",
    because="constants move only as far as machines differ, and none of their legal values explains such a step time",
)
UNEXPLAINED = 0.2
"""Log error that a refit may leave; a run that is further off met a physical bound."""
MOST_SIGMAS = 8.0
"""Spreads between machines by which a constant may move; one that went further stands for something else."""
MOVED = 0.005
"""Relative change from which a move is worth telling."""


@dataclass(frozen=True, kw_only=True)
class OwnRun:
    """A refit to one run, with what its log said and the target whose software it was."""

    log: RunLog
    target: str
    refit: Refit

    @property
    def moved(self) -> tuple[Move, ...]:
        """Constants that went somewhere, widest first."""
        return tuple(move for move in self.refit.moves if abs(move.share) >= MOVED)


def refit_to(log: str | Path, setup: Setup, target: str, current: Mapping[str, float]) -> OwnRun:
    """Constants moved by the run of `setup` whose log is at `log`, as software `target` ran it.

    Raises `Refused` for a log that does not fit (F110, F721, F722), a step time that no machine of this kind explains
    (F723), an unknown target (X351), and a cluster that does not say enough (H501 to H503).
    """
    subject = subject_of(setup, target, current)
    kinds = precision(setup.plan, setup.workload)
    batch = batch_of(subject, layouts_of([setup.plan], setup.model, setup.workload), kinds)
    load = Load(global_batch=setup.workload.global_batch, seq_len=setup.workload.seq_len, devices=setup.plan.world)
    measured = read_log(log, load)
    found = refit(batch, np.array([measured.seconds]), constants(), current)
    if not _explains(found):
        raise OTHER_RUN.refuse(
            f"a step took {format_seconds(measured.seconds)}, predicted {format_seconds(float(found.before_s[0]))}",
            (str(log), f"step time = {measured.seconds:g} s, the median of {measured.steps}"),
            ("plan", f"{setup.plan} on {setup.plan.world} x {setup.cluster.device.name}, software {target}"),
            hint="the plan, cluster, batch and --target that this log was written with",
        )
    return OwnRun(log=measured, target=target, refit=found)


def _explains(found: Refit) -> bool:
    """Whether constants that machines can have bring the prediction to the run."""
    left = np.abs(np.log(found.after_s / found.measured_s))
    furthest = max(abs(move.sigmas) for move in found.moves)
    return bool((left <= UNEXPLAINED).all() and furthest <= MOST_SIGMAS)


def write_constants(run: OwnRun, path: str | Path, source: str) -> None:
    """Write what moved to `path`, for `--constants`."""
    changed = {move.name: float(f"{move.after:.4g}") for move in run.moved}
    write_values(path, changed, f"refit to {counted(run.log.steps, 'step')} of {source}, software {run.target}")


def as_json(run: OwnRun) -> dict[str, Any]:
    """The refit as plain JSON values: the log, predictions before and after, and every constant that moved."""
    before, after = float(run.refit.before_s[0]), float(run.refit.after_s[0])
    return {
        "log": asdict(run.log),
        "target": run.target,
        "measured_s": run.log.seconds,
        "predicted_before_s": before,
        "predicted_after_s": after,
        "moved": [asdict(move) | {"share": move.share} for move in run.moved],
    }
