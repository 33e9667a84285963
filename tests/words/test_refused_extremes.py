"""Sizes, names and files at the edge of sense: refused with a code, at once, never a traceback or a loss of 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardsmith.cli.main import main
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
