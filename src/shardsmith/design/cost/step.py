"""A training step: layers, head, stages, bubble, exposed communication and optimiser, itemised."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array, Batch, Columns
from shardsmith.design.cost.collectives import Group, all_reduce, exposed, one_way, reach
from shardsmith.design.cost.experts import Experts, exchange, expert_calls, expert_weights, experts
from shardsmith.design.cost.kernels import (
    Constants,
    Dense,
    Layer,
    accumulation,
    dense_kernels,
    layer_weights,
    memory_rate,
    smooth_max,
)
from shardsmith.design.cost.pipeline import hop
from shardsmith.design.cost.schedules import bubble


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
class Pass(Columns):
    """Seconds on one rank for one microbatch: a layer forward and backward, of that its weight gradients; the ends.

    Communication that is not hidden inside a layer is in it; gathers of sharded weights are not.
    """

    forward: Array
    backward: Array
    weight: Array
    head: Array
    embedding: Array

    def where(self, mask: NDArray[np.bool_], other: Pass) -> Pass:
        """These cases where `mask` holds, those of `other` elsewhere."""
        return Pass(**{f.name: np.where(mask, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Sharding(Columns):
    """Seconds that follow from how states are spread, whatever the layers take.

    `gather` a layer's weights before each of its passes, `reduce` its gradients after the second (0 where both
    happen once a step), `ends` all of that for one vocabulary matrix; `left` until the step's end, before any of it
    hides; `tied` for the copies of an embedding; `update` of the optimiser.
    """

    gather: Array
    reduce: Array
    ends: Array
    left: Array
    tied: Array
    update: Array


def step(b: Batch, c: Constants) -> Step:
    """The time of one step of every case. Never negative; no slower on faster links or devices."""
    return compose(b, c, one_pass(b, c), sharding(b, c))


def compose(b: Batch, c: Constants, one: Pass, spread: Sharding) -> Step:
    """The step that is made of layers as `one` says: stages, bubble, hops, exposed gathers and reductions, update.

    What decides `one` (tensor, context, expert, microbatch, recomputation, overlap inside a layer) and `spread`
    (degrees, ZeRO level, replicas) varies less than the plans, so many of them can share both.
    """
    one = with_gathers(b, c, one, spread)
    f = flow(b, c, one, hop(b, c))
    wait, data = jitter(b, c), data_exposed(b, c, one.forward + one.backward, spread)
    return Step(
        total=(f.total + data + spread.update) * wait,
        compute=b.microbatches * f.mean * wait,
        bubble=f.idle * wait,
        imbalance=b.microbatches * (f.slowest - f.mean) * wait,
        pipeline=f.passing * wait,
        data=data * wait,
        optimizer=spread.update * wait,
    )


def with_gathers(b: Batch, c: Constants, one: Pass, spread: Sharding) -> Pass:
    """`one` with what stays exposed of gathering weights and reducing gradients layer by layer.

    What belongs to the ends runs beside the layers of their stage.
    """
    forward = one.forward + exposed(c, spread.gather, b.overlap_shard, one.forward)
    backward = one.backward + exposed(c, spread.gather + spread.reduce, b.overlap_shard, one.backward)
    ends = (1.0 - b.overlap_shard) * spread.ends
    shared = np.where((b.tied > 0) & (b.pipeline == 1), 0.0, ends)
    return replace(one, forward=forward, backward=backward, head=one.head + ends, embedding=one.embedding + shared)


def sharding(b: Batch, c: Constants) -> Sharding:
    """What spreading states costs each case."""
    streams = b.per_step == 0
    gather = np.where((b.zero > 2) & streams, gather_layer(b, c, 2.0), 0.0)
    reduce = np.where((b.zero >= 2) & streams, gather_layer(b, c, b.reduce_bytes), 0.0)
    matrix, group = b.vocab * b.hidden / b.tensor, shard_group(b)
    gathered = np.where(gather > 0, one_way(b, c, group, 2.0 * matrix), 0.0)
    reduced = np.where(reduce > 0, one_way(b, c, group, b.reduce_bytes * matrix), 0.0)
    return Sharding(
        gather=gather,
        reduce=reduce,
        ends=2.0 * gathered + reduced,
        left=reductions(b, c),
        tied=tied_embedding(b, c),
        update=optimizer(b, c),
    )


@dataclass(frozen=True, kw_only=True)
class Flow(Columns):
    """Seconds of a step in the pipeline: a microbatch on the `slowest` and the `mean` rank, waits, messages, all."""

    slowest: Array
    mean: Array
    idle: Array
    passing: Array
    total: Array


def flow(b: Batch, c: Constants, one: Pass, handed: Array) -> Flow:
    """Microbatches through the stages: the slowest rank's work, the bubble, and the hops of `handed` seconds."""
    whole = one.forward + one.backward
    total = b.layers * whole + one.head + one.embedding
    slowest = np.where(b.pipeline > 1, np.maximum(b.fullest * whole, b.last * whole + one.head), total)
    # The others' work in units of this rank's, so that uneven stages count; equal ones give pipeline - 1.
    unit = (total - slowest) / np.maximum(b.pipeline - 1.0, 1.0)
    split = one.forward / whole, (one.backward - one.weight) / whole, one.weight / whole
    idle = unit * bubble(b.schedule, b.pipeline, b.microbatches, b.stages_per_rank, *split)
    often = 2.0 * b.microbatches * b.stages_per_rank * (1.0 - b.overlap_pipeline)
    passing = (often + 2.0 * (b.pipeline - 1.0)) * handed
    return Flow(
        slowest=slowest,
        mean=total / b.pipeline,
        idle=idle,
        passing=passing,
        total=b.microbatches * slowest + idle + passing,
    )


