"""Training runs as a person starts them: the loss of many ranks, what rank 0 reports, a rank that dies."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardsmith.engine.checkpoint.formats import WEIGHTS_FILE
from shardsmith.engine.dataset.batches import Synthetic, batches_of
from shardsmith.engine.dataset.open import open_data
from shardsmith.engine.dataset.prepare import prepare
from shardsmith.engine.parity.reference import Record, run_reference
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.engine.train.loop import train_rank
from shardsmith.plan.file import dumps, make_setup
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Job
from shardsmith.specs.job import Data, Optimisation, Run

pytestmark = pytest.mark.ranks

BOUND_S = 30.0
"""Within this time after a rank's death all are gone."""


def job(folder: Path, line: str, *, steps: int, model: str = "tiny-llama", path: str = "synthetic") -> Job:
    return Job(
        setup=make_setup(plan=line, model=model, seq_len=32, global_batch=8),
        data=Data(seed=7, path=path),
        optimisation=Optimisation(lr=1e-3),
        run=Run(steps=steps, folder=str(folder), timeout_s=60.0, tensorboard=False),
    )


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train(asked: Job) -> list[dict]:
    """Train on forked ranks, each starting its own process group; the metrics that rank 0 wrote."""
    run_forked(train_rank, asked.setup.plan.world, asked, join=False, timeout_s=150.0)
    return metrics(Path(asked.run.folder))


def reference(asked: Job) -> Record:
    """The run in one process by torch's own loss, autograd, clipping and optimiser."""
    model, data = asked.setup.model, asked.data
    source = open_data(data, vocab=model.vocab, seq_len=asked.setup.workload.seq_len).train
    alone = replace(asked.setup, plan=Plan(microbatch=4))
    batches = batches_of(source, seed=data.seed, setup=alone)
    steps = [batches.batch(step, 0) for step in range(asked.run.steps)]
    return run_reference(model, steps, asked.optimisation, seed=asked.run.seed, dtype=torch.float32)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tokens of real text, one a byte."""
    out = tmp_path_factory.mktemp("data") / "text"
    prepare([argparse.__file__], out)
    return str(out)


def five_digits(found: float, right: float) -> bool:
    return abs(found - right) <= 0.5e-4 * 10 ** math.floor(math.log10(right))


@pytest.mark.parametrize(("model", "extra"), [("tiny-llama", ""), ("tiny-gpt", ",sequence_parallel=true")])
def test_eight_ranks_lose_what_one_process_loses_to_five_digits(run_ranks, tmp_path, text, model, extra):
    plan = "data=2,tensor=2,pipeline=2,microbatches=4" + extra
    eight = job(tmp_path / "eight", plan, steps=20, model=model, path=text)
    one = job(tmp_path / "one", "microbatch=8", steps=20, model=model, path=text)
    found, alone = train(eight), train(one)
    (record,) = run_ranks(1, reference, eight)
    assert len(found) == len(alone) == len(record.losses) == 20
    for line, single, loss in zip(found, alone, record.losses, strict=True):
        assert five_digits(line["loss"], loss)
        assert five_digits(single["loss"], loss)
        assert line["tokens"] == single["tokens"] == 8 * 32
    assert found[-1]["loss"] < 0.7 * found[0]["loss"], "twenty steps learn something"


def test_b11_rank_0_reports_the_loss_that_only_the_last_stage_has(tmp_path):
    two = train(job(tmp_path / "two", "pipeline=2,microbatches=4", steps=2))
    one = train(job(tmp_path / "one", "microbatch=8", steps=2))
    for line, single in zip(two, one, strict=True):
        assert line["loss"] == pytest.approx(single["loss"], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-5)
        assert line["loss"] == pytest.approx(math.log(512), rel=0.1)
        assert all(value is None or value >= 0 for value in line.values())  # no sentinel
    assert (tmp_path / "two" / WEIGHTS_FILE).stat().st_size == (tmp_path / "one" / WEIGHTS_FILE).stat().st_size


def started(folder: Path, world: int) -> dict[int, int]:
    """Process ids of the ranks by the notes that each keeps open; empty until all are there."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            held = [os.readlink(fd) for fd in (process / "fd").iterdir()]
        except OSError:
            continue
        for rank in range(world):
            if str(folder / "logs" / f"rank{rank}.progress") in held:
                found[rank] = int(process.name)
    return found if len(found) == world else {}


def step_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def awaited(what, seconds: float = 100.0):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return found


def test_a_killed_rank_ends_the_command_and_is_named(tmp_path):
    folder = tmp_path / "run"
    (tmp_path / "job.toml").write_text(dumps(job(folder, "data=2,tensor=2,microbatches=2", steps=10**6)))
    command = [sys.executable, "-c", "from shardsmith.cli.main import main; main()"]
    command += ["train", str(tmp_path / "job.toml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            awaited(lambda: step_of(folder) >= 3)
            ranks = awaited(lambda: started(folder, 4))
            os.kill(ranks[3], signal.SIGKILL)
            killed = time.monotonic()
            _, shown = run.communicate(timeout=BOUND_S)
            took = time.monotonic() - killed
        finally:
            run.kill()
    assert run.returncode == 1
    assert "error[R202]: rank 3 was killed by signal 9 (SIGKILL) in step " in shown
    assert "closed by peer" not in shown, "the echo on another rank hides the cause"
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    assert took < BOUND_S


BROKEN = """
import sys
from shardsmith.cli.main import main
from shardsmith.engine.train.step import Trainer

real = Trainer.step

def step(self, microbatches):
    if self.recorder.rank == 2 and microbatches[0].samples[0] in {samples}:
        raise ArithmeticError("the tokens of this rank are gone")
    return real(self, microbatches)

Trainer.step = step
sys.argv[1:] = ["train", {path!r}]
main()
"""


def test_an_exception_of_one_rank_is_the_one_that_is_shown(tmp_path):
    folder = tmp_path / "run"
    asked = job(folder, "data=2,pipeline=2,microbatches=4", steps=10**6)
    (tmp_path / "job.toml").write_text(dumps(asked))
    source = Synthetic(seed=7, vocab=512, seq_len=32)
    batches = batches_of(source, seed=7, setup=asked.setup)
    samples = {int(ids) for index in range(2) for ids in batches.sample_ids(4, index)[0]}
    script = BROKEN.format(path=str(tmp_path / "job.toml"), samples=samples)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=False)
    assert run.returncode == 1
    assert "error[R201]: rank 2 failed in step 4: ArithmeticError: the tokens of this rank are gone" in run.stderr
    assert "closed by peer" not in run.stderr
    assert len(metrics(folder)) == 4, "steps 0 to 3 were whole"
