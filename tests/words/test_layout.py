"""What each rank holds and sends: shards, states, buckets, collectives."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardsmith.layout.axes.data import buckets, shard_index, states
from shardsmith.layout.axes.tensor import chunk, legal_tensor_degrees
from shardsmith.layout.collectives import collectives, ring_bytes
from shardsmith.layout.shards import local_shards, shard, stage_states, stage_weights
from shardsmith.plan.file import make_setup
from shardsmith.plan.mesh import AXES, Coord, mesh_of
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.plan.shrink import shrink
from shardsmith.plan.stages import stages
from shardsmith.specs.library import model_named
from shardsmith.specs.model import parameter_count, weights

HERE = Coord(pipeline=0, replicate=0, shard=0, context=0, tensor=0)


def setup(line: str, model: str = "tiny-llama", **changes: object) -> Setup:
    base = make_setup(plan=line, model=model, seq_len=64)
    spec = base.model.with_(**changes)
    return Setup(model=spec, workload=base.workload, cluster=base.cluster, plan=base.plan)


def counts(found: Setup, rank: int) -> dict[tuple[str, str, str], tuple[int, int]]:
    return {(c.axis, c.kind, c.purpose): (c.count, c.bytes) for c in collectives(found, rank)}


@settings(deadline=None, max_examples=30)
@given(
    tensor=st.sampled_from((1, 2, 4)),
    pipeline=st.integers(1, 4),
    data=st.integers(1, 2),
    vocab=st.integers(1, 40),
    model=st.sampled_from(("tiny-llama", "tiny-gpt")),
)
def test_ranks_hold_every_element_once_per_replica(
    tensor: int, pipeline: int, data: int, vocab: int, model: str
) -> None:
    found = setup(f"tensor={tensor},pipeline={pipeline},data={data}", model, vocab=vocab)
    held = {w.name: np.zeros(w.shape, dtype=int) for w in weights(found.model)}
    dims = {}
    for rank in range(found.plan.world):
        for h in local_shards(found, rank):
            held[h.weight.name][h.shard.slices] += 1
            dims[h.weight.name] = h.shard.tensor_dim
    for name, times in held.items():
        copies = 2 if found.model.tied and pipeline > 1 and name == "embedding.weight" else 1
        replicas = data * copies * (tensor if dims[name] is None else 1)
        assert (times == replicas).all(), name


@given(size=st.integers(0, 300), parts=st.integers(1, 20))
def test_chunks_are_contiguous_and_complete(size: int, parts: int) -> None:
    pieces = [chunk(size, parts, index) for index in range(parts)]
    assert [i for at, length in pieces for i in range(at, at + length)] == list(range(size))
    assert all(length <= -(-size // parts) for _, length in pieces)


def test_a_vocabulary_smaller_than_its_chunks_leaves_the_last_ranks_empty() -> None:
    assert [chunk(5, 4, index) for index in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 0)]
    assert [chunk(10, 4, index)[1] for index in range(4)] == [3, 3, 3, 1]


def test_roles_decide_the_dim_and_what_is_partial() -> None:
    for sequence_parallel in (False, True):
        found = setup(f"tensor=2,sequence_parallel={str(sequence_parallel).lower()}", "tiny-gpt")
        dims, partial = {}, set()
        for h in local_shards(found, 1):
            short = h.weight.name.removeprefix("layers.0.")
            dims[short] = h.shard.tensor_dim
            partial |= {short} if h.shard.partial_over_tensor else set()
        assert {n for n, d in dims.items() if d == 1 and "." in n and "layers" not in n} == {
            "attention.o.weight",
            "mlp.down.weight",
        }
        assert all(dims[f"attention.{r}.{p}"] == 0 for r in "qkv" for p in ("weight", "bias"))
        assert all(dims[f"mlp.up.{p}"] == 0 for p in ("weight", "bias"))
        assert dims["embedding.weight"] == 0
        summed = {n for n in partial if "layers" not in n}
        everywhere = {"position.weight", "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}
        everywhere |= {"attention.o.bias", "mlp.down.bias", "final_norm.weight", "final_norm.bias"}
        assert summed == (everywhere if sequence_parallel else set())
        assert all(dims[name] is None for name in everywhere)


def test_h14_head_size_and_fused_width_per_rank() -> None:
    model = model_named("tiny-llama").with_(hidden=5120, heads=40, kv_heads=8, head_dim=5120 // 40, ffn=8 * 1728)
    plan = make_setup(plan="tensor=8").plan
    qkv = [w for w in weights(model) if w.layer == 0 and w.role in ("q", "k", "v")]
    assert sum(w.shape[0] for w in qkv) == (40 + 16) * 128 == 7168
    assert sum(shard(w, plan, model, HERE).shape[0] for w in qkv) == 896


def test_h16_a_column_parallel_weight_is_halved() -> None:
    model = model_named("tiny-llama")
    up = next(w for w in weights(model) if w.role == "up")
    found = [shard(up, make_setup(plan="tensor=2").plan, model, HERE._replace(tensor=rank)) for rank in range(2)]
    assert [s.shape for s in found] == [(176, 128)] * 2
    assert [s.offsets for s in found] == [(0, 0), (176, 0)]


def test_a_tied_model_holds_its_embedding_on_both_ends() -> None:
    found = setup("pipeline=2", "tiny-gpt")
    first, last = stages(found.plan, found.model)
    assert [w.name for w in stage_weights(found, first)][:2] == ["embedding.weight", "position.weight"]
    assert [w.name for w in stage_weights(found, last)][-2:] == ["final_norm.bias", "embedding.weight"]
    alone = setup("", "tiny-gpt")
    names = [w.name for w in stage_weights(alone, stages(alone.plan, alone.model)[0])]
    assert names == [w.name for w in weights(alone.model)]


def test_h02_legal_tensor_degrees_come_with_reasons() -> None:
    model = model_named("tiny-llama").with_(heads=40, kv_heads=10)
    found = legal_tensor_degrees(model, 8)
    assert found.legal == (1, 2)
    assert found.rejected == {
        4: "4 does not divide 10 key/value heads",
        8: "8 does not divide 10 key/value heads",
    }


def test_c05_zero_divides_by_data_ranks_alone() -> None:
    for zero in range(4):
        alone = setup(f"tensor=8,zero={zero}")
        assert states(alone, 8 * 10**9 // 8).total == 16 * 10**9
    both = {zero: states(setup(f"tensor=4,data=2,zero={zero}"), 8 * 10**9 // 4).total for zero in range(4)}
    assert both == {0: 32 * 10**9, 1: 24 * 10**9, 2: 20 * 10**9, 3: 16 * 10**9}


def test_n1_states_take_16_bytes_a_parameter_and_18_with_wide_gradients() -> None:
    assert states(setup(""), 70 * 10**9).total == 70 * 10**9 * 16
    half = make_setup(plan="", dtype="bfloat16")
    assert states(half, 10).total == 180
    assert states(half.with_plan(grad_dtype="bfloat16"), 10).total == 160
    assert states(make_setup(plan="", dtype="float64"), 10, moments=0).total == 160


def test_states_of_all_stages_add_up_to_the_model() -> None:
    found = setup("pipeline=4")
    assert sum(m.states.weights for m in stage_states(found)) == 4 * parameter_count(found.model)
    assert [m.pipeline_rank for m in stage_states(found)] == [0, 1, 2, 3]


def test_m3_a_ring_sends_2_n_minus_1_over_n_of_the_payload() -> None:
    assert [ring_bytes("all_reduce", 1.0, n) for n in (1, 2, 4, 8)] == [0.0, 1.0, 1.5, 1.75]
    assert ring_bytes("all_gather", 8, 4) == ring_bytes("reduce_scatter", 8, 4) == 6
    assert (ring_bytes("send", 8, 2), ring_bytes("receive", 8, 2)) == (8, 0)


def test_buckets_fill_backwards_and_close_when_full() -> None:
    sizes = [("a", 4), ("b", 6), ("empty", 0), ("c", 3), ("d", 20), ("e", 1)]
    assert buckets(sizes, 10) == (("e", "d"), ("c", "b", "a"))
    assert buckets(sizes, 8) == (("e", "d"), ("c", "b"), ("a",))
    assert buckets([], 8) == ()


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 50), max_size=20), limit=st.floats(0.5, 100))
def test_buckets_hold_each_tensor_once(sizes: list[int], limit: float) -> None:
    by_name = {f"w{at}": size for at, size in enumerate(sizes)}
    found = buckets(list(by_name.items()), limit)
    assert [n for b in found for n in b] == [n for n, size in reversed(by_name.items()) if size]
    assert all(sum(by_name[n] for n in b) >= limit for b in found[:-1])
    assert all(sum(by_name[n] for n in b[:-1]) < limit for b in found)


# 2 stages of 2 layers, 3 microbatches of 2 sequences x 64 tokens, hidden 128, float32
HIDDEN = 2 * 64 * 128 * 4
TOKENS = 2 * 64 * 4


def test_m5_tensor_collectives_of_a_step() -> None:
    found = setup("tensor=2,pipeline=2,microbatch=2,microbatches=3")
    first, last = counts(found, 0), counts(found, 2)
    assert {k: v for k, v in first.items() if k[0] == "tensor"} == {
        ("tensor", "all_reduce", "embedding_forward"): (3, 3 * HIDDEN),
        ("tensor", "all_reduce", "layer_forward"): (3 * 2 * 2, 12 * HIDDEN),
        ("tensor", "all_reduce", "layer_backward"): (3 * 2 * 2, 12 * HIDDEN),
    }
    assert {k: v for k, v in last.items() if k[0] == "tensor"} == {
        ("tensor", "all_reduce", "layer_forward"): (12, 12 * HIDDEN),
        ("tensor", "all_reduce", "layer_backward"): (12, 12 * HIDDEN),
        ("tensor", "all_reduce", "head_backward"): (3, 3 * HIDDEN),
        ("tensor", "all_reduce", "loss_max"): (3, 3 * TOKENS),
        ("tensor", "all_reduce", "loss_sums"): (3, 3 * 2 * TOKENS),
    }


def test_m5_tensor_collectives_under_sequence_parallelism() -> None:
    found = setup("tensor=2,pipeline=2,microbatch=2,microbatches=3,sequence_parallel=true")
    first, last = counts(found, 0), counts(found, 2)
    layers = {
        ("tensor", "all_gather", "layer_forward"): (12, 12 * HIDDEN),
        ("tensor", "reduce_scatter", "layer_forward"): (12, 12 * HIDDEN),
        ("tensor", "all_gather", "layer_backward"): (24, 24 * HIDDEN),
        ("tensor", "reduce_scatter", "layer_backward"): (12, 12 * HIDDEN),
    }
    assert {k: v for k, v in first.items() if k[0] == "tensor"} == layers | {
        ("tensor", "reduce_scatter", "embedding_forward"): (3, 3 * HIDDEN),
        ("tensor", "all_gather", "embedding_backward"): (3, 3 * HIDDEN),
        ("tensor", "all_reduce", "partial_gradients"): (1, 4 * 128 * 4),
    }
    assert {k: v for k, v in last.items() if k[0] == "tensor"} == layers | {
        ("tensor", "all_gather", "head_forward"): (3, 3 * HIDDEN),
        ("tensor", "reduce_scatter", "head_backward"): (3, 3 * HIDDEN),
        ("tensor", "all_gather", "head_backward"): (3, 3 * HIDDEN),
        ("tensor", "all_reduce", "loss_max"): (3, 3 * TOKENS),
        ("tensor", "all_reduce", "loss_sums"): (3, 3 * 2 * TOKENS),
        ("tensor", "all_reduce", "partial_gradients"): (1, 5 * 128 * 4),
    }
    # Messages carry this rank's half of the sequence.
    assert first["pipeline", "send", "activation"] == (3, 3 * HIDDEN // 2)


def test_pipeline_messages_cross_each_border_between_ranks() -> None:
    found = setup("pipeline=2,schedule=interleaved,stages_per_rank=2,microbatch=2,microbatches=4")
    ends = {kind: counts(found, kind) for kind in (0, 1)}
    assert ends[0]["pipeline", "send", "activation"] == (2 * 4, 8 * HIDDEN)
    assert ends[0]["pipeline", "receive", "activation"] == (4, 4 * HIDDEN)
    for kind, other in (("activation", "send"), ("gradient", "receive")):
        assert (
            ends[0]["pipeline", other, kind] == ends[1]["pipeline", "send" if other == "receive" else "receive", kind]
        )
    assert counts(setup("microbatch=2,microbatches=4"), 0) == {}


def test_data_collectives_carry_every_local_parameter_once() -> None:
    found = setup("data=2,pipeline=2,tensor=2,bucket_mb=0.1")
    for rank in range(found.plan.world):
        held = local_shards(found, rank)
        count, size = counts(found, rank)["data", "all_reduce", "gradients"]
        assert size == 4 * sum(h.shard.numel for h in held)
        assert count == len(buckets([(h.weight.name, 4 * h.shard.numel) for h in held], 0.1 * 2**20))
        assert count > 1
    assert counts(setup("data=2,bucket_mb=1000"), 0)["data", "all_reduce", "gradients"][0] == 1
    wide = make_setup(plan="data=2", dtype="float64")
    assert counts(wide, 0)["data", "all_reduce", "gradients"][1] == 8 * parameter_count(wide.model)


def test_tied_copies_are_summed_once_and_bucketed_alone() -> None:
    found = setup("data=2,pipeline=4", "tiny-gpt")
    size = 512 * 128 * 4
    ends = [mesh_of(found.plan).coord(r).pipeline in (0, 3) for r in range(found.plan.world)]
    for rank, end in enumerate(ends):
        here = counts(found, rank)
        assert here.get(("pipeline", "all_reduce", "tied_embedding")) == ((1, size) if end else None)
        assert here["data", "all_reduce", "gradients"][0] == (2 if end else 1)
    untied = setup("data=2,pipeline=4")
    assert all("tied" not in key[2] for rank in range(8) for key in counts(untied, rank))


def test_split_heads_are_an_invariant_of_shards() -> None:
    found = setup("tensor=8")
    k = next(w for w in weights(found.model) if w.role == "k")
    with pytest.raises(AssertionError, match="split heads"):
        shard(k, found.plan, found.model, HERE)


def test_gains_of_head_norms_are_everywhere_and_always_partial() -> None:
    for sequence_parallel in ("false", "true"):
        found = setup(f"tensor=2,sequence_parallel={sequence_parallel}", qk_norm=True)
        held = [h for h in local_shards(found, 1) if h.weight.role == "head_norm"]
        assert len(held) == 2 * found.model.layers
        assert all(h.shard.tensor_dim is None and h.shard.shape == (16,) for h in held)
        assert all(h.shard.partial_over_tensor for h in held)
    assert counts(setup("tensor=2", qk_norm=True), 0)["tensor", "all_reduce", "partial_gradients"] == (1, 8 * 16 * 4)
    assert not any(h.shard.partial_over_tensor for h in local_shards(setup("", qk_norm=True), 0))


def test_a22_copied_heads_are_cut_over_kv_shard_and_held_by_kv_copy() -> None:
    found = setup("tensor=8,replicate_kv=true", heads=8, kv_heads=2)
    keys = {}
    for rank in range(8):
        for h in local_shards(found, rank):
            if h.weight.name == "layers.0.attention.k.weight":
                keys[rank] = (h.shard.offsets[0], h.shard.shape[0], h.shard.copy, h.shard.tensor_dim)
            if h.weight.role in ("q", "o"):
                assert h.shard.copy is None
                assert 16 in h.shard.shape
    assert keys == {rank: (rank // 4 * 16, 16, rank % 4, 0) for rank in range(8)}
    # Key and value of 4 layers: one head of 16 channels from a hidden size of 128, float32.
    assert counts(found, 5)["tensor", "all_reduce", "kv_copies"] == (1, 2 * 4 * 16 * 128 * 4)
    assert counts(setup("tensor=2,replicate_kv=true"), 0).get(("tensor", "all_reduce", "kv_copies")) is None


def test_a_shrunk_setup_keeps_copies_window_and_norms() -> None:
    small = shrink(setup("tensor=8,replicate_kv=true", kv_heads=2, window=32, qk_norm=True))
    assert (small.plan.tensor, small.model.kv_heads, small.model.heads) == (2, 1, 2)
    assert small.model.qk_norm
    assert small.model.window is not None
    assert small.model.window < small.workload.seq_len
    assert shrink(setup("tensor=4")).model.window is None


@pytest.mark.parametrize("order", ["-".join(axes) for axes in permutations(("tensor", "context", "data", "pipeline"))])
def test_a_place_is_the_position_that_torch_gives_in_a_group(order: str) -> None:
    """torch numbers a group by rank, whatever the order in which its ranks are named."""
    mesh = mesh_of(Plan(data=6, replicate=2, tensor=2, pipeline=2, context=2, order=order))
    for rank in range(mesh.world):
        for axes in (*combinations(AXES, 2), ("shard", "context", "tensor"), *((axis,) for axis in AXES)):
            group = mesh.group(rank, *axes)
            assert list(group) == sorted(set(group))
            assert group[mesh.place(mesh.coord(rank), *axes)] == rank


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("order", ["tensor-context-data-pipeline", "data-context-tensor-pipeline"])
def test_zero_deals_rows_in_the_order_of_its_group(order: str, zero: int) -> None:
    plan = Plan(data=2, context=2, zero=zero, order=order)  # type: ignore[arg-type]
    mesh = mesh_of(plan)
    assert [shard_index(plan, mesh.coord(rank)) for rank in range(4)] == ([0, 1, 2, 3] if zero else [0] * 4)
