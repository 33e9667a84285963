"""What data, optimiser and run settings forbid: values outside their range, and those that would be ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shardsmith.errors import Code, Fault
from shardsmith.specs.job import SYNTHETIC, Data, Optimisation, Run
from shardsmith.specs.learning_rate import decay_length
from shardsmith.units import counted

OUT_OF_RANGE = Code(
    code="F206",
    title="a setting outside its range",
    because="such a value has no meaning, and the run would fail later or do something else than it says",
)
IGNORED = Code(
    code="F207",
    title="a setting that nothing would read",
    because="a value that has no effect beside the others is a mistake, and the run would hide it",
)
WEIGHTS = Code(
    code="G401",
    title="weights do not match the paths",
    because="a blend draws from each path in the proportion of its weight, so each path has one, above zero",
)
TWICE_HELD_OUT = Code(
    code="G402",
    title="evaluation data named twice",
    because="either some documents of the training data are held out, or other files are evaluated on",
)
NOTHING_HELD_OUT = Code(
    code="G403",
    title="nothing to evaluate on",
    because="an evaluation needs data that the run is not trained on",
)

LONGEST_WAIT_S = 30 * 86400.0
"""A month."""

Origin = Callable[[str], str]


def job_faults(data: Data, optimisation: Optimisation, run: Run, origin: Origin = lambda key: "job") -> list[Fault]:
    """Every rule that these settings break; `origin` tells where a value was written, by its key (`data.path`)."""
    found = _Judge({"data": data, "optimisation": optimisation, "run": run}, origin)
    _data(found, data, run)
    _optimisation(found, optimisation, run)
    found.within("run.steps", run.steps >= 1, "1 or more")
    found.within("run.eval_every", run.eval_every >= 0, "0 (never) or more")
    found.within("run.eval_batches", run.eval_batches >= 0, "0 (all) or more")
    found.within("run.timeout_s", 0 < run.timeout_s <= LONGEST_WAIT_S, f"more than 0 and at most {LONGEST_WAIT_S:g}")
    if not -1 <= run.timeline_step < max(run.steps, 1):
        message = f"timeline_step must be -1 (none) to {run.steps - 1}, the last of {run.steps} steps"
        hint = f"timeline_step = {max(run.steps - 1, 0)} or -1; or steps = {run.timeline_step + 1} or more"
        found.add(OUT_OF_RANGE, message, "run.timeline_step", "run.steps", hint=hint)
    return found.faults


class _Judge:
    """Collects faults; knows how to show where a value of the three sections was written."""

    def __init__(self, sections: dict[str, Any], origin: Origin) -> None:
        self.sections, self.origin = sections, origin
        self.faults: list[Fault] = []

    def said(self, *keys: str) -> list[tuple[str, str]]:
        pairs = (key.partition(".")[::2] for key in keys)
        return [(self.origin(f"{s}.{k}"), f"{k} = {json.dumps(getattr(self.sections[s], k))}") for s, k in pairs]

    def within(self, key: str, sound: bool, allowed: str) -> None:
        if not sound:
            section, _, name = key.partition(".")
            default = getattr(type(self.sections[section])(), name)
            hint = f"{name} = {json.dumps(default)}" if default is not None else f"leave {name} out"
            self.add(OUT_OF_RANGE, f"{name} must be {allowed}", key, hint=hint)

    def unread(self, key: str, ignored: bool, other: str, hint: str) -> None:
        if ignored:
            value = self.said(other)[0][1]
            self.add(IGNORED, f"{key.partition('.')[2]} has no effect where {value}", key, other, hint=hint)

    def add(self, code: Code, message: str, *keys: str, hint: str) -> None:
        self.faults.append(code.fault(message, *self.said(*keys), hint=hint))


def _data(found: _Judge, data: Data, run: Run) -> None:
    paths = len(data.paths)
    found.within("data.path", paths >= 1 and (paths == 1 or SYNTHETIC not in data.paths), "token files, or synthetic")
    found.within("data.eval_fraction", 0 <= data.eval_fraction < 1, "0 or more and below 1")
    if data.weights and (len(data.weights) != paths or min(data.weights) <= 0):
        message = f"{counted(len(data.weights), 'weight')} for {counted(paths, 'path')}"
        if len(data.weights) == paths:
            message = "a weight is not above zero"
        found.add(WEIGHTS, message, "data.path", "data.weights", hint=f"weights = {[1] * paths}")
    elif data.weights and paths == 1:
        found.unread("data.weights", True, "data.path", "leave weights out, or name several paths")
    held_out = bool(data.eval_paths) or data.eval_fraction > 0
    if data.eval_paths and data.eval_fraction > 0:
        hint = "keep one of the two"
        found.add(TWICE_HELD_OUT, "eval_path and eval_fraction", "data.eval_path", "data.eval_fraction", hint=hint)
    if data.eval_paths and data.paths == (SYNTHETIC,):
        found.unread("data.eval_path", True, "data.path", "eval_fraction = 0.01 holds out random tokens")
    if run.eval_every > 0 and not held_out:
        keys = ("run.eval_every", "data.eval_path", "data.eval_fraction")
        found.add(NOTHING_HELD_OUT, "nothing is held out to evaluate on", *keys, hint="eval_fraction = 0.01")
    found.unread("data.eval_path", bool(data.eval_paths) and not run.eval_every, "run.eval_every", "eval_every = 100")


def _optimisation(found: _Judge, o: Optimisation, run: Run) -> None:
    at = "optimisation."
    found.within(at + "lr", o.lr > 0, "more than 0")
    found.within(at + "eps", o.eps > 0, "more than 0")
    found.within(at + "betas", all(0 <= beta < 1 for beta in o.betas), "0 or more and below 1 each")
    found.within(at + "momentum", 0 <= o.momentum < 1, "0 or more and below 1")
    found.within(at + "weight_decay", o.weight_decay >= 0, "0 or more")
    found.within(at + "clip", o.clip >= 0, "0 (never) or more")
    found.within(at + "min_lr", 0 <= o.min_lr <= max(o.lr, 0.0), f"0 to {max(o.lr, 0.0)} (lr)")
    found.within(at + "warmup_steps", 0 <= o.warmup_steps <= run.steps, f"0 to {run.steps} (steps)")
    found.within(at + "decay_steps", o.decay_steps is None or o.decay_steps >= 1, "1 or more")
    if o.schedule == "wsd" and o.decay_steps and o.warmup_steps + decay_length(o, run.steps) > run.steps:
        message = f"warm-up and decay take more than the {run.steps} steps of the run"
        keys = (at + "warmup_steps", at + "decay_steps", "run.steps")
        found.add(OUT_OF_RANGE, message, *keys, hint=f"decay_steps = {max(1, run.steps - o.warmup_steps)}")
    default = Optimisation()
    for key in ("decay_steps", "min_lr"):
        changed = getattr(o, key) != getattr(default, key)
        hint = f"schedule = linear, or leave {key} out"
        found.unread(at + key, changed and o.schedule == "constant", at + "schedule", hint)
    sgd = o.optimizer == "sgd"
    found.unread(at + "momentum", o.momentum > 0 and not sgd, at + "optimizer", "betas are what adamw has")
    for key in ("betas", "eps"):
        changed = getattr(o, key) != getattr(default, key)
        found.unread(at + key, changed and sgd, at + "optimizer", f"leave {key} out, or optimizer = adamw")
