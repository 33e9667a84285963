"""`shardsmith schedule`: JSON keys, text, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardsmith.cli.schedule import command

DATA = Path(__file__).parent / "data"


def run(*words: str) -> Result:
    return CliRunner().invoke(command, words)


def test_json_holds_both_bubbles_two_peaks_a_rank_grid_and_closed_form() -> None:
    result = run("one_f_one_b", "--pipeline", "4", "--microbatches", "4", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert round(found["bubble_of_step"], 3) == 0.429
    assert found["bubble_over_ideal"] == 0.75
    assert found["peak_live"] == [[4, 0], [3, 0], [2, 0], [1, 0]]
    assert found["grid"].splitlines()[0].startswith("rank 0: F0 F1 F2 F3")
    assert found["closed_form"]["formula"] == "(P-1)(F+I+W)"
    assert found["closed_form"]["bubble_of_step"] == found["bubble_of_step"]
    assert found["step_time"] == found["closed_form"]["step_time"] == 21


def test_no_closed_form_where_none_is_exact() -> None:
    words = ("interleaved", "--pipeline", "4", "--microbatches", "6", "--stages-per-rank", "2")
    found = json.loads(run(*words, "--json").stdout)
    assert found["closed_form"] is None
    assert 0 < found["bubble_of_step"] < 1
    assert "no formula is exact here" in run(*words).stdout


def test_text_labels_both_bubbles_and_folds_a_wide_grid() -> None:
    text = run("gpipe", "--pipeline", "8", "--microbatches", "32", "--times", "F=1,B=1").stdout
    assert "bubble of the step  17.95%" in text
    assert "bubble over ideal   21.88%" in text
    assert "columns 0 to" in text
    assert max(map(len, text.splitlines())) <= 160
    assert text.count("B31") == 8


def test_a_grid_file_is_judged() -> None:
    result = run(f"file:{DATA / 'drawn_1f1b.txt'}", "--json")
    assert result.exit_code == 1
    errors = json.loads(result.stdout)["errors"]
    assert errors[0]["code"] == "S013"
    assert "B1 on rank 0 in slot 2" in errors[0]["message"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("1f1b", "--pipeline", "2", "--microbatches", "2"), "S001"),
        (("gpipe", "--pipeline", "0", "--microbatches", "2"), "S002"),
        (("gpipe", "--pipeline", "2", "--microbatches", "0"), "S002"),
        (("gpipe", "--pipeline", "2", "--microbatches", "2", "--stages-per-rank", "2"), "S003"),
        (("gpipe", "--pipeline", "2", "--microbatches", "2", "--times", "F=0"), "S004"),
        (("gpipe", "--pipeline", "2"), "S007"),
        (("file:no/such/file",), "F301"),
    ],
)
def test_refusals_are_coded(words: tuple[str, ...], code: str) -> None:
    result = run(*words)
    assert result.exit_code == 1
    assert f"error[{code}]" in result.stderr
    assert "because:" in result.stderr
    assert result.stdout == ""
