"""The training loop of one rank, from its process group to the last step."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardsmith.engine.checkpoint.run_folder import write_run
from shardsmith.engine.checkpoint.source import in_memory
from shardsmith.engine.dataset.batches import batches_of, held_out_of
from shardsmith.engine.dataset.open import open_data
from shardsmith.engine.parallel.expert import Loads
from shardsmith.engine.runtime import environment, preemption, process, progress
from shardsmith.engine.train.beginning import clear_run
from shardsmith.engine.train.checkpoints import Checkpoints
from shardsmith.engine.train.evaluate import evaluate
from shardsmith.engine.train.first_steps import CHECKED_STEPS, check_batches
from shardsmith.engine.train.gather import full_parameters, measured_timeline
from shardsmith.engine.train.metrics import MetricsWriter, StepMetrics
from shardsmith.engine.train.nonfinite import stop_nonfinite
from shardsmith.engine.train.optimizer import set_learning_rate
from shardsmith.engine.train.run_record import changes, write_record
from shardsmith.engine.train.step import StepResult, Trainer
from shardsmith.plan.setup import Job
from shardsmith.schedule.ir import Kind
from shardsmith.specs.flops import mfu, model_flops
from shardsmith.specs.learning_rate import learning_rate

_log = logging.getLogger("shardsmith.train")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The step at which a run began here, and whether it was asked to end (SIGTERM) before its last one."""

    first: int
    preempted: bool


def train_rank(job: Job, pace: Mapping[Kind, float] | None = None) -> Ended:
    """Train as `job` says; every rank of the plan's world calls this in a process of its own.

    Writes into `job.run.folder` from rank 0: the job as it is run (run.toml), its tokenizer, metrics.jsonl,
    TensorBoard events, the recorded timeline (timeline.json, trace.json) and the final weights (model.safetensors,
    model.toml); all ranks write checkpoints/, from which it resumes. A SIGTERM to any rank ends all of them after
    the step they are in, with a checkpoint of it.
    """
    here = process.start(environment.detect(), timeout_s=job.run.timeout_s)
    try:
        trainer = Trainer(
            job.setup,
            job.optimisation,
            rank=here.environment.rank,
            seed=job.run.seed,
            device=here.device,
            timeout_s=job.run.timeout_s,
            pace=pace,
        )
        trainer.check_replicas()
        with preemption.noticed(lambda: setattr(trainer, "stopping", True)):
            ended = _steps(job, trainer, notes=_notes(pace))
        full = full_parameters(trainer)
        if full is not None:
            write_run(in_memory(job.setup.model, full), Path(job.run.folder))
        return ended
    finally:
        process.stop()


def _steps(job: Job, trainer: Trainer, notes: tuple[str, ...]) -> Ended:
    """All steps of the run that are left to do."""
    run, setup, rank, folder = job.run, trainer.setup, dist.get_rank(), Path(job.run.folder)
    data = open_data(job.data, vocab=setup.model.vocab, seq_len=setup.workload.seq_len)
    held_out = None
    if data.held_out is not None and run.eval_every:
        held_out = held_out_of(data.held_out, seed=job.data.seed, setup=setup, most=run.eval_batches)
    checkpoints = Checkpoints(job, trainer, batches_of(data.train, seed=job.data.seed, setup=setup))
    checkpoints.resume()
    first, batches = checkpoints.step, checkpoints.batches
    writer = None
    if rank == 0:
        if checkpoints.fresh:
            clear_run(folder)
        elif changed := changes(job, folder):
            _log.warning("changed since this run began: %s", "; ".join(changed))
        write_record(job, folder)
        writer = MetricsWriter(folder, tensorboard=run.tensorboard, first=first)
    stop = False
    with _progress_bar(first, run.steps, shown=rank == 0 and first < run.steps) as report:
        for step in range(first, run.steps):
            progress.at_step(step)
            last = step == run.steps - 1
            microbatches = batches.batch(step, trainer.data_index)
            if step - first < CHECKED_STEPS:
                check_batches(trainer.move(microbatches), batches, trainer.groups, step)
            rate = learning_rate(job.optimisation, trainer.updates, run.steps)
            set_learning_rate(trainer.optimizer, rate)
            with _traced(trainer, folder, notes, on=step == run.timeline_step):
                start = time.monotonic()
                result = trainer.step(trainer.move(microbatches))
                seconds = time.monotonic() - start
            overflow = trainer.scaler.dynamic and math.isfinite(result.loss)
            if result.skipped and not overflow and job.optimisation.nonfinite == "stop":
                stop_nonfinite(trainer, result, step)
            stop = result.stop and not last
            metrics = _metrics(job, step, result, seconds, rate)
            if held_out is not None and not stop and (last or (step + 1) % run.eval_every == 0):
                metrics = replace(metrics, eval_loss=evaluate(trainer, held_out).loss)
            if writer is not None:
                writer.write(metrics)
            report(metrics)
            checkpoints.after(step, stop=stop)
            if stop:
                break
    if writer is not None:
        writer.close()
    return Ended(first=first, preempted=stop)


@contextmanager
def _traced(trainer: Trainer, folder: Path, notes: tuple[str, ...], *, on: bool) -> Iterator[None]:
    """Record the step inside, if `on`, and write its timeline."""
    if on:
        trainer.recorder.clear()
        dist.barrier()
    trainer.recorder.tracing = trainer.recorder.counting = on
    yield
    trainer.recorder.tracing = trainer.recorder.counting = False
    if on:
        _write_timeline(trainer, folder, notes)


def _metrics(job: Job, step: int, result: StepResult, seconds: float, rate: float) -> StepMetrics:
    setup = job.setup
    flops = model_flops(setup.model, seq_len=setup.workload.seq_len, tokens=result.tokens)
    peak = setup.cluster.device.peak(setup.workload.dtype)
    share = None if peak is None else mfu(flops.total / seconds, peak * setup.plan.world)
    loads = result.loads
    routed = {} if loads is None else _routed(loads)
    return StepMetrics(
        step=step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        tokens=result.tokens,
        tokens_per_s=result.tokens / seconds,
        mfu=share,
        step_time_s=seconds,
        lr=rate,
        skipped=result.skipped,
        **routed,
    )


def _routed(loads: Loads) -> dict[str, float]:
    return {
        "aux_loss": loads.aux_loss,
        "z_loss": loads.z_loss,
        "expert_load_max": loads.largest,
        "expert_load_min": loads.smallest,
        "dropped": loads.dropped,
    }


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
def _progress_bar(first: int, steps: int, *, shown: bool) -> Iterator[Any]:
    """A function that reports one step's metrics; a bar on stderr from step `first` on, or silence."""
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
        task = bar.add_task("train", total=steps, completed=first, status="")

        def report(metrics: StepMetrics) -> None:
            status = f"loss {metrics.loss:.4f}  norm {metrics.grad_norm:.3f}  {metrics.tokens_per_s:,.0f} tokens/s"
            if metrics.eval_loss is not None:
                status += f"  held out {metrics.eval_loss:.4f}"
            bar.update(task, advance=1, status=status)

        yield report
