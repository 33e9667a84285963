"""Refit: one log of one run moves the constants, each as far as its prior and the run allow."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from shardsmith import api
from shardsmith.cli.validate import command
from shardsmith.design.cost.constants import constants, values, write_values
from shardsmith.design.cost.estimate import estimate
from shardsmith.design.cost.refit import refit
from shardsmith.design.cost.step import step
from shardsmith.design.validation.logs import Load, read_log
from shardsmith.design.validation.regenerate import DATA
from shardsmith.design.validation.rows import Runs, read_runs
from shardsmith.errors import Refused
from shardsmith.plan.file import make_setup
from shardsmith.plan.setup import Setup

LOAD = Load(global_batch=512, seq_len=4096, devices=64)
OURS = "\n".join(json.dumps({"step": i, "step_time_s": 9.0 if i < 2 else 2.0}) for i in range(10))
MEGATRON = "\n".join(
    f" iteration {i:8d}/ 100 | consumed samples: {512 * i:12d} | elapsed time per iteration (ms): {time} | "
    f"learning rate: 1.0E-04 | global batch size: {batch:5d} | lm loss: 1.0E+01 |"
    for i, (time, batch) in enumerate([(500.0, 256), (9000.0, 512), *[(2000.0, 512)] * 8])
)
BIGSCIENCE = " iteration 2/ 95 | elapsed time per iteration (s): 2.00 | global batch size:  512 | TFLOPs: 108.47 |"
PIPELINE = "steps: 10 loss: 7.5 iter time (s): 2.000 samples/sec: 256.000"
TIMER = "epoch=0/micro_step=9/global_step=9, RunningAvgSamplesPerSec=99.0, CurrSamplesPerSec=256.0, MaxMemAllocated=8GB"
TITAN = "[titan] \x1b[31mstep: 10  \x1b[32mloss:  9.1  \x1b[33mmemory: 42.1GiB(44.3%)  \x1b[34mtps: 16,384  mfu: 40.4%"


@pytest.fixture(scope="module")
def runs() -> Runs:
    return read_runs(DATA / "runs.csv")


@pytest.fixture
def setup() -> Setup:
    line = "tensor=4,pipeline=2,data=8,zero=1,microbatch=1"
    given = {"model": "llama3-8b", "cluster": "h100", "nodes": 8, "seq_len": 4096, "global_batch": 512}
    return make_setup(plan=line, dtype="bfloat16", **given)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("shardsmith", OURS),
        ("megatron", MEGATRON),
        ("megatron", BIGSCIENCE),
        ("deepspeed", PIPELINE),
        ("deepspeed", TIMER),
        ("torchtitan", TITAN),
    ],
)
def test_every_form_of_log_gives_the_same_step_time(tmp_path: Path, form: str, text: str) -> None:
    path = tmp_path / "log"
    path.write_text("something else first\n" + text + "\n")
    found = read_log(path, LOAD)
    assert (found.form, found.seconds) == (form, pytest.approx(2.0))
    assert found.spread == pytest.approx(0.0)


def test_a_log_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with pytest.raises(Refused, match="F110"):
        read_log(path, LOAD)
    path.write_text("loss went down\n")
    with pytest.raises(Refused, match="F721"):
        read_log(path, LOAD)
    path.write_text(MEGATRON)
    with pytest.raises(Refused, match="F722"):
        read_log(path, replace(LOAD, global_batch=1024))


def test_a_run_as_predicted_moves_nothing(runs: Runs) -> None:
    one = runs.batch.select(np.array([100]))
    found = refit(one, step(one, values()).total, constants(), values())
    assert max(abs(move.sigmas) for move in found.moves) < 1e-6


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_a_slower_run_is_met_within_bounds_and_spreads(runs: Runs, factor: float) -> None:
    shipped = constants()
    one = runs.batch.select(np.flatnonzero(np.array([r["id"] == "KOR22-0004" for r in runs.rows])))
    measured = step(one, values()).total * factor
    found = refit(one, measured, shipped, values())
    before, after = np.abs(np.log(found.before_s / measured)), np.abs(np.log(found.after_s / measured))
    assert (after < 0.35 * before).all()
    assert all(shipped[m.name].least <= m.after <= shipped[m.name].most for m in found.moves)
    assert all(abs(m.sigmas) < 3.0 for m in found.moves)
    # What this run hardly has (no fp8 in it) stays; what decides it goes the way that the run says.
    moved = {m.name: m for m in found.moves}
    assert abs(moved["gemm_fp8"].share) < 1e-9
    assert (moved["gemm_ampere"].share > 0) == (factor < 1)


def test_constants_that_were_written_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "constants.toml"
    write_values(path, {"latency": 2.5}, "a test")
    assert values(path) == values() | {"latency": 2.5}
    write_values(path, {"net_share": 1.02}, "a test")
    with pytest.raises(Refused, match="F712"):
        values(path)
    write_values(path, {"net_shore": 0.9}, "a test")
    with pytest.raises(Refused, match="F711"):
        values(path)


def test_a_refit_from_the_command_line_changes_what_others_predict(tmp_path: Path, setup: Setup) -> None:
    expected = estimate(setup, "megatron-core").step_time_s
    log, out = tmp_path / "train.log", tmp_path / "constants.toml"
    log.write_text("\n".join(f"elapsed time per iteration (ms): {1200.0 * expected} |" for _ in range(5)))
    line = ["--plan", str(setup.plan), "--model", "llama3-8b", "--cluster", "h100", "--nodes", "8"]
    line += ["--seq-len", "4096", "--global-batch", "512", "--target", "megatron-core"]
    done = CliRunner().invoke(command, ["--refit", str(log), *line, "--out", str(out), "--json"])
    data = json.loads(done.output)
    assert (done.exit_code, data["log"]["form"], data["log"]["steps"]) == (0, "megatron", 4)
    assert data["predicted_before_s"] == pytest.approx(expected)
    assert data["measured_s"] == pytest.approx(1.2 * expected)
    assert data["moved"]
    refitted = estimate(setup, "megatron-core", values(out)).step_time_s
    assert refitted == pytest.approx(data["predicted_after_s"], rel=1e-3)
    assert 1.1 < refitted / expected < 1.2
    slower = api.validate(DATA / "runs.csv", constants=out)
    assert slower.predicted.sum() > api.validate(DATA / "runs.csv").predicted.sum()
    simulated = api.simulate(setup, target="megatron-core", constants=out, record=False)
    assert simulated.seconds > api.simulate(setup, target="megatron-core", record=False).seconds


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([str(DATA / "runs.csv"), "--tensor-parallel"], "No such option"),
        ([str(DATA / "runs.csv"), "--model", "llama3-8b"], "without --refit"),
        ([str(DATA / "runs.csv"), "--out", "constants.toml"], "without --refit"),
        (["--refit", "log", "--moe", "--plan", "tensor=2"], "--refit takes one run"),
        ([], "missing argument"),
    ],
)
def test_an_option_that_would_be_ignored_is_wrong_usage(line: list[str], said: str) -> None:
    done = CliRunner().invoke(command, line)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize("milliseconds", ["0.000001", "1000000000000.0"])
def test_a_log_that_no_machine_writes_is_refused(tmp_path: Path, setup: Setup, milliseconds: str) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"elapsed time per iteration (ms): {milliseconds} |")
    with pytest.raises(Refused, match="F723") as refused:
        api.refit(log, setup, out=tmp_path / "constants.toml")
    assert f"step time = {float(milliseconds) / 1e3:g} s" in str(refused.value)
    assert not (tmp_path / "constants.toml").exists()


def test_step_times_of_nothing_are_none(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("elapsed time per iteration (ms): 0.0 |")
    with pytest.raises(Refused, match="F721"):
        read_log(log, LOAD)


def test_refusals_of_a_refit(tmp_path: Path, setup: Setup) -> None:
    log = tmp_path / "train.log"
    log.write_text("elapsed time per iteration (ms): 2000.0 |")
    with pytest.raises(Refused, match="X351"):
        api.refit(log, setup, target="megatron")
    with pytest.raises(Refused, match="H502"):
        api.refit(log, make_setup(plan="data=2", dtype="bfloat16"))
    with pytest.raises(Refused, match="F704"):
        api.validate(DATA / "runs.csv", cross="leave-one-group-out", constants=log)
