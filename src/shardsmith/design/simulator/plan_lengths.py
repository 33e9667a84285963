"""How long everything in a plan's step takes, by the cost model: the lengths that a simulation starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.collectives import Group, all_reduce, one_way, reach
from shardsmith.design.cost.experts import exchange, expert_weights
from shardsmith.design.cost.kernels import layer, layer_weights
from shardsmith.design.cost.layouts import batch_of, layouts_of
from shardsmith.design.cost.pipeline import hop
from shardsmith.design.cost.step import (
    Pass,
    expert_group,
    gather_layer,
    gradient_group,
    jitter,
    one_pass,
    optimizer,
    replica_group,
    ring_time,
    shard_group,
    tensor_backward,
    tensor_time,
)
from shardsmith.design.cost.subject import Subject
from shardsmith.design.simulator.lengths import StageLengths, StepLengths
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import Stage, stages
from shardsmith.timeline import LaneKind
from shardsmith.units import MIB

MOST_BUCKETS = 8
"""Buckets of a stage that are simulated one by one. More of them would end at the same moments within 1/8 of one
reduction, and a 405B model has hundreds."""


@dataclass(frozen=True, kw_only=True)
class _Model:
    """The cost model's figures of one plan: the whole model's `b`, and one layer of each kind (dense, sparse)."""

    setup: Setup
    b: Batch
    constants: Mapping[str, float]
    one: Pass
    inside: Mapping[LaneKind, tuple[Array, Array]]
    gather: Array
    weights: Array
    routed: Array
    jitter: float


def plan_lengths(s: Subject, setup: Setup, slow: Mapping[int, float] | None = None) -> StepLengths:
    """Lengths of every stage of a legal plan of subject `s`; `slow` multiplies the compute of pipeline ranks."""
    plan = setup.plan
    b = batch_of(s, layouts_of([plan], setup.model, setup.workload), precision(plan, setup.workload))
    both = b.select(np.zeros(2, dtype=np.intp))
    kinds = replace(both, moe_layers=np.array([0.0, 1.0]) * s.model.layers)
    c, moe = s.constants, np.array([0.0, 1.0])
    dispatched = moe * kinds.halves * 2.0 * exchange(kinds, c) * (1.0 - kinds.overlap_expert)
    tensor = tensor_time(kinds, c)
    compute = layer(kinds, c)
    ring = ring_time(kinds, c, compute)
    found = _Model(
        setup=setup,
        b=b,
        constants=c,
        one=one_pass(kinds, c),
        inside={
            "tensor": (kinds.halves * 2.0 * tensor, kinds.halves * tensor_backward(kinds, c, compute, tensor)),
            "context": (kinds.halves * ring[0], kinds.halves * ring[1]),
            "expert": (dispatched, dispatched),
        },
        gather=gather_layer(kinds, c, kinds.gather_bytes),
        weights=layer_weights(kinds) / kinds.tensor,
        routed=moe * expert_weights(kinds) / kinds.expert / kinds.expert_tensor,
        jitter=float(jitter(b, c)[0]),
    )
    every = tuple(_stage(found, stage) for stage in stages(plan, setup.model))
    return StepLengths(stages=every, slow=slow or {}, end=_end(found) * found.jitter)


def _stage(f: _Model, stage: Stage) -> StageLengths:
    model, b, one, jitter = f.setup.model, f.b, f.one, f.jitter
    sparse = sum(model.is_sparse(at) for at in stage.layers)
    count = np.array([len(stage.layers) - sparse, sparse], dtype=np.float64)
    # The head is three products of equal size: forward, input gradient, weight gradient. What an embedding costs
    # in forward it costs twice in backward, and all of that for its weights.
    ends, table = one.head[0] / 3.0 * stage.head, one.embedding[0] / 3.0 * stage.embedding
    matrices = stage.embedding + stage.head - (stage.embedding and stage.head and model.tied)
    ends_held = matrices * b.vocab * b.hidden / b.tensor
    weights = float(count @ f.weights) + float(ends_held[0])
    routed = float(count @ f.routed)
    inside: dict[LaneKind, tuple[float, float]] = {
        lane: (float(count @ first) * jitter, float(count @ second) * jitter)
        for lane, (first, second) in f.inside.items()
        if float(count @ first) > 0
    }
    gather = 0.0
    if f.setup.plan.zero == 3:
        gather = float(count @ f.gather) + float(one_way(b, f.constants, shard_group(b), b.gather_bytes * ends_held)[0])
    overlap = b.overlap_shard if f.setup.plan.zero > 1 else b.overlap_data
    return StageLengths(
        forward=float(count @ one.forward + ends + table) * jitter,
        input_grad=float(count @ (one.backward - one.weight) + ends) * jitter,
        weight_grad=float(count @ one.weight + ends + 2.0 * table) * jitter,
        inside=inside,
        transfer=float(hop(b, f.constants)[0]) * jitter,
        blocking=1.0 - float(b.overlap_pipeline[0]),
        reduce=_reduce(f, weights, routed) * jitter,
        buckets=_buckets(f.setup, (weights + routed) * float(b.reduce_bytes[0])) if float(overlap[0]) > 0 else 1,
        gather=gather * jitter,
        alongside=float(b.overlap_shard[0]),
    )


def _reduce(f: _Model, weights: float, routed: float) -> float:
    """Seconds to sum a stage's gradients: over shards and replicas, experts over the ranks that hold the same."""
    b, c = f.b, f.constants
    sharded, calls = f.setup.plan.zero > 0, c["data_calls"]
    moved = one_way(b, c, shard_group(b) if sharded else gradient_group(b), weights * b.reduce_bytes, calls)
    if sharded:
        moved += all_reduce(b, c, replica_group(b), weights / b.shard * b.reduce_bytes, calls)
    moved += one_way(b, c, expert_group(b, b.data * b.context), routed * b.reduce_bytes, calls)
    return float(moved[0])


def _buckets(setup: Setup, size: float) -> int:
    return max(1, min(MOST_BUCKETS, ceil(size / (setup.plan.bucket_mb * MIB))))


def _end(f: _Model) -> float:
    """Update, what of gathering the updated weights is not hidden, and the sum of a tied embedding's copies."""
    b, c, plan = f.b, f.constants, f.setup.plan
    seconds = optimizer(b, c)
    if 0 < plan.zero < 3:
        held = (b.layers / b.pipeline * layer_weights(b) + b.vocab * b.hidden) / b.tensor
        routed = b.moe_layers / b.pipeline * expert_weights(b) / b.expert / b.expert_tensor
        gather = one_way(b, c, shard_group(b), held * b.gather_bytes, c["data_calls"])
        gather += one_way(b, c, expert_group(b, b.data * b.context), routed * b.gather_bytes, c["data_calls"])
        seconds = seconds + gather * (1.0 - b.overlap_data)
    if plan.pipeline > 1 and f.setup.model.tied:
        r = reach(b, c, Group(members=np.array([2.0]), stride=b.pipeline_stride))
        seconds = seconds + b.vocab * b.hidden / b.tensor * b.reduce_bytes / r.bandwidth
    return float(seconds[0])
