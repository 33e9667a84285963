"""What `plan` and `check` print: a ranking that a terminal has room for, plans to copy, every pipeline rank named."""

from __future__ import annotations

import re
from functools import cache
from itertools import takewhile

import pytest
from click.testing import CliRunner
from rich.table import Table

from shardsmith import api
from shardsmith.cli.common import width_of
from shardsmith.cli.main import main
from shardsmith.cli.plan import _ranking
from shardsmith.design.planner.result import SearchResult
from shardsmith.design.reports.plan_tables import memory_table, rank_columns
from shardsmith.plan.line import parse_plan_line
from shardsmith.plan.plan import Plan

ASKED = "plan --model llama3-8b --cluster h100 --nodes 2 --global-batch 64 --seq-len 8192 --fix pipeline=8"


@cache
def found() -> SearchResult:
    fix = ["pipeline=8", "layers=weighed"]
    return api.search("llama3-8b", "h100", nodes=2, global_batch=64, seq_len=8192, fix=fix)


@cache
def printed(words: str) -> list[str]:
    answer = CliRunner().invoke(main, words.split())
    assert answer.exit_code == 0, answer.output
    return answer.output.splitlines()


def listed(lines: list[str], title: str) -> list[Plan]:
    """The plans of a numbered list under `title`, each of them read again."""
    rest = takewhile(lambda line: re.match(r"\d+\. \S*=", line), lines[lines.index(f"{title}:") + 1 :])
    numbered = [line.split(". ", 1) for line in rest]
    assert [place for place, _ in numbered] == [str(at) for at in range(1, len(numbered) + 1)]
    return [parse_plan_line(plan) for _, plan in numbered]


def heads(table: object) -> list[str]:
    assert isinstance(table, Table)
    return [str(column.header) for column in table.columns]


@pytest.mark.parametrize("width", [50, 80, 100, 120])
def test_a_ranking_fits_the_terminal_and_names_what_it_leaves_out(width: int) -> None:
    (full,) = _ranking(found().plans, 400)
    table, left = _ranking(found().plans, width)
    assert isinstance(table, Table)
    assert width_of(table) <= width < width_of(full)  # type: ignore[arg-type]
    assert {"#", "step", "MFU", "fullest rank"} <= set(heads(table))
    assert [*heads(table), *left.split(": ")[1].split(", ")] != heads(full)  # type: ignore[union-attr]
    assert set(heads(full)) - set(heads(table)) == set(left.split(": ")[1].split(", "))  # type: ignore[union-attr]


def test_all_pipeline_ranks_stand_in_the_memory_table() -> None:
    e = found().best.estimate
    labels = [label for label, _ in rank_columns(e.memory)]
    assert labels == ["0", "1", "2", "3-5", "6", "7"]
    shared = dict(rank_columns(e.memory))["3-5"]
    assert shared.total == max(rank.total for rank in e.memory[3:6])
    table = memory_table(e, "memory")
    assert width_of(table) <= 80
    assert f"rank {shared.pipeline_rank}" in str(table.caption)
    column = [str(cell) for cell in table.columns[4].cells]
    assert float(column[-1]) == pytest.approx(sum(map(float, column[:-1])), abs=0.5)


def test_plans_of_a_front_can_be_copied_and_rivals_of_rules_are_told() -> None:
    lines = printed(f"{ASKED} --explain --pareto 2 --top 1")
    front = listed(lines, "plans of that table")
    assert len(front) > 1
    assert all(plan.world == 16 for plan in front)
    rivals = [line.strip() for line in lines if re.match(r"  \S+=\S+$", line)]
    assert rivals
    assert all(parse_plan_line(rival).world == 16 for rival in rivals)
    assert len(rivals) == len([line for line in lines if re.match("- (followed|beaten): .*% longer$", line)])
    assert not [line for line in printed(f"{ASKED} --top 1") if re.match(r"  \S+=\S+$", line)]


def test_plans_chosen_anew_can_be_copied() -> None:
    words = "check --plan tensor=4,data=4,zero=1 --model llama3-8b --cluster h100 --nodes 2 --seq-len 8192"
    lines = printed(f"{words} --global-batch 64 --explain")
    plans = listed(lines, "plans of that table")
    assert plans
    assert {plan.world for plan in plans} == {16}


def test_the_parts_of_a_step_have_the_same_names_everywhere() -> None:
    best = api.search("llama3-8b", "h100", nodes=2, global_batch=64, seq_len=8192, fix=["tensor=8"], top=1).best
    share = best.estimate.breakdown["exchange"] / best.estimate.step_time_s
    assert share > 0.1
    assert f"then exchange inside layers {share:.1%}" in best.binds
    assert sum(best.estimate.breakdown.values()) == pytest.approx(best.estimate.step_time_s)


def test_what_cannot_be_trained_yet_is_said_last() -> None:
    words = "plan --model deepseek-v3 --cluster h800 --nodes 128 --global-batch 4096 --seq-len 4096 --top 1"
    fixed = "--fix tensor=1 --fix pipeline=16 --fix expert=64 --fix context=1 --fix schedule=one_f_one_b"
    lines = printed(f"{words} {fixed}")
    (at,) = [i for i, line in enumerate(lines) if line.startswith("warning[X101]")]
    assert lines[at - 2].endswith(" s")  # what was weighed, in seconds
    assert "--set model.mtp_layers=0" in lines[-1]
