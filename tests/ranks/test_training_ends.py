"""The training loop: schedules, steps that are not finite, evaluation lines, and a clean end (A35, E05)."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardsmith import api
from shardsmith.engine.models.decoder import Stage
from shardsmith.engine.runtime.failures import RankFailed
from shardsmith.plan.file import dumps, make_setup
from shardsmith.plan.setup import Job
from shardsmith.specs.job import Data, Optimisation, Run
from shardsmith.specs.library import model_named

pytestmark = pytest.mark.ranks

SMALL = model_named("tiny-llama").with_(layers=2, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=24, vocab=17)


def job(folder, plan, *, steps, optimisation, data=None, **run) -> Job:
    setup = replace(make_setup(plan=plan, seq_len=8), model=SMALL)
    settings = Run(steps=steps, folder=str(folder), timeout_s=30, tensorboard=False, **run)
    return Job(setup=setup, data=data or Data(), optimisation=optimisation, run=settings)


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


LINEAR = Optimisation(lr=1.0, optimizer="sgd", schedule="linear", decay_steps=100)


def test_a35_one_schedule_step_per_optimiser_step_on_four_data_ranks(tmp_path):
    api.train(job(tmp_path, "data=4", steps=11, optimisation=LINEAR))
    rates = [line["lr"] for line in lines(tmp_path)]
    assert rates[0] == 1.0
    assert rates[10] == pytest.approx(0.90, abs=1e-12)  # after 10 optimiser steps; 0.60 if each rank advanced it


def spoil(monkeypatch, *, rank, call, value):
    """Let the `call`-th loss that is computed on `rank` be `value`."""
    honest, calls = Stage.loss_sum, []

    def loss_sum(self, logits, labels):
        calls.append(None)
        loss = honest(self, logits, labels)
        return loss * value if os.environ["RANK"] == str(rank) and len(calls) == call else loss

    monkeypatch.setattr(Stage, "loss_sum", loss_sum)


def test_a35_skipped_steps_do_not_advance_the_schedule_and_leave_the_model_alone(tmp_path, monkeypatch):
    spoil(monkeypatch, rank=1, call=4, value=float("nan"))
    settings = replace(LINEAR, nonfinite="skip")
    api.train(job(tmp_path, "data=2,microbatches=1", steps=6, optimisation=settings))
    found = lines(tmp_path)
    assert [line["skipped"] for line in found] == [False] * 3 + [True] + [False] * 2
    assert [line["lr"] for line in found] == pytest.approx([1.0, 0.99, 0.98, 0.97, 0.97, 0.96])
    assert found[3]["loss"] is None
    assert all(isinstance(line["loss"], float) for line in found[4:])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_all_ranks_and_names_the_one(tmp_path, monkeypatch, value):
    spoil(monkeypatch, rank=1, call=4, value=value)
    with pytest.raises(RankFailed, match=rf"R301.*step 3: the loss is {value}") as failed:
        api.train(job(tmp_path, "data=2,microbatches=1", steps=6, optimisation=LINEAR))
    assert failed.value.step == 3
    values = failed.value.faults[0].values
    assert ("rank 1", f"loss of microbatch 0 is {value}") in values
    assert not any(where == "rank 0" and what.startswith("loss") for where, what in values)
    assert any(what.startswith("gradients not finite: embedding.weight") for _, what in values)
    assert len(lines(tmp_path)) == 3


def test_a_gradient_that_is_not_finite_names_tensors_and_ranks(tmp_path, monkeypatch):
    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("inf")

    honest = Stage.forward

    def forward(self, *inputs):
        out = honest(self, *inputs)
        return Spoilt.apply(out) if self.stage.embedding else out

    monkeypatch.setattr(Stage, "forward", forward)
    with pytest.raises(RankFailed, match=r"R301.*step 0: the gradient norm is (nan|inf)") as failed:
        api.train(job(tmp_path, "pipeline=2,microbatches=2", steps=2, optimisation=LINEAR))
    values = failed.value.faults[0].values
    assert {where for where, _ in values} == {"rank 0"}  # the second stage is sound
    assert "embedding.weight" in values[0][1]


def test_evaluation_every_so_many_steps_and_after_the_last(tmp_path):
    data = Data(packing="whole", eval_fraction=0.5)
    settings = Optimisation(schedule="cosine", warmup_steps=2)
    run = {"eval_every": 3, "eval_batches": 2}
    api.train(job(tmp_path, "pipeline=2,microbatches=2", steps=8, optimisation=settings, data=data, **run))
    found = {line["step"]: line["eval_loss"] for line in lines(tmp_path)}
    assert list(found) == list(range(8))
    assert [step for step, loss in found.items() if loss is not None] == [2, 5, 7]
    assert found[2] != found[7]


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


@pytest.mark.parametrize("whom", ["launcher", "one rank", "launcher, twice"])
def test_e05_sigterm_ends_all_ranks_after_the_same_step(tmp_path, whom):
    text = dumps(job(tmp_path / "run", "data=2", steps=10**6, optimisation=Optimisation()))
    (tmp_path / "job.toml").write_text(text)
    command = [sys.executable, "-c", "from shardsmith.cli.main import main; main()", "train", "--json"]
    job_file = str(tmp_path / "job.toml")
    process = subprocess.Popen([*command, job_file], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and process.poll() is None:
            if (tmp_path / "run" / "metrics.jsonl").exists() and len(lines_so_far(tmp_path / "run")) > 5:
                break
            time.sleep(0.1)
        ranks = children_of(process.pid)
        assert len(ranks) >= 2
        began = time.monotonic()
        os.kill(ranks[-1] if whom == "one rank" else process.pid, signal.SIGTERM)
        if whom == "launcher, twice":
            time.sleep(0.05)
            os.kill(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert time.monotonic() - began < (15 if whom == "launcher, twice" else 30)
    if whom == "launcher, twice":
        assert process.returncode in (75, 143), err  # ranks may have ended before the second came
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
        return
    assert process.returncode == 75, err
    answer = json.loads(out)
    assert answer["preempted"] is True
    assert answer["steps"] == len(lines(tmp_path / "run")) > 5
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def lines_so_far(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()
