"""Hints that hold when they are followed, costs charged once, and figures that say what they rest on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardsmith import api
from shardsmith.cli.main import main
from shardsmith.design.cost.estimate import estimate
from shardsmith.design.cost.subject import DEFAULT_TARGET, subject_of
from shardsmith.design.planner.explain import neighbours
from shardsmith.plan.file import make_setup
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import settled
from shardsmith.units import GIB, format_seconds

LARGE = {"model": "llama3-70b", "cluster": "h100", "nodes": 8, "global_batch": 256, "seq_len": 8192}
TIGHT = (
    "data=2,tensor=4,pipeline=4,context=2,zero=1,schedule=zb_v,layers=10+11+10+10+10+10+10+9,"
    "microbatch=4,microbatches=32,sequence_parallel=true,overlap=chunks"
)
PLANS = (
    TIGHT,
    TIGHT.replace("microbatch=4,", "").replace("chunks", "none"),
    "tensor=8,pipeline=4,data=2,layers=weighed,schedule=interleaved,stages_per_rank=4,zero=1,microbatch=2",
    "tensor=2,pipeline=8,data=4,schedule=one_f_one_b,stages_per_rank=1,zero=2,replicate=2",
)


def large(plan: str, *overrides: str, **options: object) -> Setup:
    given: dict[str, object] = {**LARGE, "dtype": "bfloat16", **options}
    return make_setup(plan=plan.replace(",overlap=none", ""), overrides=overrides, **given)  # type: ignore[arg-type]


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def words(command: str, plan: str, **options: object) -> list[str]:
    named = (("--" + key.replace("_", "-"), str(value)) for key, value in {**LARGE, **options}.items())
    return [command, "--plan", plan, *(word for pair in named for word in pair)]


def followed(plan: str, hint: str) -> Setup:
    """What becomes of a plan when the changes of a hint are laid over it, one `--set` each."""
    changes = re.split(r", (?=\w+ = )", hint.partition(" (")[0])
    return settled(large(plan, *("plan." + change.replace(" = ", "=") for change in changes)))


@pytest.mark.parametrize("plan", PLANS)
def test_every_neighbour_names_all_that_moves_and_stands_once(plan: str) -> None:
    setup = settled(large(plan))
    found = neighbours(subject_of(setup, DEFAULT_TARGET), setup, estimate(setup), 80 * GIB)
    assert len(found) == len({n.plan for n in found}) > 10
    for n in found:
        assert "not stated" not in n.becomes
        if n.ratio is not None and n.after != "even":
            other = followed(plan, f"{n.axis} = {n.becomes}")
            assert estimate(other).step_time_s == pytest.approx(n.ratio * estimate(setup).step_time_s)
            assert estimate(other).peak / GIB == pytest.approx(n.peak_gib)


def test_the_hint_of_a_plan_too_large_fits_when_followed() -> None:
    (fault,) = api.check(large(TIGHT)).errors
    assert fault.code == "H405"
    assert fault.hint.startswith("tensor = 8, data = 1, ")
    after = api.check(followed(TIGHT, fault.hint))
    assert not after.errors
    assert after.estimate is not None
    assert f"({after.estimate.peak / GIB:.1f} GiB)" in fault.hint


def test_what_does_not_fit_is_no_fix_unless_it_is_smaller_and_says_so() -> None:
    found = {f.code: f for f in api.check(large("tensor=8,data=8,zero=1")).faults}
    assert "L208" not in found  # larger microbatches would hold terabytes
    assert re.search(r"87\.\d GiB, still 8\.\d GiB too many\)$", found["L207"].hint)
    setup = make_setup(
        plan="expert=8,data=8,zero=1,recompute=full",
        model="mixtral-8x7b",
        cluster="h100",
        nodes=1,
        seq_len=4096,
        global_batch=64,
        dtype="bfloat16",
    )
    experts = {f.code: f for f in api.check(setup).faults}
    assert "L204" not in experts
    assert "no plan one step away holds less" in experts["H405"].hint


@pytest.mark.parametrize("options", [{}, {"seq_len": 128}])
def test_gathers_are_charged_once(options: dict[str, int]) -> None:
    setup = large("tensor=8,data=8,zero=3,recompute=full", **options)
    checked = api.check(setup)
    found = {f.code: f for f in checked.warnings if f.code in ("L203", "L208")}
    shares = {code: float(re.findall(r"([\d.]+)% of it", f.message)[0]) for code, f in found.items()}
    assert sum(shares.values()) < 100
    assert "pipeline" not in str(found["L203"])
    once = estimate(setup.with_plan(zero_gather="per_step"))
    left = 100 * once.step_time_s / estimate(setup).step_time_s
    assert shares["L208"] <= left
    assert "the rest in gradients and weights that move less often (L203)" in found["L208"].message


def test_where_weights_cannot_be_held_a_larger_microbatch_is_charged_in_two_parts() -> None:
    """Gathers (L203) and small kernels (L208) share one fix, and add up to what it saves."""
    setup = large("data=64,zero=3,recompute=full", seq_len=4096)
    found = {f.code: f for f in api.check(setup).warnings if f.code in ("L203", "L208")}
    assert {f.hint.partition(" (")[0] for f in found.values()} == {"microbatch = 4"}
    saved = estimate(setup).step_time_s - estimate(setup.with_plan(microbatch=4)).step_time_s
    shares = [float(re.findall(r"([\d.]+)% of it", f.message)[0]) for f in found.values()]
    assert sum(shares) == pytest.approx(100 * saved / estimate(setup).step_time_s, abs=0.11)
    for fault in found.values():
        assert f"its fix saves {format_seconds(saved)} in all" in fault.message


def test_a_bubble_is_charged_with_the_bubble_alone() -> None:
    setup = large("tensor=8,pipeline=64,zero=1,sequence_parallel=true", nodes=64, global_batch=512)
    found = {f.code: f.message for f in api.check(setup).warnings}
    e = estimate(setup)
    share = 100 * e.breakdown["bubble"] / e.step_time_s
    assert 0.5 * share < float(re.findall(r"([\d.]+)% of it", found["L202"])[0]) <= share + 0.05
    assert re.search(r"its fix saves [\d.]+ s in all, [\d.]+ s of that by more even stages", found["L202"])


def test_simulate_warns_of_a_rank_too_large_everywhere(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run(*words("simulate", TIGHT), "--html", str(page))
    assert done.exit_code == 0
    assert "warning[H405]" in done.output
    assert "50.8 GiB more" in done.output
    assert "<strong>H405:</strong>" in page.read_text(encoding="utf-8")
    data = json.loads(run(*words("simulate", TIGHT), "--json").stdout)
    assert "H405" in [f["code"] for f in data["warnings"]]
    # One kind of number on the console and at the head of the page.
    (step,) = re.findall(r"simulated step ([\d.]+ s)", done.output)
    head = re.findall(r"step time, simulated</span><strong>([\d.]+ s)", page.read_text(encoding="utf-8"))
    assert head == [step]


def test_prices_of_other_devices_than_there_are_say_so() -> None:
    many = run(*words("check", "tensor=8,data=16,zero=1,recompute=full"))
    assert "H402" in many.output
    assert "priced as if there were 128 devices, of which the cluster has 64" in many.output
    checked = api.check(large("tensor=8,data=4,zero=1,recompute=full,sequence_parallel=true"))
    assert checked.estimate is not None
    (remark,) = checked.remarks
    assert f"over all 64: MFU {checked.estimate.mfu / 2:.1%}" in remark
    assert checked.as_json()["remarks"] == [remark]


def test_check_says_what_it_priced_and_why_it_did_not() -> None:
    plan = "tensor=8,data=8,zero=3"
    bare = run("check", "--plan", plan, "--model", "llama3-70b", "--cluster", "h100", "--nodes", "8")
    assert "a step of 16 (default) x 128 (default) tokens in bfloat16, priced as megatron-core" in bare.output
    stated = run(*words("check", plan))
    assert "a step of 256 x 8192 tokens in bfloat16, priced as megatron-core" in stated.output
    wide = run(*words("check", plan), "--dtype", "float32")
    assert "no price: H100-SXM5-80GB has no known peak in float32" in wide.output
    assert "MFU" not in wide.output
    tight = run(*words("check", TIGHT))
    assert "neighbours that fit" in tight.output
    assert "better neighbours" not in tight.output