def jitter(b: Batch, c: Constants) -> Array:
    """Factor on a step for waiting on the slowest of many ranks, and the machine's own factor."""
    return waiting(b.world, c)


def waiting(world: Array, c: Constants) -> Array:
    """`jitter` of steps on `world` ranks."""
    return c["machine"] * (1.0 + c["jitter"] * np.log2(np.maximum(world / 8.0, 1.0)))


def one_pass(b: Batch, c: Constants, dense: Dense | None = None, routed: Experts | None = None) -> Pass:
    """Forward and backward of one layer with tensor, context and expert communication and the launch floor.

    `dense` and `routed` are the kernels that stand behind them, for callers who have them from fewer cases.
    """
    dense, e = dense or dense_kernels(b, c), routed or experts(b, c)
    k, tensor, moe = dense.layer, tensor_time(b, c), b.moe_layers / b.layers
    ring_forward, ring_backward = ring_time(b, c, k)
    exchanged = 2.0 * exchange(b, c) * (1.0 - b.overlap_expert)
    forward = k.forward + 2.0 * tensor + ring_forward
    forward = forward + moe * (e.gemm_forward + e.elementwise_forward + exchanged)
    again = (
        b.recompute_layer * (forward - b.early_stop * (k.gemm_last + tensor))
        + b.recompute_gemm * (k.gemm_forward + moe * e.gemm_forward + 2.0 * k.elementwise_forward)
        + b.recompute_attention * k.attention_forward
    )
    backward = k.backward + tensor_backward(b, c, k, tensor) + ring_backward + again
    accumulate = accumulation(b, c, expert_weights(b) * b.tensor / (b.expert * b.expert_tensor))
    backward = backward + moe * (e.gemm_backward + e.elementwise_backward + exchanged + accumulate)
    # Weight gradients are one of the two products of a backward, and take their sum along.
    weight = k.gemm_backward / 2.0 + k.accumulate + moe * (e.gemm_backward / 2.0 + accumulate)
    exchanged_heads = heads_time(b, c)
    forward, backward = forward + exchanged_heads, backward + 2.0 * exchanged_heads
    calls = b.launches + moe * expert_calls(b) + np.where(b.tensor > 1, c["collective_launches"], 0.0)
    floor = (c["launch"] + c["launch_wait"] * b.synchronous) * calls
    forward = with_launches(b, forward, floor)
    floored = with_launches(b, backward, floor * (c["launch_backward"] + b.recompute_layer + b.recompute_gemm))
    return Pass(
        forward=b.halves * forward,
        backward=b.halves * floored,
        weight=b.halves * weight * floored / backward,
        head=b.halves * dense.head,
        embedding=b.halves * dense.embedding,
    )


