"""Fields held to some of their values, schedules of the software, and hints at nodes that work."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import shardsmith as api
from shardsmith.cli.main import main
from shardsmith.design.cost.schedules import SCHEDULES
from shardsmith.design.cost.subject import make_subject
from shardsmith.design.planner.bounded import Bounded
from shardsmith.design.planner.plans import plan_of
from shardsmith.design.planner.question import fixed_fields
from shardsmith.design.planner.space import Space
from shardsmith.design.targets import target_named, target_names
from shardsmith.errors import Refused
from shardsmith.plan.file import dumps, loads, read_setup
from shardsmith.plan.fixed import OneOf
from shardsmith.specs.job import Workload
from shardsmith.specs.library import cluster_named, model_named

ASK = {"global_batch": 16, "seq_len": 1024, "nodes": 1}


def best_of(fix: list[str], *, bound: bool) -> tuple[float, int]:
    """Seconds of the best plan, and how many plans there are."""
    s = make_subject(
        model_named("qwen3-0.6b"), Workload(seq_len=1024, global_batch=16, dtype="bfloat16"), cluster_named("h100", 1)
    )
    space = Space(subject=s, world=8, fixed=fixed_fields(fix))
    found = Bounded(space=space, limit=70e9, bound=bound).run()
    for p in found.plans.values():
        plan = plan_of(p, 0, space.base)
        assert all(
            getattr(plan, key) in (value.values if isinstance(value, OneOf) else (value,))
            for key, value in space.fixed.items()
        )
    return float(np.min(found.best, initial=np.inf)), found.searched if not bound else int(found.total)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("schedule", ["one_f_one_b", "interleaved"]),
        ("overlap", ["half_microbatches", "none"]),
        ("microbatch", ["1", "4"]),
        ("zero", ["0", "3"]),
        ("stages_per_rank", ["4", "7"]),
        ("layers", ["weighed", "weighed"]),
        ("recompute", ["selective", "full"]),
    ],
)
def test_alternatives_are_the_better_of_their_values(key: str, values: list[str]) -> None:
    rest = ["pipeline=2", "context=1"] if key != "overlap" else ["pipeline=1", "context=1", "tensor=2|4"]
    alone = [best_of([*rest, f"{key}={value}"], bound=False) for value in dict.fromkeys(values)]
    both, by_bounds = (best_of([*rest, f"{key}={'|'.join(values)}"], bound=bound) for bound in (False, True))
    assert both[0] == pytest.approx(min(seconds for seconds, _ in alone), rel=1e-12)
    assert by_bounds[0] == pytest.approx(both[0], rel=1e-12)
    # Every plan of either value, and none twice.
    assert both[1] == sum(count for _, count in alone)


@pytest.mark.parametrize(
    ("fix", "code", "helps"),
    [
        (["schedule=zb_v|best"], "L105", "schedule = best is not searched"),
        (["zero=1|9"], "F102", "zero = 9"),
        (["tensor=3|4"], "T203", "tensor = 3 does not divide"),
        (["microbatch=1|0"], "B203", "microbatch = 0"),
        (["bucket_mb=10|20"], "L105", "does not vary bucket_mb"),
        (["schedule=zb_v", "schedule=gpipe"], "F202", "'schedule=ONE|OTHER'"),
        (["data=32"], "L101", "data = 32: 32 ranks, more than the 8 devices"),
        (["data=16|32"], "L101", "hint: nodes = 2"),
        (["tensor"], "F201", "not key=value"),
        (["tensr=2|4"], "F101", "tensor"),
    ],
)
def test_alternatives_that_are_wrong_are_told_one_by_one(fix: list[str], code: str, helps: str) -> None:
    with pytest.raises(Refused) as caught:
        api.search("qwen3-0.6b", "h100", **ASK, fix=fix)
    assert caught.value.faults[0].code == code
    assert helps in str(caught.value)


def test_every_target_names_schedules_that_there_are() -> None:
    for name in target_names():
        assert set(target_named(name).schedules) <= {*SCHEDULES, "file"}, name
    assert set(target_named("shardsmith").schedules) == {*SCHEDULES, "file"}


def test_a_schedule_that_the_software_lacks_is_warned_of_and_the_hint_works() -> None:
    ask = ["plan", "--model", "llama3-70b", "--cluster", "h100", "--nodes", "8", "--global-batch", "256"]
    ask += ["--seq-len", "8192", "--top", "1", "--json"]
    free = json.loads(CliRunner().invoke(main, ask).stdout)
    (warning,) = free["warnings"]
    assert warning["code"] == "X352"
    held = warning["hint"].split("'")[1]
    assert held == "schedule=one_f_one_b|interleaved"
    kept = json.loads(CliRunner().invoke(main, [*ask, "--fix", held]).stdout)
    assert kept["warnings"] == []
    assert kept["plans"][0]["step_time_s"] >= free["plans"][0]["step_time_s"]
    assert json.loads(CliRunner().invoke(main, [*ask, "--target", "shardsmith"]).stdout)["warnings"] == []


@pytest.mark.parametrize(("target", "warned"), [("megatron-core", 1), ("torchtitan", 0), ("composer-fsdp", 1)])
def test_check_warns_of_the_schedule_too(target: str, warned: int) -> None:
    plan = "tensor=4,pipeline=2,schedule=zb_v,microbatches=8"
    ask = ["check", "--plan", plan, "--model", "qwen3-0.6b", "--cluster", "h100", "--seq-len", "1024", "--json"]
    data = json.loads(CliRunner().invoke(main, [*ask, "--target", target]).stdout)
    assert [w["code"] for w in data["warnings"]].count("X352") == warned


@pytest.mark.parametrize(("model", "nodes", "batch", "least"), [("llama3-405b", 11, 16, 12), ("llama3-70b", 1, 64, 3)])
def test_the_hint_names_the_fewest_nodes(model: str, nodes: int, batch: int, least: int) -> None:
    with pytest.raises(Refused) as caught:
        api.search(model, "h100", nodes=nodes, global_batch=batch, seq_len=8192)
    assert f"nodes = {least}," in caught.value.faults[0].hint
    assert api.search(model, "h100", nodes=least, global_batch=batch, seq_len=8192, top=1).plans


def test_a_small_gap_is_not_rounded_away() -> None:
    with pytest.raises(Refused, match=r"0\.0\d\d\d GiB more") as caught:
        api.search("llama3-70b", "h100", nodes=2, global_batch=256, seq_len=8192)
    assert "a device with 79.3 GiB" in caught.value.faults[0].hint


def test_serving_hints_name_nodes_that_hold_the_requests() -> None:
    ask = {"context": 8192, "concurrency": 256}
    for nodes, least in ((1, "--nodes 4"), (3, "--nodes 4")):
        with pytest.raises(Refused) as caught:
            api.serve("deepseek-v3", "h800", nodes=nodes, **ask)
        assert least in caught.value.faults[0].hint
    assert api.serve("deepseek-v3", "h800", nodes=4, **ask).plans
    with pytest.raises(Refused) as caught:
        api.serve("deepseek-v3", "h800", nodes=1, dtype="float8", **ask)
    assert caught.value.faults[0].hint == "--nodes 2"


def test_sequences_beyond_the_context_are_warned_of() -> None:
    found = api.search("llama3-8b", "h100", nodes=1, global_batch=8, seq_len=16384, top=1, fix=["pipeline=1"])
    assert [fault.code for fault in found.warnings] == ["B205"]
    served = api.serve("llama3-8b", "h100", nodes=1, context=80000, concurrency=1)
    assert [w["code"] for w in served.as_json()["warnings"]] == ["B205"]


def test_a_plan_file_keeps_the_software_that_it_was_found_for(tmp_path: Path) -> None:
    ask = ["plan", "--model", "qwen3-0.6b", "--cluster", "h100", "--nodes", "1", "--global-batch", "64"]
    ask += ["--seq-len", "4096", "--top", "1", "--fix", "tensor=1"]

    def step(*words: str) -> float:
        answer = CliRunner().invoke(main, [*words, "--json"])
        data = json.loads(answer.stdout)
        return float(data["plans"][0]["step_time_s"] if "plans" in data else data["step_time_s"])

    file = str(tmp_path / "plan.toml")
    found = step(*ask, "--dtype", "float8", "--out", file)
    assert read_setup(file).target == "megatron-core:float8"
    assert loads(dumps(read_setup(file))).setup == read_setup(file)
    assert step("check", file) == pytest.approx(found, rel=1e-12)
    assert step("check", file, "--target", "megatron-core") > 1.05 * found
    assert step("simulate", file) == pytest.approx(step("simulate", file, "--target", "megatron-core:float8"))
    for verb in ("check", "simulate"):
        answer = CliRunner().invoke(main, [verb, file, "--dtype", "float8"])
        assert answer.exit_code != 0
        assert "--target megatron-core:float8" in answer.output
    step(*ask, "--out", file)
    assert "target" not in Path(file).read_text()
    Path(file).write_text("target = 3\n" + Path(file).read_text())
    with pytest.raises(Refused, match="target = 3"):
        read_setup(file)


def test_a_training_of_seconds_is_told_in_seconds() -> None:
    ask = ["plan", "--model", "qwen3-0.6b", "--cluster", "h100", "--nodes", "1", "--global-batch", "64"]
    ask += ["--seq-len", "1024", "--top", "1", "--tokens", "1e7", "--dtype", "float8"]
    text = CliRunner().invoke(main, ask).output
    assert "0.0 days" not in text
    assert " 0 device hours" not in text
    assert "in float8 (matrix products) and bfloat16" in text


def test_a_batch_that_holds_data_ranks_back_is_told_with_one_that_does_not() -> None:
    found = api.search("llama3-8b", "h100", nodes=2, global_batch=63, seq_len=8191, top=1)
    assert found.nearby is not None
    better = api.search("llama3-8b", "h100", nodes=2, global_batch=found.nearby.global_batch, seq_len=8191, top=1)
    rates = [a.best.setup.workload.global_batch / a.best.estimate.step_time_s for a in (found, better)]
    assert found.nearby.faster == pytest.approx(rates[1] / rates[0], rel=1e-9)
    assert found.nearby.faster > 1.2
    assert better.nearby is None
    ask = ["plan", "--model", "llama3-8b", "--cluster", "h100", "--nodes", "2", "--global-batch", "63"]
    text = CliRunner().invoke(main, [*ask, "--seq-len", "8191", "--top", "1"]).output
    assert "63 sequences hold data ranks back: global_batch = 64 would train" in text


def test_serving_layouts_are_held_too() -> None:
    ask = ["plan", "--serve", "--model", "llama3-70b", "--cluster", "h100", "--context", "8192", "--concurrency", "64"]

    def run(*words: str) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(CliRunner().invoke(main, [*ask, *words, "--top", "99", "--json"]).stdout)
        return data

    free, held = run(), run("--fix", "pipeline=1", "--fix", "tensor=4|8")
    kept = [c for c in free["plans"] if "pipeline" not in c["plan"] and c["plan"].split("tensor=")[-1][0] in "48"]
    assert kept
    assert [c["plan"] for c in held["plans"]] == [c["plan"] for c in kept]
    assert held["plans"][0]["tpot_s"] == kept[0]["tpot_s"]
    for fix, helps in (("tensor=3", "tensor = 1 or 2 or 4 or 8"), ("zero=1", "one of data, tensor, pipeline, expert")):
        with pytest.raises(Refused) as caught:
            api.serve("llama3-70b", "h100", context=8192, concurrency=64, fix=[fix])
        assert caught.value.faults[0].code == "I104"
        assert helps in caught.value.faults[0].hint
