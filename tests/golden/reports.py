"""Reports for tests: a searched one made by hand, one of a simulated plan, one without figures."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import shardsmith
from shardsmith.design.cost.estimate import estimate
from shardsmith.design.planner.result import Choice, Neighbour, RuleNote, SearchResult
from shardsmith.design.reports.content import Report, report_of_search, report_of_simulation
from shardsmith.design.simulator.simulation import simulate_plan
from shardsmith.plan.setup import Setup

PLANS = (
    "tensor=8,pipeline=8,data=16,microbatch=1,zero=1,sequence_parallel=true",
    "tensor=8,pipeline=4,data=32,microbatch=1,zero=1",
    "tensor=8,pipeline=8,data=16,microbatch=1,zero=1,schedule=interleaved,stages_per_rank=3",
)


def gpt3(plan: str, batch: int = 256) -> Setup:
    return shardsmith.make_setup(
        plan=plan, model="gpt3-175b", cluster="a100", nodes=128, seq_len=2048, global_batch=batch, dtype="bfloat16"
    )


@cache
def search() -> SearchResult:
    choices = [Choice(setup=gpt3(plan), estimate=estimate(gpt3(plan))) for plan in PLANS]
    first, *others = sorted(choices, key=lambda c: c.estimate.step_time_s)
    rule = RuleNote(rule="M9", verdict="followed", text="tensor inside the node", other="tensor=16", ratio=1.8)
    beaten = RuleNote(rule="R2", verdict="does not apply", text="at most 16 stages")
    near = Neighbour(axis="tensor", before="8", after="4", plan=PLANS[1], ratio=1.05, peak_gib=60.0)
    far = Neighbour(axis="zero", before="1", after="0", plan=PLANS[1], reason="does not fit: 90 GiB")
    best = replace(first, rules=(rule, beaten), neighbours=(near, far), binds="memory of rank 0")
    return SearchResult(
        objective="fastest",
        plans=(best, *others),
        pareto=(best,),
        robust=best,
        searched=312_345,
        priced=1_234,
        dismissed=1_000_000,
        seconds=0.31,
        target="megatron-core",
        assumptions=("what the search assumes",),
        totals={},
    )


@cache
def searched() -> Report:
    return report_of_search(search())


@cache
def simulated() -> Report:
    return report_of_simulation(simulate_plan(gpt3(PLANS[0]), slow={70: 1.2}))


@cache
def unpriced() -> Report:
    return report_of_simulation(simulate_plan(shardsmith.make_setup(plan="pipeline=2,data=2,schedule=zb_h1")))


def outline(page: str) -> str:
    """Sections, headings and table heads of a page, a line each, numbers left out."""
    page = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    pattern = (
        r'<section id="(\w+)"|<h([123])>(.*?)</h\2>|<th\b[^>]*>(.*?)</th>|<(canvas|select|button) [^>]*?id="([\w-]+)"'
    )
    lines = []
    for section, level, words, head, tag, name in re.findall(pattern, page, flags=re.DOTALL):
        if section:
            lines.append(f"section {section}")
        elif level:
            lines.append(f"  h{level} {words}")
        elif tag:
            lines.append(f"  {tag} {name}")
        else:
            lines.append(f"    th {head}".rstrip())
    return "\n".join(lines) + "\n"
