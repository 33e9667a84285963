"""How long everything in a plan's step takes, by the cost model: the lengths that a simulation starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.collectives import one_way, reach
from shardsmith.design.cost.constants import values
from shardsmith.design.cost.experts import expert_weights, experts
from shardsmith.design.cost.kernels import Constants, accumulation, embedding, head, layer, layer_weights
from shardsmith.design.cost.pipeline import hop
from shardsmith.design.cost.plans import batch_of
from shardsmith.design.cost.step import data_distance, layer_pass, optimizer, ring_time, tensor_time
from shardsmith.design.simulator.lengths import StageLengths, StepLengths
from shardsmith.design.targets import Target
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import Stage, stages
from shardsmith.timeline import LaneKind
from shardsmith.units import MIB

MOST_BUCKETS = 8
"""Buckets of a stage that are simulated one by one. More of them would end at the same moments within 1/8 of one
reduction, and a 405B model has hundreds."""
DENSE, SPARSE = 0, 1
"""Rows of a batch of layer kinds: a layer with an MLP, and one with experts."""


@dataclass(frozen=True, kw_only=True)
class _Layers:
    """Seconds of one layer and microbatch, by kind of layer (DENSE, SPARSE), and its parameters on a rank."""

    forward: Array
    input_grad: Array
    weight_grad: Array
    inside: Mapping[LaneKind, tuple[Array, Array]]
    gather: Array
    weights: Array
    routed: Array


def plan_lengths(setup: Setup, target: Target | None = None, slow: Mapping[int, float] | None = None) -> StepLengths:
    """Lengths of every stage of a legal plan, run by `target`; `slow` multiplies the compute of pipeline ranks.

    A backward is cut into input and weight gradients as its products are. Raises `Refused` for a device or dtype
    without figures (H501, H502).
    """
    whole, c = batch_of(setup, target), values()
    # Ranks wait for the slowest of many at every synchronisation: the model's jitter, as in `cost.step`.
    jitter = float(1.0 + c["jitter"] * np.log2(np.maximum(whole.world / 8.0, 1.0))[0])
    one = _layers(whole, c)
    every = [_stage(setup, stage, whole, one, c, jitter) for stage in stages(setup.plan, setup.model)]
    return StepLengths(
        stages=tuple(every), slow=slow or {}, pair_gain=_pair_gain(setup, every), end=_end(whole, c) * jitter
    )


def _layers(whole: Batch, c: Constants) -> _Layers:
    both = whole.select(np.array([0, 0]))
    # At level 3 the simulator runs the gathers itself, on the data lane; so passes are taken without them.
    b = replace(both, moe_layers=np.array([0.0, 1.0]) * both.layers, zero=np.zeros(2))
    kernels, moe, e = layer(b, c), np.array([0.0, 1.0]), experts(b, c)
    full = layer_pass(b, c, kernels)
    none = np.zeros(2)
    plain = layer_pass(replace(b, recompute_layer=none, recompute_gemm=none, recompute_attention=none), c, kernels)
    exchange = moe * 2.0 * e.exchange * (1.0 - b.overlap_expert)
    ring = ring_time(b, c, kernels)
    tensor = 2.0 * tensor_time(b, c)
    accumulate = moe * accumulation(b, c, expert_weights(b) / b.expert)
    made = kernels.gemm_backward / 2.0 + kernels.accumulate + moe * e.gemm_backward / 2.0 + accumulate
    computed = kernels.backward + moe * (e.gemm_backward + e.elementwise_backward) + accumulate
    # Launches may floor a pass: both halves are then as much longer as the whole is.
    weight_grad = made / computed * np.maximum(plain.backward - tensor - ring[1] - exchange, 0.0)
    gathered = layer_weights(b) / b.tensor
    distance = data_distance(b)
    return _Layers(
        forward=full.forward,
        input_grad=full.backward - weight_grad,
        weight_grad=weight_grad,
        inside={"tensor": (tensor, tensor), "context": ring, "expert": (exchange, exchange)},
        gather=one_way(b, c, b.shard, distance, 2.0 * gathered),
        weights=gathered,
        routed=moe * expert_weights(b) / b.expert / b.tensor,
    )


def _stage(setup: Setup, stage: Stage, b: Batch, one: _Layers, c: Constants, jitter: float) -> StageLengths:
    model = setup.model
    sparse = sum(model.is_sparse(at) for at in stage.layers)
    count = np.array([len(stage.layers) - sparse, sparse], dtype=np.float64)
    # The head is three products of equal size: forward, input gradient, weight gradient. What an embedding costs
    # in forward it costs twice in backward, and all of that for its weights.
    ends = float(head(b, c)[0]) / 3.0 * stage.head
    table = float(embedding(b, c)[0]) / 3.0 * stage.embedding
    matrices = stage.embedding + stage.head - (stage.embedding and stage.head and model.tied)
    weights = float(count @ one.weights) + matrices * float((b.vocab * b.hidden / b.tensor)[0])
    routed = float(count @ one.routed)
    streams = setup.plan.zero == 3
    inside: dict[LaneKind, tuple[float, float]] = {
        lane: (float(count @ first) * jitter, float(count @ second) * jitter)
        for lane, (first, second) in one.inside.items()
        if float(count @ first) > 0
    }
    overlaps = bool((b.overlap_data if not streams else b.overlap_shard)[0] > 0)
    return StageLengths(
        forward=(float(count @ one.forward) + ends + table) * jitter,
        input_grad=(float(count @ one.input_grad) + ends) * jitter,
        weight_grad=(float(count @ one.weight_grad) + ends + 2.0 * table) * jitter,
        inside=inside,
        transfer=float(hop(b, c)[0]) * jitter,
        blocking=1.0 - float(b.overlap_pipeline[0]),
        reduce=_reduce(b, c, weights, routed, b.reduce_bytes) * jitter,
        buckets=_buckets(setup, weights + routed, float(b.reduce_bytes[0])) if overlaps else 1,
        gather=float(count @ one.gather) * jitter if streams else 0.0,
        alongside=float(b.overlap_shard[0]),
    )


def _reduce(b: Batch, c: Constants, weights: float, routed: float, each: Array) -> float:
    """Seconds to send `each` bytes a parameter around the data ranks, experts around those that hold the same."""
    members, distance = b.data * b.context, data_distance(b)
    moved = one_way(b, c, members, distance, weights * each, c["data_calls"])
    copies = np.maximum(members / b.expert, 1.0)
    return float((moved + one_way(b, c, copies, distance * b.expert, routed * each, c["data_calls"]))[0])


def _buckets(setup: Setup, parameters: float, each: float) -> int:
    return max(1, min(MOST_BUCKETS, ceil(parameters * each / (setup.plan.bucket_mb * MIB))))


def _end(b: Batch, c: Constants) -> float:
    """Update, what of gathering the updated weights is not hidden, and the sum of a tied embedding's copies."""
    weights = (b.layers / b.pipeline * layer_weights(b) + b.vocab * b.hidden) / b.tensor
    routed = b.moe_layers / b.pipeline * expert_weights(b) / b.expert / b.tensor
    gather = _reduce(b, c, float(weights[0]), float(routed[0]), b.gather_bytes) if 0 < b.zero[0] < 3 else 0.0
    tied = 0.0
    if b.pipeline[0] > 1 and b.tied[0]:
        r = reach(b, c, np.array([2.0]), b.pipeline_stride)
        tied = float((b.vocab * b.hidden / b.tensor * b.reduce_bytes / r.bandwidth)[0])
    return float(optimizer(b, c)[0]) + gather * (1.0 - float(b.overlap_data[0])) + tied


def _pair_gain(setup: Setup, every: list[StageLengths]) -> float:
    """Share of an FB's shorter half that runs under the other's communication, where the plan overlaps halves."""
    if "half_microbatches" not in setup.plan.overlap:
        return 0.0
    hidden = sum(sum(pair) for s in every for pair in s.inside.values())
    shorter = sum(min(s.forward, s.input_grad + s.weight_grad) for s in every)
    return min(1.0, hidden / shorter) if shorter else 0.0
