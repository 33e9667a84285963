"""What a recorded step sends is what the layout says, call by call and byte by byte, on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardsmith.engine.dataset.batches import Synthetic, batches_of
from shardsmith.engine.train.step import Trainer
from shardsmith.layout.axes.data import buckets
from shardsmith.layout.collectives import collectives
from shardsmith.layout.shards import local_shards
from shardsmith.plan.file import make_setup
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Optimisation

pytestmark = pytest.mark.ranks

Counts = dict[tuple[str, str, str], tuple[int, int]]

SEQ_LEN, HIDDEN = 12, 24


def setup(line: str, model: str = "tiny-llama", dtype: str = "float32", **changes: object) -> Setup:
    found = make_setup(plan=line, model=model, seq_len=SEQ_LEN, dtype=dtype)
    sizes = {"layers": 4, "hidden": HIDDEN, "heads": 4, "kv_heads": 4, "head_dim": 6, "ffn": 24, "vocab": 29}
    return replace(found, model=found.model.with_(**(sizes | changes)))


def recorded(found: Setup) -> Counts:
    """Counts and bytes of this rank's second step: in the first, headers go ahead of messages."""
    trainer = Trainer(found, Optimisation(), rank=dist.get_rank(), seed=0, device=torch.device("cpu"))
    source = Synthetic(seed=0, vocab=found.model.vocab, seq_len=found.workload.seq_len, ignored=0.5)
    batches = batches_of(source, seed=0, setup=trainer.setup)
    trainer.step(batches.batch(0, trainer.data_index))
    trainer.recorder.counting = True
    trainer.step(batches.batch(1, trainer.data_index))
    return {tuple(traffic): (tally.count, tally.bytes) for traffic, tally in trainer.recorder.tallies.items()}


def stated(found: Setup, rank: int) -> Counts:
    return {(c.axis, c.kind, c.purpose): (c.count, c.bytes) for c in collectives(found, rank)}


@pytest.mark.parametrize(
    ("line", "model", "dtype", "changes"),
    [
        ("microbatches=2", "tiny-llama", "float32", {}),
        ("tensor=2,microbatch=2,microbatches=3", "tiny-llama", "float32", {}),
        ("tensor=2,microbatch=2,microbatches=3,sequence_parallel=true", "tiny-llama", "float32", {}),
        ("tensor=4,microbatches=2", "tiny-gpt", "float64", {}),
        ("tensor=2,microbatch=2,microbatches=2,overlap=half_microbatches", "tiny-llama", "float32", {}),
        (
            "tensor=2,microbatch=2,overlap=half_microbatches+weight_gradient,sequence_parallel=true",
            "tiny-gpt",
            "float32",
            {},
        ),
        ("tensor=2,microbatches=2,overlap=chunks", "tiny-llama", "float32", {}),
        ("tensor=2,microbatches=2,overlap=chunks+weight_gradient,sequence_parallel=true", "tiny-gpt", "float32", {}),
        ("tensor=2,microbatches=2,overlap=chunks,sequence_parallel=true,recompute=full", "tiny-llama", "float32", {}),
        ("tensor=2,microbatch=2,overlap=half_microbatches,recompute=full", "tiny-llama", "float32", {}),
        ("tensor=4,microbatches=2,sequence_parallel=true", "tiny-gpt", "float64", {"vocab": 5}),
        ("pipeline=2,microbatch=2,microbatches=3", "tiny-llama", "float32", {}),
        ("pipeline=4,microbatches=4", "tiny-llama", "float32", {}),
        ("pipeline=4,microbatches=2", "tiny-gpt", "float64", {}),
        ("pipeline=2,schedule=gpipe,microbatches=3", "tiny-gpt", "float32", {}),
        ("pipeline=4,layers=0+2+2+0,microbatches=2", "tiny-llama", "float32", {}),
        ("data=2,microbatches=2", "tiny-llama", "float32", {}),
        ("data=3,microbatches=2,bucket_mb=0.001", "tiny-llama", "float64", {}),
        ("data=2,pipeline=2,microbatches=2,bucket_mb=0.001", "tiny-gpt", "float32", {}),
        ("pipeline=2,schedule=interleaved,stages_per_rank=2,microbatches=4", "tiny-llama", "float32", {}),
        ("pipeline=2,schedule=interleaved,stages_per_rank=3,microbatches=3", "tiny-gpt", "float32", {"layers": 6}),
        ("data=2,schedule=interleaved,stages_per_rank=2,microbatches=2", "tiny-gpt", "float32", {}),
        ("data=2,tensor=2,pipeline=2,microbatches=3", "tiny-llama", "float32", {}),
        ("data=2,tensor=2,pipeline=2,microbatches=3,sequence_parallel=true", "tiny-gpt", "float64", {}),
        ("tensor=2,pipeline=2,microbatches=2", "tiny-llama", "float32", {"qk_norm": True}),
        ("tensor=2,microbatches=2,sequence_parallel=true", "tiny-llama", "float32", {"qk_norm": True}),
        ("data=2,tensor=4,replicate_kv=true,microbatches=2,bucket_mb=0.001", "tiny-llama", "float32", {"kv_heads": 2}),
        ("tensor=4,replicate_kv=true,microbatches=2", "tiny-llama", "float64", {"kv_heads": 1, "attention_bias": True}),
    ],
)
def test_a_step_sends_what_the_layout_says(run_ranks, line, model, dtype, changes):
    found = setup(line, model, dtype, **changes)
    ranks = run_ranks(found.plan.world, recorded, found)
    for rank, counts in enumerate(ranks):
        assert counts == stated(found, rank), f"rank {rank}"
    assert (ranks[0] == {}) == (found.plan.world == 1)