def with_launches(b: Batch, kernels: Array, host: Array) -> Array:
    """Seconds of a pass whose launches run ahead of its kernels, or (`synchronous`) wait for each of them."""
    return np.where(b.synchronous > 0, kernels + host, smooth_max(kernels, host))


def gather_layer(b: Batch, c: Constants, each: Array | float) -> Array:
    """Seconds to gather (or reduce-scatter) `each` bytes of every weight of a layer over its shard group."""
    routed = b.moe_layers / b.layers * expert_weights(b) / b.expert / b.expert_tensor
    dense = one_way(b, c, shard_group(b), each * layer_weights(b) / b.tensor)
    return dense + one_way(b, c, expert_group(b, b.shard), each * routed) if b.moe_layers.any() else dense


def tensor_time(b: Batch, c: Constants) -> Array:
    """Exposed seconds of one all-reduce of a layer's activations (or a gather and a scatter, twice the calls)."""
    size, group = b.tokens * b.hidden * 2.0, Group(members=b.tensor, stride=b.tensor_stride)
    parts = one_way(b, c, group, gathered_width(b) * size) + one_way(b, c, group, size)
    reduced = np.where(b.sequence_parallel > 0, parts, all_reduce(b, c, group, size))
    return reduced * (1.0 - b.overlap_tensor)


def tensor_backward(b: Batch, c: Constants, k: Layer, each: Array) -> Array:
    """Exposed seconds of a layer's backward: two all-reduces of `each`, and inputs gathered again for weight gradients.

    Weight gradients, half of its products, can hide the former, the other half the latter.
    """
    sums = exposed(c, 2.0 * each, b.overlap_weight_gradient, 0.5 * k.gemm_backward)
    size, group = b.tokens * b.hidden * 2.0, Group(members=b.tensor, stride=b.tensor_stride)
    gathered = 2.0 * one_way(b, c, group, gathered_width(b) * size)
    again = np.where((b.sequence_parallel > 0) & (b.regather > 0), gathered, 0.0)
    left = exposed(c, again * (1.0 - b.overlap_tensor), b.overlap_regather, 0.5 * k.gemm_backward)
    return sums + left


def gathered_width(b: Batch) -> Array:
    """Bytes of a gathered input over 16 bits: Transformer Engine casts to 8 bits first."""
    return np.where((b.fp8 > 0) & (b.regather > 0), 0.5, 1.0)


def ring_time(b: Batch, c: Constants, k: Layer) -> tuple[Array, Array]:
    """Exposed seconds of passing keys and values around the ring of context ranks, under attention."""
    part = 2.0 * b.rows * b.seq_len / b.context * b.kv_heads * b.head_dim / b.tensor * 2.0
    ring = b.context / b.ulysses
    around = one_way(b, c, Group(members=ring, stride=b.context_stride * b.ulysses), part * b.context)
    keep = c["ring_exposed"]
    return (
        np.maximum(keep * around, around - k.attention_forward),
        np.maximum(2.0 * keep * around, 2.0 * around - k.attention_backward),
    )


def heads_time(b: Batch, c: Constants) -> Array:
    """Exposed seconds of trading a layer's heads for sequence over the ulysses ranks, and back (Jacobs et al. 2023).

    Queries, keys, values and outputs move once each way; of each rank's part all but 1/ulysses leaves it.
    """
    width = (2.0 * b.heads + 2.0 * np.maximum(b.kv_heads, b.ulysses * b.tensor)) * b.head_dim / b.tensor
    group = Group(members=b.ulysses, stride=b.context_stride)
    r = reach(b, c, group)
    size = b.tokens * width * 2.0 * (b.ulysses - 1.0) / b.ulysses
    return np.where(b.ulysses > 1, size / r.bandwidth + 2.0 * (c["call"] + r.hops), 0.0)


def local_weights(b: Batch) -> Array:
    """Parameters on the fullest rank before any sharding over data: its layers and one vocabulary matrix (or both)."""
    ends = np.where(b.pipeline > 1, 1.0, 2.0 - b.tied)
    return (b.layers / b.pipeline * layer_weights(b) + b.vocab * b.hidden * ends) / b.tensor


