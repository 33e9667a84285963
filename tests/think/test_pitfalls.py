"""Pitfalls of the ledger: found where they cost, with a fix that is legal and as good as it says; silent elsewhere."""

import json
import re

import pytest
from click.testing import CliRunner

from shardsmith import api
from shardsmith.cli.main import main
from shardsmith.design.cost.estimate import estimate
from shardsmith.design.rules.pitfalls import PITFALLS
from shardsmith.layout.check import examine
from shardsmith.plan.file import make_setup
from shardsmith.plan.line import parse_plan_line
from shardsmith.plan.setup import Setup
from shardsmith.units import GIB, format_seconds


def setup_of(line: str, **options: object) -> Setup:
    given: dict[str, object] = {"model": "llama3-8b", "cluster": "h100", "nodes": 8, "seq_len": 4096}
    given |= {"global_batch": 32, "dtype": "bfloat16"} | options
    return make_setup(plan=line, **given)  # type: ignore[arg-type]


CASES = {
    # ledger P1, N12, N15; G06
    "L201": ("tensor=16,pipeline=2,data=2,replicate_kv=true", {}),
    # P2, N2, N7
    "L202": ("tensor=8,pipeline=4,data=2", {"global_batch": 8}),
    # P3
    "L203": ("tensor=8,pipeline=4,data=2,zero=2,sequence_parallel=true", {"global_batch": 256}),
    "L204": ("tensor=8,data=8,recompute=full,sequence_parallel=true", {}),
    # M9, P4
    "L205": ("tensor=8,data=8,order=data-tensor-context-pipeline,sequence_parallel=true", {}),
    # R2
    "L206": ("tensor=2,pipeline=32,data=1", {"global_batch": 32}),
    "L207": ("tensor=8,data=8", {}),
    # N7: the size of a microbatch
    "L208": ("tensor=8,data=8,microbatch=1,sequence_parallel=true", {"global_batch": 64, "seq_len": 1024}),
    # M4
    "L209": ("tensor=8,data=8,sequence_parallel=true", {}),
}


def test_every_pitfall_has_a_case() -> None:
    assert sorted(CASES) == sorted(rule.code.code for rule in PITFALLS)


@pytest.mark.parametrize("code", CASES)
def test_a_pitfall_is_found_and_its_fix_saves_what_it_says(code: str) -> None:
    line, options = CASES[code]
    setup = setup_of(line, **options)
    found = {fault.code: fault for fault in api.check(setup).warnings}
    assert code in found, sorted(found)
    hint = found[code].hint
    changes, _, figures = hint.partition(" (")
    fixed = parse_plan_line(changes.replace(", ", ",").replace('"', ""))
    named = re.findall(r"(\w+) = ", changes)
    kept = {key: getattr(fixed, key) for key in named}
    other = setup.with_plan(**kept)
    assert not [f for f in examine(other).faults if f.severity == "error"]
    before, after = estimate(setup), estimate(other)
    # What it is said to cost is what the fix saves, and what the fix is said to take is what it takes.
    assert figures == f"{format_seconds(after.step_time_s)} a step, {after.peak / GIB:.1f} GiB)"
    saved, gib = before.step_time_s - after.step_time_s, (before.peak - after.peak) / GIB
    if code in ("L207", "L209"):
        assert f"costs {gib:.1f} GiB a rank more" in found[code].message
        assert gib > 1
        assert saved > -0.02 * before.step_time_s
    else:
        own, total = saved, format_seconds(saved)
        if code == "L202":
            own = min(saved, before.breakdown["bubble"] - after.breakdown["bubble"])
            assert saved - own < 0.02 * before.step_time_s or f"saves {total} in all" in found[code].message
        assert f"costs {format_seconds(own)} a step, {own / before.step_time_s:.1%} of it" in found[code].message
        assert own > 0.1 * before.step_time_s
    assert code not in {fault.code for fault in api.check(other).warnings}


def test_a_good_plan_has_no_pitfall() -> None:
    best = api.search("llama3-8b", "h100", nodes=2, global_batch=64, seq_len=4096).best.setup
    assert not [fault for fault in api.check(best).faults if fault.code.startswith("L2")]
    assert not api.check(best).better


def test_check_prices_itemises_and_offers_better_neighbours() -> None:
    found = api.check(setup_of("tensor=8,pipeline=4,data=2,recompute=full"))
    data = found.as_json()
    assert data["step_time_s"] > 0
    assert [rank["pipeline_rank"] for rank in data["memory_gib"]] == [0, 1, 2, 3]
    for rank in data["memory_gib"]:
        items = {k: v for k, v in rank.items() if k not in ("pipeline_rank", "stages", "total")}
        assert sum(items.values()) == pytest.approx(rank["total"])
    assert data["better"]
    ratios = [n["ratio"] for n in data["better"]]
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.99
    for n in data["better"]:
        plan = parse_plan_line(n["plan"])
        other = setup_of("data=64").with_plan(**vars(plan))
        assert not [f for f in examine(other).faults if f.severity == "error"]
        assert estimate(other).step_time_s / data["step_time_s"] == pytest.approx(n["ratio"], rel=1e-9)


def test_case_g03_the_verdict_comes_from_the_total() -> None:
    """States alone fit; with activations the rank does not, and a neighbour that fits is named."""
    setup = setup_of("tensor=2,data=32,zero=1,microbatch=4", global_batch=256, seq_len=4096)
    found = api.check(setup)
    assert [fault.code for fault in found.errors] == ["H405"]
    (fault,) = found.errors
    assert "activations" in fault.message
    assert "GiB" in fault.hint
    assert found.better
    done = CliRunner().invoke(main, ["check", "--plan", str(setup.plan), "--model", "llama3-8b", "--cluster", "h100"])
    assert done.exit_code == 1


def test_case_g16_each_rank_has_its_own_peak() -> None:
    """1F1B: live activations fall along the pipeline, and only the last rank has logits."""
    memory = api.check(setup_of("tensor=4,pipeline=4,data=4", global_batch=64)).as_json()["memory_gib"]
    activations = [rank["activations"] for rank in memory]
    assert activations == sorted(activations, reverse=True)
    assert activations[1] / activations[3] == pytest.approx(3.0, rel=0.05)
    assert [rank["logits"] > 0 for rank in memory] == [False, False, False, True]


def test_the_verb_prints_a_price() -> None:
    words = "check --plan tensor=8,data=2,zero=1 --model llama3-8b --cluster h100 --nodes 2 --global-batch 32 --json"
    done = CliRunner().invoke(main, words.split())
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["step_time_s"] > 0
    assert data["memory_gib"][0]["total"] > data["memory_gib"][0]["weights"]
    shown = CliRunner().invoke(main, words.split()[:-1])
    assert "better neighbours" in shown.output
