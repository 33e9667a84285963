"""The training loop of one rank, from its process group to the last step."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

from shardsmith.engine.dataset.batches import batches_of, open_source
from shardsmith.engine.runtime import environment, process, progress
from shardsmith.engine.train.checkpoints import Checkpoints
from shardsmith.engine.train.gather import full_parameters, measured_timeline
from shardsmith.engine.train.metrics import MetricsWriter, StepMetrics
from shardsmith.engine.train.step import StepResult, Trainer
from shardsmith.plan.setup import Job
from shardsmith.schedule.ir import Kind
from shardsmith.specs.flops import mfu, model_flops

WEIGHTS_FILE = "model.safetensors"
"""Full final weights in the run's folder, under the model's own tensor names."""


def train_rank(job: Job, pace: Mapping[Kind, float] | None = None) -> None:
    """Train as `job` says; every rank of the plan's world calls this in a process of its own.

    Writes into `job.run.folder` from rank 0: metrics.jsonl, TensorBoard events, the recorded timeline
    (timeline.json, trace.json) and the final weights; all ranks write checkpoints/, from which it resumes.
    """
    here = process.start(environment.detect(), timeout_s=job.run.timeout_s)
    try:
        rank = here.environment.rank
        trainer = Trainer(
            job.setup,
            job.optimisation,
            rank=rank,
            seed=job.run.seed,
            device=here.device,
            timeout_s=job.run.timeout_s,
            pace=pace,
        )
        trainer.check_replicas()
        source = open_source(
            job.data.path, seed=job.data.seed, vocab=job.setup.model.vocab, seq_len=job.setup.workload.seq_len
        )
        batches = batches_of(source, seed=job.data.seed, setup=trainer.setup)
        folder = Path(job.run.folder)
        checkpoints = Checkpoints(job, trainer, batches)
        checkpoints.resume()
        _steps(job, trainer, checkpoints, folder, notes=_notes(pace))
        full = full_parameters(trainer)
        if full is not None:
            save_file(full, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    finally:
        process.stop()


def _steps(job: Job, trainer: Trainer, checkpoints: Checkpoints, folder: Path, notes: tuple[str, ...]) -> None:
    rank, first, batches = dist.get_rank(), checkpoints.step, checkpoints.batches
    writer = MetricsWriter(folder, tensorboard=job.run.tensorboard, first=first) if rank == 0 else None
    with _progress_bar(job.run.steps, shown=rank == 0) as report:
        for step in range(first, job.run.steps):
            progress.at_step(step)
            traced = step == job.run.timeline_step
            if traced:
                trainer.recorder.clear()
                dist.barrier()
            trainer.recorder.tracing = trainer.recorder.counting = traced
            start = time.monotonic()
            result = trainer.step(trainer.move(batches.batch(step, trainer.data_index)))
            metrics = _metrics(job, step, result, time.monotonic() - start)
            if traced:
                trainer.recorder.tracing = trainer.recorder.counting = False
                _write_timeline(trainer, folder, notes)
            if writer is not None:
                writer.write(metrics)
            report(metrics)
            checkpoints.after(step)
    if writer is not None:
        writer.close()


def _metrics(job: Job, step: int, result: StepResult, seconds: float) -> StepMetrics:
    setup = job.setup
    flops = model_flops(setup.model, seq_len=setup.workload.seq_len, tokens=result.tokens)
    peak = setup.cluster.device.peak(setup.workload.dtype)
    share = None if peak is None else mfu(flops.total / seconds, peak * setup.plan.world)
    return StepMetrics(
        step=step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        tokens=result.tokens,
        tokens_per_s=result.tokens / seconds,
        mfu=share,
        step_time_s=seconds,
        lr=job.optimisation.lr,
    )


def _write_timeline(trainer: Trainer, folder: Path, notes: tuple[str, ...]) -> None:
    timeline = measured_timeline(trainer, notes)
    if timeline is not None:
        (folder / "timeline.json").write_text(json.dumps(timeline.as_json()))
        (folder / "trace.json").write_text(json.dumps(timeline.chrome_trace()))


def _notes(pace: Mapping[Kind, float] | None) -> tuple[str, ...]:
    if not pace:
        return ()
    return ("paced: " + ", ".join(f"{kind.value} = {seconds * 1e3:g} ms" for kind, seconds in pace.items()),)


@contextmanager
def _progress_bar(steps: int, *, shown: bool) -> Iterator[Any]:
    """A function that reports one step's metrics; a bar on stderr on rank 0, silence elsewhere."""
    if not shown:
        yield lambda metrics: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("train", total=steps, status="")

        def report(metrics: StepMetrics) -> None:
            status = f"loss {metrics.loss:.4f}  norm {metrics.grad_norm:.3f}  {metrics.tokens_per_s:,.0f} tokens/s"
            bar.update(task, advance=1, status=status)

        yield report
