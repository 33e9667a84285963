"""A training step: layers, head, stages, bubble, exposed communication and optimiser, itemised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.collectives import all_reduce, exposed, one_way, reach
from shardsmith.design.cost.experts import expert_weights, experts
from shardsmith.design.cost.kernels import (
    Constants,
    Layer,
    accumulation,
    embedding,
    head,
    layer,
    layer_weights,
    memory_rate,
    smooth_max,
)
from shardsmith.design.cost.pipeline import hop, stage_layers


@dataclass(frozen=True, kw_only=True)
class Step:
    """Seconds of one optimiser step, and where they go; the parts add up to `total`."""

    total: Array
    compute: Array
    bubble: Array
    imbalance: Array
    pipeline: Array
    data: Array
    optimizer: Array


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Seconds of one layer and microbatch on one rank, with what communication is left exposed."""

    forward: Array
    backward: Array


def step(b: Batch, c: Constants) -> Step:
    """The time of one step of every case. Never negative; no slower on faster links or devices."""
    kernels = layer(b, c)
    one = layer_pass(b, c, kernels)
    whole = one.forward + one.backward
    ends = head(b, c), embedding(b, c)
    total = b.layers * whole + ends[0] + ends[1]
    fullest, last = stage_layers(b)
    slowest = np.where(b.pipeline > 1, np.maximum(fullest * whole, last * whole + ends[0]), total)
    mean = total / b.pipeline
    hops = hop(b, c)
    bubble = (total - slowest) / b.stages_per_rank
    passing = (
        2.0 * b.microbatches * b.stages_per_rank * (1.0 - b.overlap_pipeline) * hops + 2.0 * (b.pipeline - 1.0) * hops
    )
    jitter = 1.0 + c["jitter"] * np.log2(np.maximum(b.world / 8.0, 1.0))
    data = data_exposed(b, c, whole)
    after = optimizer(b, c)
    return Step(
        total=(b.microbatches * slowest + bubble + passing + data + after) * jitter,
        compute=b.microbatches * mean * jitter,
        bubble=bubble * jitter,
        imbalance=b.microbatches * (slowest - mean) * jitter,
        pipeline=passing * jitter,
        data=data * jitter,
        optimizer=after * jitter,
    )


def layer_pass(b: Batch, c: Constants, k: Layer) -> Pass:
    """Forward and backward of one layer with tensor, context and shard communication and the launch floor."""
    tensor = tensor_time(b, c)
    ring_forward, ring_backward = ring_time(b, c, k)
    e, moe = experts(b, c), b.moe_layers / b.layers
    exchanged = 2.0 * e.exchange * (1.0 - b.overlap_expert)
    forward = k.forward + 2.0 * tensor + ring_forward
    forward = forward + moe * (e.gemm_forward + e.elementwise_forward + exchanged)
    again = (
        b.recompute_layer * (forward - b.early_stop * (k.gemm_last + tensor))
        + b.recompute_gemm * (k.gemm_forward + moe * e.gemm_forward + 2.0 * k.elementwise_forward)
        + b.recompute_attention * k.attention_forward
    )
    # Input-gradient products need half of the time of backward's products; the other half can hide collectives.
    reduced = exposed(c, 2.0 * tensor, b.overlap_weight_gradient, 0.5 * k.gemm_backward)
    backward = k.backward + reduced + ring_backward + again
    accumulate = accumulation(b, c, expert_weights(b) / b.expert)
    backward = backward + moe * (e.gemm_backward + e.elementwise_backward + exchanged + accumulate)
    calls = b.launches + moe * b.expert_launches + np.where(b.tensor > 1, c["collective_launches"], 0.0)
    floor = (c["launch"] + c["launch_wait"] * b.synchronous) * calls
    forward = with_launches(b, forward, floor)
    backward = with_launches(b, backward, floor * (c["launch_backward"] + b.recompute_layer + b.recompute_gemm))
    gather = one_way(b, c, b.shard, data_distance(b), 2.0 * layer_weights(b) / b.tensor)
    gather = np.where(b.zero > 2, gather, 0.0)
    return Pass(
        forward=forward + exposed(c, gather, b.overlap_shard, forward),
        backward=backward + exposed(c, 2.0 * gather, b.overlap_shard, backward),
    )


