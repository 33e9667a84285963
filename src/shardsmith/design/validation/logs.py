"""Step times from the log of a training run: ours, Megatron-LM, DeepSpeed, torchtitan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardsmith.errors import Code
from shardsmith.specs.parse import NO_FILE
from shardsmith.units import counted

NO_STEPS = Code(
    code="F721",
    title="no step times in the log",
    because="a refit compares the measured time of a step with the predicted one",
)
OTHER_BATCH = Code(
    code="F722",
    title="the log is of another batch",
    because="the time of a step belongs to its number of sequences",
)
WARM_UP = 0.2
"""Share of a log that is left out at its start: compilation, allocation and the first collectives are no step times."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one step of the run works on: sequences, tokens of each, devices."""

    global_batch: int
    seq_len: int
    devices: int


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """Step time of a run: the median of `steps` logged ones in seconds, and half of their middle 80 % around it."""

    form: str
    steps: int
    seconds: float
    spread: float


def read_log(path: str | Path, load: Load) -> RunLog:
    """The step time in the log at `path`, whose form is recognised by its lines.

    Raises `Refused` for a file that is not there (F110), without step times (F721), or of a run with another
    global batch (F722).
    """
    file = Path(path)
    if not file.is_file():
        raise NO_FILE.refuse(f"there is no file {str(path)!r}")
    lines = _COLOURS.sub("", file.read_text(encoding="utf-8", errors="replace")).splitlines()
    for form, find in _FORMS.items():
        times = [seconds for seconds in find(lines, load, str(path)) if 0 < seconds < float("inf")]
        if times:
            kept = np.array(times[min(len(times) - 1, int(np.ceil(WARM_UP * len(times)))) :])
            low, high = np.quantile(kept, (0.1, 0.9))
            return RunLog(form=form, steps=len(kept), seconds=float(np.median(kept)), spread=float(high - low) / 2.0)
    raise NO_STEPS.refuse(
        f"{path} has no line with a step time", hint="metrics.jsonl, or a log of " + ", ".join(_FORMS)
    )


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MEGATRON = re.compile(r"elapsed time per iteration \((ms|s)\):\s*(\d+(?:\.\d+)?)")
_MEGATRON_BATCH = re.compile(r"global batch size:\s*(\d+)")
_DEEPSPEED_STEP = re.compile(r"iter time \(s\):\s*(\d+(?:\.\d+)?)")
_DEEPSPEED_RATE = re.compile(r"CurrSamplesPerSec=(\d+(?:\.\d+)?)")
_TITAN = re.compile(r"\bstep:\s*\d+\b.*?\b(?:tps|wps):\s*([\d,]+)")


def _shardsmith(lines: Sequence[str], load: Load, source: str) -> list[float]:
    """Lines of metrics.jsonl; steps that were skipped took no update and do not count."""
    found = []
    for line in lines:
        if line.startswith("{") and '"step_time_s"' in line:
            try:
                step = json.loads(line)
            except json.JSONDecodeError:
                continue
            seconds = step.get("step_time_s") if isinstance(step, dict) else None
            if isinstance(seconds, int | float) and not step.get("skipped") and 0 < seconds < float("inf"):
                found.append(float(seconds))
    return found


def _megatron(lines: Sequence[str], load: Load, source: str) -> list[float]:
    """Lines of Megatron-LM and of what descends from it; while the batch ramps up they say another batch."""
    found, other = [], 0
    for line in lines:
        time, batch = _MEGATRON.search(line), _MEGATRON_BATCH.search(line)
        if time and batch and int(batch.group(1)) != load.global_batch:
            other = int(batch.group(1))
        elif time:
            found.append(float(time.group(2)) * (1e-3 if time.group(1) == "ms" else 1.0))
    if other and not found:
        raise OTHER_BATCH.refuse(
            f"no step of {counted(load.global_batch, 'sequence')}",
            ("plan", f"global_batch = {load.global_batch}"),
            (source, f"global batch size: {other}"),
            hint=f"global_batch = {other}",
        )
    return found


def _deepspeed(lines: Sequence[str], load: Load, source: str) -> list[float]:
    """Lines of DeepSpeed's pipeline engine, or of its throughput timer, which counts sequences of all ranks."""
    steps = [float(found.group(1)) for found in map(_DEEPSPEED_STEP.search, lines) if found]
    rates = [float(found.group(1)) for found in map(_DEEPSPEED_RATE.search, lines) if found]
    return steps or [load.global_batch / rate for rate in rates if rate > 0]


def _torchtitan(lines: Sequence[str], load: Load, source: str) -> list[float]:
    """Lines of torchtitan, whose throughput counts tokens a second and device."""
    rates = [float(found.group(1).replace(",", "")) for found in map(_TITAN.search, lines) if found]
    return [load.global_batch * load.seq_len / (rate * load.devices) for rate in rates if rate > 0]


_FORMS: dict[str, Callable[[Sequence[str], Load, str], list[float]]] = {
    "shardsmith": _shardsmith,
    "megatron": _megatron,
    "deepspeed": _deepspeed,
    "torchtitan": _torchtitan,
}
