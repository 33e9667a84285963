"""`plan --serve`, and what either kind of plan refuses to ignore; `plan --html`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardsmith.cli.plan import command

SERVE = ("--serve", "--model", "llama3-70b", "--cluster", "h100")
TRAIN = ("--model", "llama3-8b", "--cluster", "h100")


def run(*words: str) -> Result:
    return CliRunner().invoke(command, words)


def test_serving_plans_hold_the_promised_keys() -> None:
    result = run(*SERVE, "--context", "8192", "--concurrency", "64", "--tpot-ms", "30", "--top", "2", "--json")
    assert result.exit_code == 0, result.output
    plans = json.loads(result.stdout)["plans"]
    assert len(plans) == 2
    keys = {"plan", "ttft_s", "tpot_s", "tokens_per_s", "weights_gib", "kv_gib", "max_concurrency", "rule"}
    assert all(keys <= plan.keys() for plan in plans)
    assert all(plan["tpot_s"] <= 0.03 for plan in plans)


def test_narrow_weights_and_cache_make_room() -> None:
    words = (*SERVE, "--context", "8192", "--concurrency", "64", "--json")
    wide, narrow = (
        json.loads(run(*words, *more).stdout)["plans"][0]
        for more in ((), ("--weights-dtype", "float8", "--cache-dtype", "float8"))
    )
    assert narrow["weights_gib"] == pytest.approx(wide["weights_gib"] / 2, rel=0.01)
    assert narrow["kv_gib"] == pytest.approx(wide["kv_gib"] / 2)


def test_what_does_not_fit_is_refused_with_its_code() -> None:
    result = run(*SERVE, "--context", "8192", "--concurrency", "640", "--json")
    assert result.exit_code == 1
    (error,) = json.loads(result.stdout)["errors"]
    assert error["code"] == "I201"
    assert "--concurrency 170" in error["hint"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*SERVE, "--context", "8192"), "Missing option '--concurrency'"),
        ((*SERVE, "--context", "1", "--concurrency", "1", "--seq-len", "8"), "'--seq-len' belongs to a training plan"),
        ((*SERVE, "--context", "1", "--concurrency", "1", "--html", "x"), "'--html' belongs to a training plan"),
        ((*TRAIN, "--seq-len", "8"), "Missing option '--global-batch'"),
        ((*TRAIN, "--seq-len", "8", "--global-batch", "8", "--tpot-ms", "3"), "'--tpot-ms' belongs to serving"),
    ],
)
def test_options_that_would_be_ignored_are_wrong_usage(words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert said in result.output


def test_a_search_writes_its_report(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    result = run(*TRAIN, "--seq-len", "4096", "--global-batch", "64", "--html", str(path), "--json")
    data = json.loads(result.stdout)
    assert data["files"] == {"html": str(path)}
    page = path.read_text(encoding="utf-8").replace("<wbr>", "")
    assert data["plans"][0]["plan"] in page
    assert f"{data['searched']:,} plans priced" in page
