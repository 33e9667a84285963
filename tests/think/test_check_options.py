"""`check` takes what `plan` takes: a cap on memory, uneven routing, and a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from shardsmith.cli.main import main

DENSE = "check --plan tensor=2,data=4,zero=1 --model llama3-8b --cluster h100 --nodes 1 --seq-len 4096 --global-batch 8"
SPARSE = (
    "check --plan expert=8,data=8,zero=1 --model qwen3-30b-a3b --cluster h100 --nodes 1 --seq-len 1024 --global-batch 8"
)


def answered(words: str, *more: str) -> tuple[int, dict[str, Any]]:
    answer = CliRunner().invoke(main, [*words.split(), *more, "--json"])
    return answer.exit_code, json.loads(answer.output)


def test_a_cap_is_what_a_rank_may_hold() -> None:
    code, free = answered(DENSE)
    peak = max(rank["total"] for rank in free["memory_gib"])
    assert code == 0
    assert answered(DENSE, "--memory-gib", f"{peak + 0.1}")[0] == 0
    code, tight = answered(DENSE, "--memory-gib", f"{peak - 0.1}")
    assert code == 1
    assert [fault["code"] for fault in tight["errors"]] == ["H405"]
    assert tight["step_time_s"] == free["step_time_s"]
    code, above = answered(DENSE, "--memory-gib", "200")
    assert (code, [fault["code"] for fault in above["errors"]]) == (1, ["L106"])


def test_uneven_routing_costs_time_and_memory() -> None:
    (_, even), (_, uneven) = answered(SPARSE), answered(SPARSE, "--imbalance", "1.5")
    assert uneven["step_time_s"] > even["step_time_s"]
    assert max(r["total"] for r in uneven["memory_gib"]) > max(r["total"] for r in even["memory_gib"])
    code, dense = answered(DENSE, "--imbalance", "1.5")
    assert (code, [fault["code"] for fault in dense["errors"]]) == (1, ["E107"])
    code, unpriced = answered("check --plan data=2", "--imbalance", "1.5")
    assert (code, [fault["code"] for fault in unpriced["errors"]]) == (1, ["E107"])


def test_a_report_is_written_of_a_legal_plan_and_refused_with_a_reason_otherwise(tmp_path: Path) -> None:
    even, uneven, none = (tmp_path / name for name in ("even.html", "uneven.html", "none.html"))
    assert answered(SPARSE, "--html", str(even))[1]["files"] == {"html": str(even)}
    assert answered(SPARSE, "--imbalance", "1.5", "--html", str(uneven))[1]["files"] == {"html": str(uneven)}
    steps = [page.read_text(encoding="utf-8").partition("step time")[2][:80] for page in (even, uneven)]
    assert steps[0] != steps[1]
    refused = CliRunner().invoke(main, [*DENSE.replace("data=4", "data=3").split(), "--html", str(none)])
    assert refused.exit_code == 1
    assert "no report: " in refused.output
    assert not none.exists()
