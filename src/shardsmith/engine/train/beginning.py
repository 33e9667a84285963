"""Where a run begins: at a checkpoint, with given weights, or from its seed; decided before a rank starts.

The process that starts the ranks decides once, so that what is wrong with the input is known at once; rank 0
decides again for all, since what stands in a folder is only what it sees there. Needs no torch before it opens weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from shardsmith.engine.checkpoint import store
from shardsmith.engine.checkpoint.companions import GENERATION_FILE
from shardsmith.engine.checkpoint.formats import MODEL_FILE, RUN_FILE, WEIGHTS_FILE, format_of
from shardsmith.engine.checkpoint.record import (
    Record,
    data_faults,
    missing_part,
    model_faults,
    optimizer_faults,
    plain,
    read_record,
    start_faults,
)
from shardsmith.engine.dataset.samples import Source as Samples
from shardsmith.errors import Code, Fault, raise_errors
from shardsmith.plan.setup import Job
from shardsmith.specs.job import Data

OVERWRITES = Code(
    code="F512",
    title="the run's folder holds weights or a run that would be overwritten",
    because="a run that does not go on from what its folder holds would replace it, and nothing could bring it back",
)

CHECKPOINTS = "checkpoints"
"""Where in the run's folder checkpoints are."""
METRICS_FILE = "metrics.jsonl"
"""A line a step: what every run writes, and by which a run's folder is told from other weights."""
_TIMELINE = ("timeline.json", "timeline.png", "trace.json")

_WHERE = ("path", "eval_path", "tokenizer")
"""Fields of Data that say where data are: they may move between two runs."""


def decide(job: Job, samples: Samples) -> store.Found:
    """What the run begins with: the checkpoint that `run.resume` means, if there is one, else a fresh start.

    Raises `Refused` with all that forbids it: nothing complete at the path (F506, F507), another model (F503), other
    data (F504), no state of this optimiser (F508), later checkpoints in the folder (F509); at a fresh start weights of
    `run.init` that are unsound (F110, F401 to F406) or of another model (F503); and weights or a run in the folder that
    would be overwritten (F512).
    """
    found = chosen(job)
    faults = init_faults(job) if found.folder is None else checkpoint_faults(job, found.folder, samples)
    raise_errors(faults + overwrite_faults(job, found.folder))
    return store.Found(folder=found.folder, warnings=(*found.warnings, *faults))


def chosen(job: Job) -> store.Found:
    """The checkpoint that `run.resume` means. Raises `Refused` (F506, F507, F509)."""
    root, resume = Path(job.run.folder) / CHECKPOINTS, job.run.resume
    parts = (store.WEIGHTS,) if "optimizer" in job.run.reset else (store.WEIGHTS, store.OPTIMIZER)
    if resume == "never":
        raise_errors(store.later_faults(root, 0))
        return store.Found(folder=None)
    return store.newest(root, parts) if resume == "auto" else store.named(Path(resume), parts)


def checkpoint_faults(job: Job, folder: Path, samples: Samples) -> list[Fault]:
    """Why this job may not go on from the checkpoint in `folder`. Raises `Refused` where its record is unreadable."""
    record, source = read_record(folder), str(folder)
    faults = model_faults(record.model, job.setup.model, source)
    if "optimizer" not in job.run.reset:
        faults += _optimizer_faults(job, folder, record)
    if "data" not in job.run.reset and record.data:
        faults += data_faults(record.data, data_record(job.data, samples), source)
    return faults + store.later_faults(Path(job.run.folder) / CHECKPOINTS, record.step)


def init_faults(job: Job) -> list[Fault]:
    """Why this job may not begin with the weights that `run.init` names; warnings of what it changes on purpose.

    Raises `Refused` where they are unsound (F110, F401 to F406, F502, F507).
    """
    if not job.run.init:
        return []
    folder = Path(job.run.init)
    hints = {"hugging_face": f'[model] hf = "{folder}"', "run": f'[model] preset = "{folder / MODEL_FILE}"'}
    hint = hints.get(format_of(folder, "run.init"), "")
    from shardsmith.engine.checkpoint.open import open_weights  # brings torch

    return start_faults(open_weights(folder, "run.init").model, job.setup.model, str(folder), hint)


def data_record(data: Data, samples: Samples) -> dict[str, Any]:
    """What fixes the order of the samples."""
    stated = {key: value for key, value in plain(data).items() if key not in _WHERE}
    return stated | {"samples": samples.samples, "seq_len": samples.seq_len}


def overwrite_faults(job: Job, checkpoint: Path | None) -> list[Fault]:
    """A fault where the run's folder holds what this start would replace: `checkpoint` is not its own.

    `run.overwrite` allows it to replace an earlier run, never weights that no run has written.
    """
    folder = Path(job.run.folder)
    if goes_on(job, checkpoint):
        return []
    files = sorted(path.name for path in folder.glob("*.safetensors")) if folder.is_dir() else []
    ran = has_run(folder)
    if not (files or ran) or (ran and job.run.overwrite):
        return []
    begins = "from its seed" if not job.run.init else f"with the weights in {job.run.init}"
    begins = begins if checkpoint is None else f"at {checkpoint}"
    said = (("job", f"begins {begins}"), (str(folder), ", ".join([METRICS_FILE] * ran + files)))
    if ran:
        hint = "another run.folder; or run.overwrite = true, to replace that run"
        return [OVERWRITES.fault(f"{folder} holds an earlier run, which would be overwritten", *said, hint=hint)]
    hint = f'another run.folder, and run.init = "{folder}" to begin with these weights'
    return [OVERWRITES.fault(f"{folder} holds weights that no run wrote", *said, hint=hint)]


def goes_on(job: Job, checkpoint: Path | None) -> bool:
    """Whether `checkpoint` is one of the run in the job's folder, which is then continued."""
    return checkpoint is not None and Path(job.run.folder).resolve() in checkpoint.resolve().parents


def has_run(folder: Path) -> bool:
    """Whether a run has taken a step in `folder`."""
    metrics = folder / METRICS_FILE
    return metrics.is_file() and metrics.stat().st_size > 0


def clear_run(folder: Path) -> None:
    """Remove what an earlier run left in `folder`, but for its checkpoints and logs; does nothing where none did."""
    if not has_run(folder):
        return
    for name in (METRICS_FILE, *_TIMELINE, WEIGHTS_FILE, MODEL_FILE, RUN_FILE, GENERATION_FILE):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)


def _optimizer_faults(job: Job, folder: Path, record: Record) -> list[Fault]:
    if record.optimizer is not None and not store.has_part(folder, store.OPTIMIZER):
        return [missing_part(str(folder))]
    return optimizer_faults(record.optimizer, job.optimisation, str(folder))
