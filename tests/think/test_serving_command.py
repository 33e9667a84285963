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
    # Embedding and head, an eighth of 2 x 128256 x 8192 elements each, stay in 16 bits.
    ends = 2 * 2 * 128256 * 8192 / 8 / 2**30
    assert narrow["weights_gib"] == pytest.approx((wide["weights_gib"] + ends) / 2, rel=1e-6)
    assert narrow["kv_gib"] == pytest.approx(wide["kv_gib"] / 2)


def test_what_does_not_fit_is_refused_with_its_code() -> None:
    result = run(*SERVE, "--context", "8192", "--concurrency", "640", "--json")
    assert result.exit_code == 1
    (error,) = json.loads(result.stdout)["errors"]
    assert error["code"] == "I201"
    assert "--concurrency 168" in error["hint"]


def test_a_serving_target_is_named_or_refused() -> None:
    words = (*SERVE, "--context", "8192", "--concurrency", "64", "--json")
    data = json.loads(run(*words, "--target", "vllm").stdout)
    assert data["target"] == "vllm"
    assert data["plans"] == json.loads(run(*words).stdout)["plans"]
    result = run(*words, "--target", "megatron-core")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["errors"][0]["code"] == "X351"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*SERVE, "--context", "1", "--concurrency", "1", "--imbalance", "2"), "'--imbalance' belongs to a training"),
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
    assert f"{data['searched']:,} plans weighed" in page