def with_launches(b: Batch, kernels: Array, host: Array) -> Array:
    """Seconds of a pass whose launches run ahead of its kernels, or (`synchronous`) wait for each of them."""
    return np.where(b.synchronous > 0, kernels + host, smooth_max(kernels, host))


def tensor_time(b: Batch, c: Constants) -> Array:
    """Exposed seconds of one all-reduce of a layer's activations (or a gather and a scatter, twice the calls)."""
    size = b.tokens * b.hidden * 2.0
    reduced = all_reduce(b, c, b.tensor, b.tensor_stride, size)
    gathered = 2.0 * one_way(b, c, b.tensor, b.tensor_stride, size)
    return np.where(b.sequence_parallel > 0, gathered, reduced) * (1.0 - b.overlap_tensor)


def ring_time(b: Batch, c: Constants, k: Layer) -> tuple[Array, Array]:
    """Exposed seconds of passing keys and values around the context group, under attention."""
    part = 2.0 * b.microbatch * b.seq_len / b.context * b.kv_heads * b.head_dim / b.tensor * 2.0
    around = one_way(b, c, b.context, b.context_stride, part * b.context)
    keep = c["ring_exposed"]
    return (
        np.maximum(keep * around, around - k.attention_forward),
        np.maximum(2.0 * keep * around, 2.0 * around - k.attention_backward),
    )


def local_weights(b: Batch) -> Array:
    """Parameters on the fullest rank before any sharding over data: its layers and one vocabulary matrix (or both)."""
    ends = np.where(b.pipeline > 1, 1.0, 2.0 - b.tied)
    return (b.layers / b.pipeline * layer_weights(b) + b.vocab * b.hidden * ends) / b.tensor


def local_experts(b: Batch) -> Array:
    """Parameters of routed experts on one rank before any sharding over their replicas."""
    return b.moe_layers / b.pipeline * expert_weights(b) / b.expert / b.tensor


def data_distance(b: Batch) -> Array:
    """Ranks between neighbours of the group that shares gradients (data and context together)."""
    return np.where(b.context > 1, np.minimum(b.data_stride, b.context_stride), b.data_stride)


def data_exposed(b: Batch, c: Constants, whole: Array) -> Array:
    """Exposed seconds of reducing gradients and gathering parameters once a step, and of the tied embedding.

    What overlaps hides under the microbatch that completes a rank's gradients; of several stages a rank, each
    completes in turn, over the last `pipeline` microbatches. Level 3 reduces inside the shard group layer by
    layer; what is left here are its copies across replicas.
    """
    members, weights, routed = b.data * b.context, local_weights(b), local_experts(b)
    each = b.reduce_bytes + b.gather_bytes
    moved = one_way(b, c, members, data_distance(b), weights * each, c["data_calls"])
    copies = np.maximum(members / b.expert, 1.0)
    moved += one_way(b, c, copies, data_distance(b) * b.expert, routed * each, c["data_calls"])
    replicas, piece = members / b.shard, weights / b.shard * b.reduce_bytes
    across = all_reduce(b, c, replicas, data_distance(b) * b.shard, piece, c["data_calls"])
    r = reach(b, c, np.where(b.pipeline > 1, 2.0, 1.0), b.pipeline_stride)
    tied = np.where((b.pipeline > 1) & (b.tied > 0), b.vocab * b.hidden / b.tensor * b.reduce_bytes / r.bandwidth, 0.0)
    last = np.where(b.stages_per_rank > 1, b.pipeline, 1.0)
    room = last * b.layers / b.pipeline * whole
    return exposed(c, np.where(b.zero > 2, across, moved), b.overlap_data, room) + tied


def optimizer(b: Batch, c: Constants) -> Array:
    """Seconds of the update: traffic of this rank's states, and the fixed work of a step."""
    sharded = b.zero > 0
    held = local_weights(b) / np.where(sharded, b.shard, 1.0)
    held += local_experts(b) / np.where(sharded, np.maximum(b.shard / b.expert, 1.0), 1.0)
    return b.optimizer_bytes * held / memory_rate(b, c) + c["step_fixed"]