def local_experts(b: Batch) -> Array:
    """Parameters of routed experts on one rank before any sharding over their replicas."""
    return b.moe_layers / b.pipeline * expert_weights(b) / b.expert / b.expert_tensor


def expert_copies(b: Batch, members: Array) -> Array:
    """Ranks among `members` data and context ranks (and their tensor ranks) that hold the same experts."""
    return np.maximum(members * b.tensor / (b.expert * b.expert_tensor), 1.0)


def shard_group(b: Batch) -> Group:
    """Ranks that ZeRO shards over: `shard` counts them, context ranks first."""
    return Group(
        members=np.maximum(b.shard / b.context, 1.0),
        stride=b.data_stride,
        more=np.minimum(b.shard, b.context),
        more_stride=b.context_stride,
    )


def gradient_group(b: Batch) -> Group:
    """Ranks that share gradients: data and context together."""
    return Group(members=b.data, stride=b.data_stride, more=b.context, more_stride=b.context_stride)


def replica_group(b: Batch) -> Group:
    """Ranks that hold the same shard."""
    return Group(members=b.data * b.context / b.shard, stride=b.data_stride * np.maximum(b.shard / b.context, 1.0))


def expert_group(b: Batch, members: Array) -> Group:
    """Ranks that hold the same experts, of `members` data and context ranks: the expert mesh re-cuts them."""
    return Group(members=expert_copies(b, members), stride=b.tensor_stride * b.expert * b.expert_tensor)


def reductions(b: Batch, c: Constants) -> Array:
    """Seconds of reducing gradients and gathering parameters at the end of a step, before any of it hides.

    What is reduced (and gathered) each microbatch leaves only the sum across replicas (and, at level 2, the gather).
    """
    weights, routed = local_weights(b), local_experts(b)
    each, sharded = b.reduce_bytes + b.gather_bytes, b.zero > 0
    calls = c["data_calls"]
    across = all_reduce(b, c, replica_group(b), weights / b.shard * b.reduce_bytes, calls)
    inside = one_way(b, c, shard_group(b), weights * each, calls)
    moved = np.where(sharded, inside + across, one_way(b, c, gradient_group(b), weights * each, calls))
    if b.moe_layers.any():
        moved += one_way(b, c, expert_group(b, b.data * b.context), routed * each, calls)
    streams = b.per_step == 0
    gathered = one_way(b, c, shard_group(b), weights * b.gather_bytes, calls)
    return np.where(streams & (b.zero > 2), across, np.where(streams & (b.zero == 2), across + gathered, moved))


def tied_embedding(b: Batch, c: Constants) -> Array:
    """Seconds of adding up the gradients of an embedding that the first and the last stage hold."""
    r = reach(b, c, Group(members=np.where(b.pipeline > 1, 2.0, 1.0), stride=b.pipeline_stride))
    size = b.vocab * b.hidden / b.tensor * b.reduce_bytes
    return np.where((b.pipeline > 1) & (b.tied > 0), size / r.bandwidth, 0.0)


def data_exposed(b: Batch, c: Constants, whole: Array, spread: Sharding) -> Array:
    """Exposed seconds of reducing gradients and gathering parameters once a step, and of the tied embedding.

    What overlaps hides under the microbatch that completes a rank's gradients, of layers that take `whole`; of
    several stages a rank, each completes in turn, over the last `pipeline` microbatches.
    """
    last = np.where(b.stages_per_rank > 1, b.pipeline, 1.0)
    room = last * b.layers / b.pipeline * whole
    return exposed(c, spread.left, b.overlap_data, room) + spread.tied


def optimizer(b: Batch, c: Constants) -> Array:
    """Seconds of the update: traffic of this rank's states, and the fixed work of a step."""
    sharded = b.zero > 0
    held = local_weights(b) / np.where(sharded, b.shard, 1.0)
    held += local_experts(b) / np.where(sharded, expert_copies(b, b.shard), 1.0)
    return b.optimizer_bytes * held / memory_rate(b, c) + c["step_fixed"]
