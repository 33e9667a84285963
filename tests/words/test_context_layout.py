"""What the context axis holds, sends and forbids, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardsmith.errors import Fault
from shardsmith.layout.axes.context import heads_of, key_value_bytes, places, ring_buffer_bytes
from shardsmith.layout.check import check
from shardsmith.layout.collectives import collectives
from shardsmith.layout.shards import data_shard, local_shards
from shardsmith.plan.file import make_setup
from shardsmith.plan.mesh import mesh_of
from shardsmith.plan.setup import Setup
from shardsmith.plan.shrink import shrink

Counts = dict[tuple[str, str, str], tuple[int, int]]

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 3, 48, 8, 4, 6
SEQ_LEN, MICROBATCH, MICROBATCHES = 24, 2, 5


def setup(line: str, *, seq_len: int = SEQ_LEN, dtype: str = "bfloat16", **changes: object) -> Setup:
    line = f"{line},microbatch={MICROBATCH},microbatches={MICROBATCHES}"
    found = make_setup(plan=line, model="tiny-llama", seq_len=seq_len, dtype=dtype)
    sizes = {
        "layers": LAYERS,
        "hidden": HIDDEN,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "ffn": 96,
        "vocab": 64,
    }
    return replace(found, model=found.model.with_(**(sizes | changes)))


def faults(found: Setup) -> list[Fault]:
    return [f for f in check(found) if f.code.startswith("C2") or f.code == "T206"]


def sent(found: Setup, rank: int = 0) -> Counts:
    every = collectives(found, rank)
    return {(c.axis, c.kind, c.purpose): (c.count, c.bytes) for c in every if c.axis == "context"}


@pytest.mark.parametrize("context", [1, 2, 3, 4, 8])
def test_ranks_hold_every_place_once_and_equally_many_pairs(context: int) -> None:
    held = [[p for part in places(48, context, index) for p in part] for index in range(context)]
    assert sorted(p for own in held for p in own) == list(range(48))
    assert all(own == sorted(own) for own in held)
    assert len({sum(p + 1 for p in own) for own in held}) == 1, "a causal query sees its place + 1 keys"


def test_a26_head_and_tail() -> None:
    assert [[*head, *tail] for head, tail in (places(8, 2, index) for index in (0, 1))] == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_neighbours_that_exchange_heads_hold_one_zig_zag_part_together() -> None:
    """With context = ring x ulysses the places of each ulysses group are those of its ring rank, so both combine."""
    for ring, ulysses in ((2, 2), (3, 2), (2, 4)):
        for r in range(ring):
            together = [places(96, ring * ulysses, r * ulysses + u) for u in range(ulysses)]
            heads, tails = places(96, ring, r)
            assert [p for head, _ in together for p in head] == list(heads)
            assert [p for _, tail in reversed(together) for p in tail] == list(tails)


KEYS = MICROBATCH * SEQ_LEN * HEAD_DIM * KV_HEADS
"""Elements of the keys of one microbatch and layer on all ranks together."""

PER_STEP = LAYERS * MICROBATCHES


@pytest.mark.parametrize("context", [2, 3, 4])
@pytest.mark.parametrize(("dtype", "width", "wide"), [("bfloat16", 2, 4), ("float32", 4, 4), ("float64", 8, 8)])
def test_a_ring_passes_keys_and_values_on_and_their_gradients_wide(
    context: int, dtype: str, width: int, wide: int
) -> None:
    found = setup(f"context={context}", dtype=dtype)
    part = 2 * KEYS // context
    count = PER_STEP * (context - 1)
    for rank in range(context):
        expected = {
            ("context", kind, purpose): (count, count * part * size)
            for kind in ("send", "receive")
            for purpose, size in (
                ("keys_values_forward", width),
                ("keys_values_backward", width),
                ("keys_values_gradients", wide),
            )
        }
        assert sent(found, rank) == expected
    assert key_value_bytes(found) == part * width
    assert ring_buffer_bytes(found) == 2 * part * width + 4 * part * wide


def test_ulysses_exchanges_heads_for_sequence() -> None:
    found = setup("context=2,ulysses=2")
    rows = MICROBATCH * SEQ_LEN // 2
    queries, keys = rows * HEADS * HEAD_DIM * 2, rows * KV_HEADS * HEAD_DIM * 2
    both = (2 * PER_STEP, PER_STEP * (queries + 2 * keys + queries))
    assert sent(found) == {
        ("context", "all_to_all", "heads_forward"): both,
        ("context", "all_to_all", "heads_backward"): both,
    }
    assert ring_buffer_bytes(found) == 0


def test_few_key_value_heads_are_sent_to_several_ulysses_ranks() -> None:
    found = setup("context=4,ulysses=4,tensor=2", kv_heads=2)
    assert vars(heads_of(found.plan, found.model)) == {"query": 4, "key_value": 1, "sent": 4}
    rows = MICROBATCH * SEQ_LEN // 4
    each = PER_STEP * rows * HEAD_DIM * 2 * (4 + 2 * 4 + 4)
    assert sent(found)["context", "all_to_all", "heads_forward"] == (2 * PER_STEP, each)


def test_both_together_and_a_layer_recomputed() -> None:
    found = setup("context=4,ulysses=2,recompute=full", dtype="float32")
    rows = MICROBATCH * SEQ_LEN // 4
    message = 2 * rows * KV_HEADS * HEAD_DIM * 4
    exchanged = rows * HEAD_DIM * 4 * (2 * HEADS + 2 * KV_HEADS)
    expected = {
        ("context", "all_to_all", "heads_forward"): (4 * PER_STEP, 2 * PER_STEP * exchanged),
        ("context", "all_to_all", "heads_backward"): (2 * PER_STEP, PER_STEP * exchanged),
    }
    for kind in ("send", "receive"):
        expected["context", kind, "keys_values_forward"] = (2 * PER_STEP, 2 * PER_STEP * message)
        for purpose in ("keys_values_backward", "keys_values_gradients"):
            expected["context", kind, purpose] = (PER_STEP, PER_STEP * message)
    assert sent(found) == expected


def test_other_axes_send_1_over_context_as_much() -> None:
    def bytes_of(line: str, axis: str) -> int:
        of_layers = (c for c in collectives(setup(line), 0) if c.axis == axis and c.purpose != "partial_gradients")
        return sum(c.bytes for c in of_layers)

    for line, axis in (
        ("tensor=2", "tensor"),
        ("tensor=2,sequence_parallel=true", "tensor"),
        ("pipeline=3", "pipeline"),
    ):
        assert bytes_of(f"{line},context=4", axis) * 4 == bytes_of(line, axis) > 0


def test_a04_only_data_ranks_count_tokens() -> None:
    purposes = {c.purpose for c in collectives(setup("context=4"), 0) if c.axis == "data"}
    assert purposes == {"gradients", "step_summary"}


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_zero_shards_over_data_shard_and_context(zero: int) -> None:
    found = setup(f"data=4,replicate=2,context=2,zero={zero}")
    rows = {}
    for rank in range(8):
        coord = mesh_of(found.plan).coord(rank)
        (table,) = [h for h in local_shards(found, rank) if h.weight.name == "embedding.weight"]
        kept = data_shard(table.shard, found.plan, coord)
        rows[coord.replicate, coord.shard, coord.context] = (kept.offsets[0], kept.shape[0])
    for (_, shard, context), place in rows.items():
        assert place == ((0, 64) if zero == 0 else ((2 * shard + context) * 16, 16))


@pytest.mark.parametrize(
    ("line", "changes", "code", "hint"),
    [
        ("ulysses=2", {}, "C201", "ulysses = one of 1"),
        ("context=4,ulysses=3", {}, "C201", "ulysses = one of 1, 2, 4"),
        ("context=6,ulysses=3", {}, "C203", "ulysses = one of 1, 2"),
        ("context=2,ulysses=2,tensor=8", {"kv_heads": 8}, "C203", "ulysses = one of 1"),
        ("context=4,ulysses=4", {"kv_heads": 6, "heads": 12}, "C204", "ulysses = one of 1, 2"),
        ("context=5", {}, "C202", "seq_len = 20 or 30 (shorter documents pack into it), or context = 4"),
        ("context=2,tensor=8,sequence_parallel=true", {"kv_heads": 8}, "T206", "seq_len = 16 or 32"),
    ],
)
def test_what_the_context_axis_forbids(line: str, changes: dict[str, object], code: str, hint: str) -> None:
    (fault,) = faults(setup(line, **changes))
    assert fault.code == code
    assert hint in fault.hint
    assert fault.because
    assert fault.values


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 6, 7])
def test_f12_a_length_that_would_lose_a_token_is_refused_by_name(seq_len: int) -> None:
    (fault,) = faults(setup("context=2", seq_len=seq_len))
    assert (fault.code, fault.severity) == ("C202", "error")
    assert f"2 x context = 4 does not divide seq_len = {seq_len}" in fault.message
    assert f"seq_len = {'4 or 8' if seq_len > 4 else '4'}" in fault.hint


@settings(deadline=None, max_examples=100)
@given(
    context=st.integers(1, 12),
    ulysses=st.integers(1, 6),
    tensor=st.sampled_from((1, 2, 4)),
    heads=st.sampled_from((4, 8, 12)),
    group=st.sampled_from((1, 2, 4)),
    seq_len=st.integers(1, 200),
    sequence_parallel=st.booleans(),
)
def test_the_rules_allow_exactly_what_can_be_cut(
    context: int, ulysses: int, tensor: int, heads: int, group: int, seq_len: int, sequence_parallel: bool
) -> None:
    line = f"context={context},ulysses={ulysses},tensor={tensor},sequence_parallel={str(sequence_parallel).lower()}"
    found = setup(line, seq_len=seq_len, heads=heads, kv_heads=heads // group)
    if heads // group % tensor:
        return
    query, key_value = heads // tensor, heads // group // tensor
    dealt = query % ulysses == 0 and (key_value % ulysses == 0 or ulysses % key_value == 0)
    parts = lcm(2 if context > 1 else 1, tensor if sequence_parallel else 1) * context
    legal = context % ulysses == 0 and dealt and seq_len % parts == 0
    assert (not faults(found)) is legal


@pytest.mark.parametrize(
    ("line", "context", "ulysses"),
    [("context=8", 2, 1), ("context=8,ulysses=8", 2, 2), ("context=16,ulysses=4", 4, 2), ("context=9,ulysses=3", 9, 3)],
)
def test_a_shrunk_context_keeps_ring_and_ulysses(line: str, context: int, ulysses: int) -> None:
    for model in ({"heads": 32, "kv_heads": 8}, {"heads": 24, "kv_heads": 1}, {"heads": 24, "kv_heads": 24}):
        small = shrink(setup(f"tensor=1,{line}", seq_len=288, **model))
        assert (small.plan.context, small.plan.ulysses) == (context, ulysses)
        assert not faults(small), model