LAYERS, MICROBATCHES, MICROBATCH = 4, 3, 2
ACTIVATION = MICROBATCH * SEQ_LEN * HIDDEN * 4
TOKENS = MICROBATCH * SEQ_LEN * 4


def test_m5_two_sums_a_layer_forward_and_two_backward(run_ranks):
    found = setup("tensor=2,microbatch=2,microbatches=3")
    per_layer = LAYERS * MICROBATCHES
    for counts in run_ranks(2, recorded, found):
        assert counts == {
            ("tensor", "all_reduce", "layer_forward"): (2 * per_layer, 2 * per_layer * ACTIVATION),
            ("tensor", "all_reduce", "layer_backward"): (2 * per_layer, 2 * per_layer * ACTIVATION),
            ("tensor", "all_reduce", "embedding_forward"): (MICROBATCHES, MICROBATCHES * ACTIVATION),
            ("tensor", "all_reduce", "head_backward"): (MICROBATCHES, MICROBATCHES * ACTIVATION),
            ("tensor", "all_reduce", "loss_max"): (MICROBATCHES, MICROBATCHES * TOKENS),
            ("tensor", "all_reduce", "loss_sums"): (MICROBATCHES, MICROBATCHES * 2 * TOKENS),
            ("data", "all_reduce", "step_summary"): (1, 4 * 8),
        }


def test_m5_sequence_parallel_gathers_twice_forward_and_four_times_backward(run_ranks):
    found = setup("tensor=2,microbatch=2,microbatches=3,sequence_parallel=true")
    per_layer = LAYERS * MICROBATCHES
    norms = (2 * LAYERS + 1) * HIDDEN * 4
    for counts in run_ranks(2, recorded, found):
        assert counts == {
            ("tensor", "all_gather", "layer_forward"): (2 * per_layer, 2 * per_layer * ACTIVATION),
            ("tensor", "reduce_scatter", "layer_forward"): (2 * per_layer, 2 * per_layer * ACTIVATION),
            ("tensor", "all_gather", "layer_backward"): (4 * per_layer, 4 * per_layer * ACTIVATION),
            ("tensor", "reduce_scatter", "layer_backward"): (2 * per_layer, 2 * per_layer * ACTIVATION),
            ("tensor", "reduce_scatter", "embedding_forward"): (MICROBATCHES, MICROBATCHES * ACTIVATION),
            ("tensor", "all_gather", "embedding_backward"): (MICROBATCHES, MICROBATCHES * ACTIVATION),
            ("tensor", "all_gather", "head_forward"): (MICROBATCHES, MICROBATCHES * ACTIVATION),
            ("tensor", "reduce_scatter", "head_backward"): (MICROBATCHES, MICROBATCHES * ACTIVATION),
            ("tensor", "all_gather", "head_backward"): (MICROBATCHES, MICROBATCHES * ACTIVATION),
            ("tensor", "all_reduce", "loss_max"): (MICROBATCHES, MICROBATCHES * TOKENS),
            ("tensor", "all_reduce", "loss_sums"): (MICROBATCHES, MICROBATCHES * 2 * TOKENS),
            ("tensor", "all_reduce", "partial_gradients"): (1, norms),
            ("data", "all_reduce", "step_summary"): (1, 4 * 8),
        }


def test_m2_each_bucket_is_one_call(run_ranks):
    found = setup("data=2,microbatches=2,bucket_mb=0.01")
    held = [(h.weight.name, 4 * h.shard.numel) for h in local_shards(found, 0)]
    filled = buckets(held, 0.01 * 2**20)
    assert len(filled) > 2
    for counts in run_ranks(2, recorded, found):
        assert counts["data", "all_reduce", "gradients"] == (len(filled), sum(size for _, size in held))
