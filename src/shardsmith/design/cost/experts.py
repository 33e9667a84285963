"""Mixture-of-experts layers: grouped products, permutation, dispatch and combine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardsmith.design.cost.batch import Array, Batch, Columns
from shardsmith.design.cost.collectives import Group, one_way
from shardsmith.design.cost.kernels import (
    CAST_BYTES_BACKWARD,
    CAST_BYTES_FORWARD,
    TRANSPOSE_BYTES,
    Constants,
    gemm,
    memory_rate,
    product_rate,
)

PERMUTE_FORWARD, PERMUTE_BACKWARD = 16.0, 20.0
"""Bytes an element of a routed token: permute, sort by expert, and both undone, each read and written once."""
FUSED_PERMUTE = 8.0
"""The same where dispatch and combine put rows in their place: read and written once at either end."""
BIAS_FORWARD, BIAS_BACKWARD = 28.0, 40.0
"""Bytes an element of a routed output that gets a bias times its probability, in float32 and kernel by kernel (product,
sum, joining of experts, cast; backward: casts, both products and their sums), as in Megatron-Core's grouped MLP."""
BIAS_LAUNCHES, CAST_LAUNCHES = 3.0, 4.0
"""Launches of a forward for each expert on the rank: for its bias, and for casts of both products' inputs to 8 bits."""


@dataclass(frozen=True, kw_only=True)
class Experts(Columns):
    """Seconds of the routed experts of one layer and microbatch on one rank, without communication."""

    gemm_forward: Array
    gemm_backward: Array
    elementwise_forward: Array
    elementwise_backward: Array


def expert_weights(b: Batch) -> Array:
    """Parameters of all routed experts of one layer."""
    return b.experts * b.hidden * b.expert_ffn * (2.0 + b.gated)


def experts(b: Batch, c: Constants) -> Experts:
    """The expert rank that receives most, which all others wait for: `imbalance` times tokens x top_k of a rank.

    It has experts / expert-degree experts, which share its rows evenly. Each of the `expert_tensor` ranks of an expert
    sees the tokens of all of them and has its part of the width.
    """
    if not b.moe_layers.any():
        none = np.zeros(len(b))
        return Experts(
            gemm_forward=none,
            gemm_backward=none,
            elementwise_forward=none,
            elementwise_backward=none,
        )
    routed = routed_tokens(b)
    local = np.maximum(b.experts / b.expert, 1e-9)
    received = routed * b.imbalance
    each, part = np.maximum(received / local, 1.0), np.maximum(b.expert_ffn / b.expert_tensor, 1.0)
    rate, width = product_rate(b, c)
    up = part * (1.0 + b.gated)
    forward, backward = np.zeros(len(b)), np.zeros(len(b))
    for n, k in ((up, b.hidden), (b.hidden, part)):
        forward += gemm(b, c, each, n, k, rate, width, local)
        backward += gemm(b, c, each, k, n, rate, width, local) + gemm(b, c, n, k, each, rate, width, local)
    # Half of the permutation is at the sender, half where the rows arrive.
    moved = (routed + received) / 2.0 * b.hidden * (1.0 + 1.0 / b.expert_tensor) / 2.0
    # What kernels of their own do with each element of hidden and inner rows, unless products take it along.
    apart, memory = 1.0 - b.expert_fused, memory_rate(b, c)
    active = c["elementwise"] * apart * received * part / memory
    inputs = apart * b.fp8 * c["cast_traffic"] * received * (b.hidden + part) / memory
    gradients = apart * b.fp8 * c["cast_traffic"] * received * (b.hidden + up) / memory
    bias = apart * b.expert_bias * c["elementwise"] * received * b.hidden / memory
    permute_forward, permute_backward = (
        moved * np.where(b.expert_fused > 0, FUSED_PERMUTE, each) / memory
        for each in (PERMUTE_FORWARD, PERMUTE_BACKWARD)
    )
    here = b.experts > 0
    return Experts(
        gemm_forward=np.where(here, forward, 0.0),
        gemm_backward=np.where(here, backward, 0.0),
        elementwise_forward=np.where(
            here, b.ffn_forward * active + permute_forward + CAST_BYTES_FORWARD * inputs + BIAS_FORWARD * bias, 0.0
        ),
        elementwise_backward=np.where(
            here,
            b.ffn_backward * active
            + permute_backward
            + TRANSPOSE_BYTES * inputs
            + CAST_BYTES_BACKWARD * gradients
            + BIAS_BACKWARD * bias,
            0.0,
        ),
    )


def routed_tokens(b: Batch) -> Array:
    """Pairs of token and expert that one rank computes, those of its expert's other ranks included."""
    return b.tokens * b.top_k * b.expert_tensor / b.tensor


def expert_calls(b: Batch) -> Array:
    """Launches that experts add to the forward of a sparse layer: for all of them, and for each on the rank."""
    local = b.experts / b.expert
    apart = 1.0 - b.expert_fused
    each = b.expert_each * (1.0 + apart * (b.fp8 * CAST_LAUNCHES + b.expert_bias * BIAS_LAUNCHES) / 2.0)
    return np.asarray(b.expert_launches + local * each, dtype=np.float64)


def exchange(b: Batch, c: Constants) -> Array:
    """Seconds of one dispatch or one combine: an all-to-all of routed tokens over the expert group, and their gather
    over an expert's ranks; 0 without experts.

    What stays inside the fast domain and what leaves it travel at the same time; the slower one counts.
    """
    if not b.moe_layers.any():
        return np.zeros(len(b))
    routed = routed_tokens(b) * b.imbalance
    size = routed * b.hidden * 2.0 / b.expert_tensor
    stride = b.tensor_stride * b.expert_tensor
    inside = np.clip(b.level_size[0] / stride, 1.0, b.expert)
    slowest = (inside - 1.0) / b.expert * size / (b.level_bandwidth[0] * c["link_share"])
    for level in range(1, len(b.level_size)):
        outside = 1.0 - np.clip(b.level_size[level - 1] / stride, 1.0, b.expert) / b.expert
        slowest = np.maximum(slowest, outside * size / (b.level_bandwidth[level] * c["net_share"]))
    latency = c["call"] + c["latency"] * b.level_latency[0] * np.log2(np.maximum(b.expert, 2.0))
    gathered = one_way(b, c, Group(members=b.expert_tensor, stride=b.tensor_stride), routed * b.hidden * 2.0)
    return np.where(b.experts > 0, np.where(b.expert > 1, slowest + latency, 0.0) + gathered, 0.0)
