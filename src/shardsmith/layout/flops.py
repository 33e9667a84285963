"""FLOPs of one rank in one training step of our own engine, by the same counting as `specs/flops.py`.

2 m k n for a product of (m, k) with (k, n), twice that backward, once more where it is recomputed. What a rank
multiplies follows from its shards: heads that several ranks copy count on each of them. Scores count in full where
the kernel is given a mask, and half where it is told to be causal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardsmith.layout.axes.context import ring, ring_blocks
from shardsmith.layout.axes.tensor import split_backwards
from shardsmith.layout.routing import StatedRouting
from shardsmith.layout.shards import TIED, stage_shards
from shardsmith.plan.batch import batching
from shardsmith.plan.mesh import mesh_of
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import Stage, stages
from shardsmith.specs.model import Role, Weight

if TYPE_CHECKING:
    from shardsmith.layout.key_blocks import Block

WHOLE: tuple[Role, ...] = ("q_down", "kv_down", "shared_gate")
"""Roles of matrices that meet what stands between blocks: under sequence parallelism a part of the sequence."""


def rank_flops(setup: Setup, rank: int, routing: StatedRouting | None = None) -> dict[str, int]:
    """FLOPs of global `rank` in one step of a legal, settled plan: `linear` (matrices) and `scores` (attention).

    Experts multiply the rows that `routing` brings them (balanced unless stated).
    """
    plan, model = setup.plan, setup.model
    coord = mesh_of(plan).coord(rank)
    cut = batching(plan, setup.workload)
    tokens = cut.microbatches * cut.microbatch * setup.workload.seq_len // plan.context
    linear = scores = 0
    passes = 4 if plan.recompute == "full" else 3
    for stage in stages(plan, model):
        if stage.rank != coord.pipeline:
            continue
        for held in stage_shards(setup, stage, coord):
            weight = held.weight
            if weight.layer is not None and len(weight.shape) > 1:
                if held.shard.expert:
                    routing = routing or StatedRouting(setup, rank)
                    rows, met = routing.received(rank) * cut.microbatches, held.shard.numel // held.shard.shape[0]
                else:
                    rows, met = tokens // _share(setup, weight), held.shard.numel
                linear += 2 * met * rows * passes
            elif stage.head and (weight.role == "head" or (weight.name == TIED and model.tied)):
                linear += 2 * held.shard.numel * _head_tokens(setup, stage, tokens)
        scores += len(stage.layers) * passes * _scores(setup, coord.context) * tokens
    return {"linear": linear, "scores": scores}


def _share(setup: Setup, weight: Weight) -> int:
    """Over how many tensor ranks the tokens are shared out that meet `weight`, which every one of them holds."""
    own = weight.role == "router" or (weight.role in WHOLE and setup.plan.sequence_parallel)
    return setup.plan.tensor if own else 1


def _scores(setup: Setup, context: int) -> int:
    """FLOPs of one layer's attention products forward, per token: channels of queries and values times keys met."""
    model, length = setup.model, setup.workload.seq_len
    channels = (model.heads // setup.plan.tensor) * 2 * model.head_dim
    if setup.plan.context > 1:
        rows = setup.workload.seq_len // ring(setup.plan)
        return sum(_pairs(block) for blocks in ring_blocks(setup, context) for block in blocks) * channels // rows
    masked = (model.window is not None and model.window < length) or model.attention_dropout > 0
    return (2 if masked else 1) * length * channels


def _pairs(block: Block) -> int:
    """Twice the pairs of queries and keys that a kernel is given, causal ones once."""
    pairs = (block.rows.stop - block.rows.start) * (block.keys.stop - block.keys.start)
    return int(pairs if block.kind == "causal" else 2 * pairs)


def _head_tokens(setup: Setup, stage: Stage, tokens: int) -> int:
    """Tokens that meet the head, each as often as it does: 3 times, and for each time that logits are made again."""
    if setup.plan.loss_chunk is None:
        return 3 * tokens
    each = tokens // batching(setup.plan, setup.workload).microbatches
    return 4 * tokens + split_backwards(setup, stage) * each
