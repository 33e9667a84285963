"""`simulate`: plans with the cost model's lengths, stragglers, given lengths, schedules without a flush."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import shardsmith
from shardsmith.cli.simulate import command
from shardsmith.design.cost.estimate import estimate
from shardsmith.design.simulator.lengths import StageLengths
from shardsmith.design.simulator.simulation import simulate_plan
from shardsmith.errors import Refused
from shardsmith.plan.setup import Setup
from shardsmith.schedule.ir import Kind
from shardsmith.schedule.orders import asynchronous_names, build
from shardsmith.schedule.play import Versions, weight_versions

LARGE = "tensor=8,pipeline=8,data=16,microbatch=1,zero=1,sequence_parallel=true"


def gpt3(plan: str = LARGE, batch: int = 512) -> Setup:
    return shardsmith.make_setup(
        plan=plan, model="gpt3-175b", cluster="a100", nodes=128, seq_len=2048, global_batch=batch, dtype="bfloat16"
    )


def run(*words: str) -> Result:
    return CliRunner().invoke(command, words)


def found(*words: str) -> dict[str, object]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    loaded: dict[str, object] = json.loads(result.stdout)
    return loaded


@pytest.mark.parametrize(
    ("plan", "model", "cluster", "nodes", "seq_len", "batch"),
    [
        (LARGE, "gpt3-175b", "a100", 128, 2048, 1536),
        ("tensor=8,pipeline=8,data=16,recompute=full", "gpt3-175b", "a100", 128, 2048, 1536),
        ("tensor=8,pipeline=8,data=16,schedule=interleaved,stages_per_rank=3", "gpt3-175b", "a100", 128, 2048, 1536),
        ("tensor=8,pipeline=16,data=8,zero=1,sequence_parallel=true", "llama3-405b", "h100", 128, 8192, 512),
        ("tensor=2,pipeline=4,data=8,expert=8,zero=1", "mixtral-8x7b", "h100", 8, 4096, 512),
    ],
)
def test_the_simulation_and_the_formula_agree_where_both_hold(
    plan: str, model: str, cluster: str, nodes: int, seq_len: int, batch: int
) -> None:
    setup = shardsmith.make_setup(
        plan=plan, model=model, cluster=cluster, nodes=nodes, seq_len=seq_len, global_batch=batch, dtype="bfloat16"
    )
    formula = estimate(setup).step_time_s
    simulated = simulate_plan(setup, record=False)
    assert simulated.seconds == pytest.approx(formula, rel=0.02)
    assert simulated.low is not None
    assert simulated.high is not None
    assert simulated.low < simulated.seconds < simulated.high


def test_without_figures_lengths_are_equal_and_the_bubble_is_the_closed_form() -> None:
    data = found("--plan", "pipeline=4,microbatches=12")
    assert data["bubble"] == pytest.approx(3 / 15)
    assert data["step_time_s"] == 45
    assert data["lanes"] == {"compute": [36.0] * 4}
    assert "local has no measured peak" in str(data["lengths"])
    given = found("--plan", "pipeline=4,microbatches=12", "--times", "F=1,B=2")
    assert (given["bubble"], given["interval_s"]) == (data["bubble"], None)


def test_lanes_of_every_axis_in_use_and_none_else() -> None:
    lanes = simulate_plan(gpt3(), record=False).lanes()
    assert set(lanes) == {"compute", "tensor", "pipeline", "data"}
    mixtral = shardsmith.make_setup(
        plan="data=8,expert=8,zero=1", model="mixtral-8x7b", cluster="h100", seq_len=4096, dtype="bfloat16"
    )
    assert set(simulate_plan(mixtral, record=False).lanes()) == {"compute", "expert", "data"}


def test_a_straggler_slows_its_replica_by_at_most_its_factor() -> None:
    base = simulate_plan(gpt3(), record=False)
    for rank in (0, 5, 700):
        slow = simulate_plan(gpt3(), slow={rank: 1.3}, record=False)
        assert base.seconds < slow.seconds < 1.3 * base.seconds
        assert slow.undisturbed == base.seconds
        assert rank // 8 * 8 in {r // 8 * 8 for r in slow.ranks}  # its tensor group is on the replica shown
    # One tensor group in the same replica twice as bad: the worse of the two counts, once.
    both = simulate_plan(gpt3(), slow={0: 1.3, 1: 1.1}, record=False)
    assert both.seconds == simulate_plan(gpt3(), slow={0: 1.3}, record=False).seconds
    # Two replicas: the one that ends last.
    assert simulate_plan(gpt3(), slow={0: 1.05, 8: 1.3}, record=False).ranks[0] == 8


def test_a_straggler_computes_longer_and_communicates_as_before() -> None:
    stage = StageLengths(forward=3, input_grad=3, weight_grad=3, inside={"tensor": (1.0, 1.0)})
    assert [stage.slowed(kind, 2.0) for kind in (Kind.F, Kind.I, Kind.W, Kind.B)] == [5, 5, 6, 11]


@pytest.mark.parametrize(
    ("slow", "said"), [("x", "not rank=factor"), ("1024=1.2", "no rank 1024"), ("3=0", "factor of 0")]
)
def test_wrong_stragglers_are_refused(slow: str, said: str) -> None:
    words = ("--plan", LARGE, "--model", "gpt3-175b", "--cluster", "a100", "--nodes", "128", "--global-batch", "512")
    result = run(*words, "--slow", slow)
    assert result.exit_code == 1
    assert "S402" in result.output
    assert said in result.output


def test_given_lengths_and_a_target_exclude_each_other() -> None:
    assert "S403" in run("--plan", "pipeline=2", "--times", "F=1,B=2", "--target", "torchtitan").output


def test_wider_computations_are_not_priced_and_states_too_large_only_warned_of() -> None:
    with pytest.raises(Refused, match="H503"):
        simulate_plan(shardsmith.make_setup(plan="", model="llama3-8b", cluster="h100", nodes=1))
    words = ("--plan", "data=8", "--model", "llama3-70b", "--cluster", "h100", "--seq-len", "4096")
    assert "H404" in str(found(*words)["warnings"])


def test_level_3_gathers_in_every_pass_or_once() -> None:
    def one(gather: str) -> list[float]:
        setup = shardsmith.make_setup(
            plan=f"data=64,zero=3,microbatch=1,zero_gather={gather}",
            model="llama3-8b",
            cluster="h100",
            nodes=8,
            seq_len=4096,
            global_batch=256,
            dtype="bfloat16",
        )
        return simulate_plan(setup, record=False).lanes()["data"]

    each, once = one("per_pass"), one("per_step")  # 4 microbatches
    assert each[0] == pytest.approx((8 * 2 + 4 * 4) / (2 + 4) * once[0], rel=0.06)  # bf16 gathered, fp32 reduced


def test_traces_and_pictures_are_of_the_global_ranks(tmp_path: Path) -> None:
    plan = ("--plan", "pipeline=2,data=2,microbatches=4", "--slow", "1=1.5")
    trace, picture = tmp_path / "t.json", tmp_path / "t.svg"
    files = found(*plan, "--trace", str(trace), "--picture", str(picture))["files"]
    assert files == {"trace": str(trace), "picture": str(picture)}
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {1, 3}
    assert picture.read_text().lstrip().startswith("<?xml")
    assert "rank 1 ▕" in run(*plan).output


def test_pipedream_is_simulated_with_its_weight_versions() -> None:
    """Narayanan et al. 2019: stage s of P keeps P - s versions, and only filling and emptying leave ranks idle."""
    assert asynchronous_names() == ("pipedream",)
    for pipeline in (1, 2, 4, 7):
        order = build("pipedream", pipeline=pipeline, microbatches=3 * pipeline)
        assert weight_versions(order) == tuple(Versions(pipeline - s, pipeline - 1 - s) for s in range(pipeline))
    assert weight_versions(build("gpipe", pipeline=3, microbatches=6)) == (Versions(1, 0),) * 3
    data = found("--plan", "pipeline=4,microbatches=16,schedule=pipedream")
    assert data["weight_versions"] == [4, 3, 2, 1]
    assert data["update_delay"] == [3, 2, 1, 0]
    assert (data["step_time_s"], data["steady_step_time_s"]) == (57, 48)
    assert "S009" in str(data["warnings"])
    assert "weight versions" in run("--plan", "pipeline=4,microbatches=16,schedule=pipedream").output


def test_pipedream_is_refused_for_training() -> None:
    setup = shardsmith.make_setup(plan="pipeline=2,schedule=pipedream")
    assert [f.code for f in shardsmith.check(setup, running=True).errors] == ["S009"]
    assert "S009" in {f.code for f in shardsmith.check(setup).warnings}


def test_updates_of_an_order_without_flush_wait_for_their_reduction() -> None:
    setup = shardsmith.make_setup(
        plan="pipeline=2,data=4,microbatches=8,schedule=pipedream",
        model="llama3-8b",
        cluster="h100",
        seq_len=4096,
        global_batch=32,
        dtype="bfloat16",
    )
    spans = simulate_plan(setup).timeline.spans
    updates = [s for s in spans if s.name == "update"]
    assert len(updates) == 16
    for update in updates:
        own = [s for s in spans if (s.stage, s.microbatch) == (update.stage, update.microbatch)]
        reduced = [s.end for s in own if s.name.startswith("reduce")]
        assert update.start >= max(reduced) > 0


def test_a_deep_pipeline_is_simulated_in_two_seconds_of_one_core() -> None:
    setup = shardsmith.make_setup(
        plan="tensor=8,pipeline=64,microbatch=1,sequence_parallel=true",
        model="llama3-405b",
        cluster="h100",
        nodes=64,
        seq_len=8192,
        global_batch=512,
        dtype="bfloat16",
    )
    start = time.process_time()
    simulate_plan(setup, record=False)
    assert time.process_time() - start < 2.0


def test_steps_by_formula_and_simulated_differ_as_the_page_says() -> None:
    """docs/simulate.md: gpipe and 1F1B within a few per cent, half of all plans within one."""
    changes = {}
    for schedule, stages in (("gpipe", None), ("one_f_one_b", None), ("interleaved", 2), ("zb_h1", None), ("zb_v", 2)):
        for zero, batch in ((1, 64), (2, 128)):
            plan = f"tensor=2,pipeline=4,data=2,microbatch=1,zero={zero},schedule={schedule},zero_gather=per_step"
            plan += f",stages_per_rank={stages}" if stages else ""
            setup = shardsmith.make_setup(
                plan=plan,
                model="llama3-8b",
                cluster="h100",
                nodes=2,
                global_batch=batch,
                seq_len=4096,
                dtype="bfloat16",
            )
            simulated = simulate_plan(setup, record=False).seconds
            changes[schedule, zero] = abs(simulated / estimate(setup).step_time_s - 1)
    assert statistics.median(changes.values()) < 0.01
    assert max(changes.values()) < 0.1
    assert max(change for (schedule, _), change in changes.items() if schedule in ("gpipe", "one_f_one_b")) < 0.04
