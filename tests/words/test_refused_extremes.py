"""Sizes, names and files at the edge of sense: refused with a code, at once, never a traceback or a loss of 0."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardsmith.cli.main import main
from shardsmith.layout.check import check as faults_of
from shardsmith.plan.file import make_setup, parse_plan_line
from shardsmith.schedule.check import check
from shardsmith.schedule.orders import build


def codes(*words: str) -> list[str]:
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code == 1, result.output
    return [error["code"] for error in json.loads(result.stdout)["errors"]]


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        ("loss_chunk=0", "B203"),
        ("data=2,loss_chunk=-3", "B203"),
        ("pipeline=1000000000", "B206"),
        ("microbatches=1000000000", "B206"),
        ("data=99999999999999999999", "B206"),
    ],
)
def test_sizes_beyond_sense_are_refused(plan: str, code: str) -> None:
    assert code in codes("check", "--plan", plan)


def test_a_group_larger_than_the_step_is_the_whole_step() -> None:
    huge = build("interleaved:99999999999", pipeline=2, microbatches=6)
    assert check(huge) == []
    assert huge.ranks == build("interleaved:6", pipeline=2, microbatches=6).ranks


def test_a_plan_that_names_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('plan = "job.toml"\n')
    assert codes("check", str(path)) == ["F209"]


def test_links_in_a_circle_are_no_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.symlink_to(path)
    assert codes("check", str(path)) == ["F110"]


@pytest.mark.parametrize("rate", ["1.0", "1.5", "-0.1"])
@pytest.mark.parametrize("key", ["dropout", "attention_dropout"])
def test_more_than_everything_is_not_dropped(key: str, rate: str) -> None:
    assert codes("check", "--plan", "data=2", "--set", f"model.{key}={rate}") == ["M110"]


def test_a_batch_that_does_not_divide_hides_no_other_fault() -> None:
    plan = "tensor=3,overlap=half_microbatches,microbatch=3,microbatches=3"
    found = codes("check", "--plan", plan, "--global-batch", "5")
    assert {"B202", "T203", "T204", "T205"} <= set(found)


@pytest.mark.parametrize(
    ("line", "code", "hint", "changes"),
    [
        ("pipeline=3,schedule=interleaved", "P301", "pipeline = 2, or layers = 0+1+1+1+1+0 (embedding", "pipeline=2"),
        ("pipeline=6,layers=1+1+1+0+0+1", "P304", "layers = 0+1+1+1+1+0 (embedding", "layers=0+1+1+1+1+0"),
        (
            "data=2,expert=8,expert_tensor=3",
            "E103",
            "expert = 1 with expert_tensor = 1 or 2",
            "expert=1,expert_tensor=2",
        ),
        ("data=2,expert=2,expert_tensor=4", "E103", "expert_tensor = 1", "expert_tensor=1"),
        ("tensor=2,overlap=weight_gradient,schedule=zb_h1", "T304", "leave overlap out, or schedule", "overlap="),
        ("tensor=2,overlap=chunks,schedule=zb_h1", "T306", "leave overlap out", "overlap="),
    ],
)
def test_a_hint_cures_its_fault(line: str, code: str, hint: str, changes: str) -> None:
    """On tiny-moe: 4 layers, 4 experts of width 96."""
    setup = make_setup(plan=line, model="tiny-moe")
    assert {fault.hint[: len(hint)] for fault in faults_of(setup) if fault.code == code} == {hint}
    stated = parse_plan_line(changes)
    cured = setup.with_plan(**{key.split("=")[0]: getattr(stated, key.split("=")[0]) for key in changes.split(",")})
    assert [fault.message for fault in faults_of(cured) if fault.severity == "error"] == []


def test_what_cannot_be_written_is_refused_in_one_object(tmp_path: Path) -> None:
    words = ["schedule", "gpipe", "--pipeline", "2", "--microbatches", "2", "--out", str(tmp_path / "none" / "x.txt")]
    assert codes(*words) == ["F801"]


def test_a_row_of_no_tensor_ranks_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    head = "id,framework,layers,hidden,heads,seq_len,gpu,gpus,iter_time_best_s,global_batch,tp"
    path.write_text(f"{head}\nzero,Megatron-LM,4,512,8,512,A100-SXM4-80GB,8,1.0,8,0\n")
    result = CliRunner().invoke(main, ["validate", str(path), "--json"])
    skipped = json.loads(result.stdout)["skipped"]
    assert [row["id"] for row in skipped] == ["zero"]
    assert "tp" in skipped[0]["reason"]


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "--timeout", "nan"),
        ("verify", "--timeout", "inf"),
        ("dryrun", "--timeout", "0"),
        ("prepare", "x.txt", "--out", "y", "--limit-mb", "nan"),
        ("generate", "run", "--temperature", "inf"),
        ("schedule", "solved", "--effort", "nan"),
    ],
)
def test_what_is_no_number_bounds_nothing(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "is not in the range" in result.stderr


@pytest.mark.parametrize("factor", ["1e308", "nan", "0"])
def test_a_straggler_slower_than_sense_is_refused(factor: str) -> None:
    assert codes("simulate", "--plan", "pipeline=2", "--slow", f"0={factor}") == ["S402"]


def test_an_output_without_a_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert codes("prepare", str(tmp_path / "a.txt"), "--out", "") == ["G005"]


TORCHLESS = """
import sys
from click.testing import CliRunner
from shardsmith.cli.main import main
out = CliRunner().invoke(main, sys.argv[1:])
assert out.exit_code == 1, out.output
print("torch" in sys.modules, out.stderr)
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("convert", "nowhere", "there"), "F406"),
        (("generate", "nowhere"), "F406"),
        (("train", "job.toml"), "F506"),
        (("train", "job.toml", "--set", "run.resume=never", "--set", "run.folder=a.txt/run"), "F514"),
        (("train", "job.toml", "--set", "run.resume=never", "--set", "run.folder=dangling"), "F514"),
        (("train", "job.toml", "--set", "run.resume=never", "--set", "run.init=nowhere"), "F406"),
    ],
)
def test_h01_a_wrong_folder_is_refused_before_torch_is_imported(
    words: tuple[str, ...], code: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("some words to learn, and some more of them")
    CliRunner().invoke(main, ["prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "text")])
    tables = (
        "workload = {seq_len = 8, global_batch = 2}",
        'model = {preset = "tiny-llama"}',
        'data = {path = "text"}',
        'run = {resume = "nowhere"}',
    )
    (tmp_path / "job.toml").write_text("\n".join(tables))
    (tmp_path / "dangling").symlink_to("gone")
    line = [sys.executable, "-c", TORCHLESS, *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    imported, _, said = done.stdout.partition(" ")
    assert imported == "False"
    assert code in said


@pytest.mark.parametrize("size", ["layers=1001", "heads=10000000000", "vocab=99999999999999999999999"])
def test_model_sizes_beyond_any_model_are_refused_at_once(size: str) -> None:
    assert codes("check", "--plan", "data=2", "--set", f"model.{size}") == ["M111"]
