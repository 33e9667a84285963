"""The expert mesh and what each of its ranks holds, sends and may not be."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from shardsmith.layout.axes.expert import capacity, legal_expert_degrees
from shardsmith.layout.check import check
from shardsmith.layout.collectives import collectives
from shardsmith.layout.shards import data_shard, local_shards, rank_states
from shardsmith.plan.file import make_setup
from shardsmith.plan.mesh import expert_coord, expert_groups, expert_sizes, mesh_of
from shardsmith.plan.setup import Setup
from shardsmith.plan.shrink import shrink
from shardsmith.specs.model import Experts, weights


def setup(line: str, model: str = "tiny-moe", *, seq_len: int = 64, **changes: object) -> Setup:
    base = make_setup(plan=line, model=model, seq_len=seq_len)
    assert base.model.experts is not None, "a model with experts"
    return replace(base, model=base.model.with_(experts=replace(base.model.experts, **changes)))


def codes(found: Setup) -> list[str]:
    return [f.code for f in check(found) if f.severity == "error"]


PLANS = (
    "",
    "tensor=2",
    "expert=2,data=2",
    "expert=2,tensor=2",
    "expert=2,expert_tensor=2,data=2,tensor=2",
    "expert=4,data=2,tensor=2,pipeline=2",
    "expert=2,data=4,replicate=2",
    "expert=2,data=6,replicate=3,tensor=2",
    "expert_tensor=2,data=2",
    "expert=2,data=4,tensor=2,order=data-tensor-pipeline-context",
)


@pytest.mark.parametrize(("line", "zero"), list(product(PLANS, (0, 1, 3))))
def test_every_element_is_held_once_per_replica_and_kept_once_under_zero(line: str, zero: int) -> None:
    found = setup(f"{line},zero={zero}" if line else f"zero={zero}")
    assert codes(found) == []
    plan, mesh = found.plan, mesh_of(found.plan)
    held = {w.name: np.zeros(w.shape, dtype=int) for w in weights(found.model)}
    kept = {w.name: np.zeros(w.shape, dtype=int) for w in weights(found.model)}
    for rank in range(plan.world):
        for h in local_shards(found, rank):
            held[h.weight.name][h.shard.slices] += 1
            kept[h.weight.name][data_shard(h.shard, plan, mesh.coord(rank)).slices] += 1
    sizes = expert_sizes(plan)
    replicas = sizes.replicate * sizes.shard
    for weight in weights(found.model):
        if weight.role.startswith("expert_"):
            assert (held[weight.name] == replicas).all(), weight.name
            assert (kept[weight.name] == (plan.replicate if zero else replicas)).all(), weight.name


@pytest.mark.parametrize("line", PLANS)
def test_expert_groups_partition_each_pipeline_rank(line: str) -> None:
    plan = make_setup(plan=line).plan
    mesh = mesh_of(plan)
    places = [(mesh.coord(r).pipeline, *expert_coord(plan, mesh.coord(r))) for r in range(plan.world)]
    assert len(set(places)) == plan.world
    for axes in (("expert", "tensor"), ("shard",), ("replicate", "shard"), ("replicate",)):
        groups = expert_groups(plan, *axes)
        assert sorted(r for group in groups for r in group) == list(range(plan.world))
        assert {len(g) for g in groups} == {int(np.prod([getattr(expert_sizes(plan), a) for a in axes]))}
        assert all(len({mesh.coord(r).pipeline for r in group}) == 1 for group in groups)


def test_neighbours_hold_parts_of_one_expert_then_other_experts() -> None:
    plan = make_setup(plan="data=4,tensor=2,expert=2,expert_tensor=2").plan
    mesh = mesh_of(plan)
    found = [expert_coord(plan, mesh.coord(rank))[1:] for rank in range(plan.world)]
    assert found == [(s, e, t) for s in range(2) for e in range(2) for t in range(2)]


def test_h03_degrees_that_do_not_divide_are_refused() -> None:
    assert codes(setup("data=2,tensor=2,expert=3", count=6)) == ["E103"]
    assert codes(setup("data=2,tensor=2,expert=4", count=6)) == ["E102"]
    good = setup("data=2,tensor=2,expert=2", count=6)
    assert codes(good) == []
    assert {h.shard.shape[0] for h in local_shards(good, 0) if h.shard.expert} == {3}
    assert codes(setup("data=4,replicate=4,expert=2")) == ["E103"]
    assert codes(setup("data=2,tensor=5,expert_tensor=5"))[-1:] == ["E105"]
    assert "E104" in codes(setup("data=5,expert_tensor=5"))
    assert codes(setup("capacity_factor=0.0")) == ["E106"]


def test_a_hint_lists_the_legal_degrees() -> None:
    found = setup("data=3,tensor=2,expert=4", count=6)
    assert legal_expert_degrees(found.plan, found.model) == (1, 2, 3, 6)
    (fault,) = [f for f in check(found) if f.code == "E102"]
    assert fault.hint == "expert = 1 or 2 or 3 or 6"


@pytest.mark.parametrize("key", ["expert=2,data=2", "expert_tensor=2,data=2", "capacity_factor=1.5"])
def test_a_dense_model_refuses_expert_settings(key: str) -> None:
    found = make_setup(plan=key, model="tiny-llama")
    assert [f.code for f in check(found) if f.severity == "error"] == ["E101"]


def test_g01_experts_are_divided_by_expert_and_expert_tensor_not_by_tensor() -> None:
    for line, parts in (("tensor=2,data=4,expert=4", 4), ("tensor=2,data=2,expert=4", 4), ("tensor=2,data=2", 1)):
        found = setup(line)
        routed = sum(h.shard.numel for h in local_shards(found, 0) if h.shard.expert)
        assert routed * parts == sum(w.numel for w in weights(found.model) if w.role.startswith("expert_"))
    shared_out = [rank_states(setup(f"data=8,expert=2,zero={z}"), 0).optimizer for z in (0, 1)]
    assert shared_out[0] > 2.5 * shared_out[1]


def test_capacity_rounds_up_and_never_exceeds_the_sequence() -> None:
    experts = Experts(count=4, top_k=2, ffn=8)
    assert capacity(experts, None, 12) is None
    factors = (0.01, 1.0, 1.25, 8.0, 1e308)
    assert [capacity(experts, factor, 12) for factor in factors] == [1, 6, 8, 12, 12]


def test_calls_of_a_moe_step() -> None:
    found = setup("data=2,tensor=2,expert=2,expert_tensor=2,microbatch=2,microbatches=2,recompute=full")
    found = replace(found, workload=replace(found.workload, global_batch=8))
    counts = {(c.axis, c.kind, c.purpose): (c.count, c.bytes) for c in collectives(found, 0)}
    rows = 2 * 64 // 2 * 2 * 2  # sequences x tokens / tensor x top_k x parts
    passes = 4 * 2  # layers x microbatches
    assert counts["expert", "all_to_all", "dispatch_forward"] == (2 * passes, 2 * passes * rows * 64 * 4)
    assert counts["expert", "all_to_all", "combine_backward"] == (passes, passes * rows * 64 * 4)
    assert counts["expert", "all_to_all", "expert_rows"] == (2 * passes, 2 * passes * 4 * 2 * 8)
    assert counts["expert", "all_reduce", "sequence_counts"] == (2 * passes, 2 * passes * 2 * 4 * 8)
    assert counts["data", "all_reduce", "expert_loads"] == (1, (4 * 4 + 3) * 8)
    alone = {c.axis for c in collectives(setup("data=2"), 0)}
    assert alone == {"data"}


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("deepseek-v3", "pipeline=16,data=32,expert=64,tensor=4,zero=1,schedule=dualpipe_v,microbatches=32"),
        ("mixtral-8x7b", "data=8,expert=8,tensor=2,sequence_parallel=true,zero=3"),
        ("qwen3-235b-a22b", "data=16,expert=16,expert_tensor=2,tensor=4,pipeline=4,context=2"),
        ("qwen1.5-moe-a2.7b", "data=3,tensor=2,expert=6,zero=2"),
        ("deepseek-v2-lite", "data=8,expert=8,capacity_factor=1.25"),
    ],
)
def test_shrinking_keeps_the_kind_of_mixture(model: str, line: str) -> None:
    plan = make_setup(plan=line).plan
    found = make_setup(plan=line, model=model, seq_len=4096, global_batch=plan.data * (plan.microbatches or 2))
    small = shrink(found)
    assert [f for f in check(small, running=True) if f.severity == "error"] == []
    assert small.plan.world <= 16
    assert (small.plan.expert > 1, small.plan.expert_tensor > 1) == (plan.expert > 1, plan.expert_tensor > 1)
    before, after = found.model.experts, small.model.experts
    assert before is not None, "a model with experts"
    assert after is not None, "a model with experts"
    for key in ("score", "normalise", "scale", "shared_gate", "balance", "aux_loss"):
        assert getattr(after, key) == getattr(before, key), key
    for key in ("groups", "shared_ffn", "first_dense"):
        assert (getattr(after, key) > 1 - (key != "groups")) == (getattr(before, key) > 1 - (key != "groups")), key
    assert (small.model.latent is None) == (found.model.latent is None)
    assert any(small.model.is_sparse(layer) for layer in range(small.model.layers))
