"""Why a plan: rules followed or beaten and by how much, what binds, what the verb prints of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from shardsmith import api
from shardsmith.cli.main import main
from shardsmith.design.cost.estimate import Estimate, estimate
from shardsmith.plan.file import make_setup
from shardsmith.plan.line import parse_plan_line
from shardsmith.plan.stages import settled
from shardsmith.specs.library import cluster_named


def test_case_g08_the_rule_is_priced_not_decreed() -> None:
    """With many microbatches the bubble is small and pipeline beats tensor; with few it is the other way round."""
    many = api.search("llama2-13b", "a100", global_batch=128, seq_len=4096, fix=["data=1", "context=1", "microbatch=1"])
    few = api.search("llama2-13b", "a100", global_batch=2, seq_len=4096, fix=["data=1", "context=1", "microbatch=1"])
    assert many.best.setup.plan.pipeline > 2
    assert few.best.setup.plan.tensor > few.best.setup.plan.pipeline
    (note,) = [n for n in many.best.rules if n.rule == "tensor parallel inside one node"]
    assert note.verdict == "beaten"
    assert note.ratio is not None
    assert note.ratio > 1
    own, other = many.best.setup, parse_plan_line(note.other or "")
    assert estimate(own.with_plan(**vars(other))).step_time_s / estimate(own).step_time_s == pytest.approx(note.ratio)
    assert f"takes {note.ratio - 1:.1%} longer" in note.text
    # What is held is not offered as a faster neighbour.
    assert not [n for n in many.best.neighbours if n.ratio is not None and n.ratio < 1 - 1e-9 and not n.reason]
    assert any(n.reason.startswith("held: ") and "data = 1" in n.reason for n in many.best.neighbours)


@pytest.mark.parametrize(
    ("model", "nodes", "batch", "rules"),
    [("qwen3-0.6b", 1, 64, 2), ("llama3-70b", 8, 256, 5), ("mixtral-8x7b", 4, 256, 6)],
)
def test_m15_rules_are_followed_or_beaten_by_what_the_other_plan_takes(
    model: str, nodes: int, batch: int, rules: int
) -> None:
    found = api.search(model, "h100", nodes=nodes, global_batch=batch, seq_len=4096, top=1).best
    says = {
        "data parallel where the model fits one device": lambda p: p.tensor == p.pipeline == p.context == 1,
        "tensor parallel inside one node": lambda p: p.tensor > 1 and p.pipeline == 1,
        "tensor ranks stay inside a node": lambda p: p.tensor <= 8,
        "tensor and pipeline across nodes": lambda p: p.tensor > 1 and p.pipeline > 1,
        "tensor and expert parallel for a mixture of experts": lambda p: p.tensor > 1 and p.expert > 1,
        "at most 16 pipeline ranks": lambda p: p.pipeline <= 16,
        "at least 4 microbatches a pipeline rank": lambda p: p.pipeline == 1 or p.microbatches >= 4 * p.pipeline,
    }
    assert len(found.rules) == rules
    for note in found.rules:
        own = says[note.rule](found.setup.plan)
        assert note.verdict == ("followed" if own else "beaten")
        assert note.other is not None
        assert note.ratio is not None
        other = settled(replace(found.setup, plan=parse_plan_line(note.other)))
        assert says[note.rule](other.plan) != own
        assert not [fault for fault in api.check(other).faults if fault.severity == "error"]
        assert estimate(other).step_time_s == pytest.approx(note.ratio * found.estimate.step_time_s, rel=1e-9)
        assert note.ratio > 1


def test_case_g08_eight_ranks_of_either_kind_at_the_sizes_of_the_case() -> None:
    """With 8 tensor ranks that wait for links 25 % of the time, 64 microbatches want the pipeline, 8 tensor ranks."""

    def best(degree: str, microbatches: int, bandwidth_gbs: float) -> Estimate:
        fix = [degree, "data=1", "context=1", "microbatch=1", "schedule=one_f_one_b"]
        cluster = cluster_named("a100")
        links = (replace(cluster.levels[0], bandwidth_gbs=bandwidth_gbs), *cluster.levels[1:])
        ask = {"global_batch": microbatches, "seq_len": 4096, "fix": fix, "top": 1}
        return api.search("llama2-13b", replace(cluster, levels=links), **ask).best.estimate  # type: ignore[arg-type]

    tensor, free = best("tensor=8", 64, 78.9), best("tensor=8", 64, 1e7)
    assert 1 - free.step_time_s / tensor.step_time_s == pytest.approx(0.25, abs=0.005)
    for microbatches, idle, fewer_bubbles in ((64, 0.0986, False), (8, 0.4667, True)):
        wide, deep = (best(degree, microbatches, 78.9) for degree in ("tensor=8", "pipeline=8"))
        parts = deep.breakdown
        busy = parts["compute"] + parts["exchange"]
        assert parts["bubble"] / (busy + parts["bubble"]) == pytest.approx(idle, rel=0.02)
        assert (wide.step_time_s < deep.step_time_s) == fewer_bubbles


def test_what_layers_wait_for_links_is_no_compute() -> None:
    near, far = (
        make_setup(
            plan=f"tensor={t},data={16 // t},microbatch=1,sequence_parallel=true,replicate_kv={r}",
            model="llama3-70b",
            cluster="h100",
            nodes=2,
            global_batch=32,
            seq_len=4096,
            dtype="bfloat16",
        )
        for t, r in ((1, "false"), (16, "true"))
    )
    assert "exchange" not in api.check(near).binds
    words = api.check(far).binds
    share = float(words.split("then exchange inside layers ")[1].split("%")[0]) / 100
    links = tuple(replace(link, bandwidth_gbs=1e12, latency_us=0.0) for link in far.cluster.levels)
    bare = estimate(replace(far, cluster=replace(far.cluster, levels=links)))
    total = estimate(far)
    assert share == pytest.approx(1 - bare.step_time_s / total.step_time_s, abs=0.01)
    assert share > 0.3


def test_a_plan_of_many_stages_reads_briefly() -> None:
    words = "plan --model llama3-405b --cluster h100 --nodes 2048 --global-batch 2048 --seq-len 8192 --top 1 --explain"
    shown = CliRunner().invoke(main, words.split()).output
    (best,) = [line.removeprefix("best: ") for line in shown.splitlines() if line.startswith("best: ")]
    assert "layers=weighed" in best
    assert "1+1+1" not in shown
    # No column is so wide that others lose their names, and nothing is cut off.
    assert "│ sequence_parallel │" in shown
    assert "…" not in shown
    found = api.search("llama3-405b", "h100", nodes=2048, global_batch=2048, seq_len=8192, top=1).best
    assert settled(replace(found.setup, plan=parse_plan_line(best))).plan == found.setup.plan
    rows = [line for line in shown.splitlines() if line.startswith("│ ") and ("%" in line or "held" in line)]
    assert len(rows) >= len([n for n in found.neighbours if n.ratio is not None])
