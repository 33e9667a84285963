"""Time to the first token and between tokens, by roofline: a piece of work takes its FLOPs or its bytes, whichever
is longer, then communication and a floor of kernels. Prefill is bound by FLOPs, decoding by bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardsmith.design.cost.batch import Array
from shardsmith.design.cost.collectives import Group, all_reduce, reach, small_all_reduce
from shardsmith.design.cost.constants import values
from shardsmith.design.cost.devices import attention_share
from shardsmith.design.serving.demand import Demand, Servings
from shardsmith.design.serving.memory import (
    cache_token,
    cached_tokens,
    ends_width,
    layers_elements,
    spread,
)
from shardsmith.specs.flops import forward_flops
from shardsmith.units import DTYPE_BYTES

KERNEL_SECONDS = 2.5e-6
"""What a kernel of a captured graph takes at least, declared: start, drain and the gap to the next."""
GRAPH_LATENCY = 1.0
"""Hops of latency of a small collective in a captured graph, as a multiple of the link's, declared; a training step
pays several times that to launch and synchronise."""


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Seconds to the first token of a request that arrives alone, and between tokens with all requests decoding.

    `binds` says by index into BOUNDS what takes the largest part of the time between tokens.
    """

    ttft: Array
    tpot: Array
    binds: Array


BOUNDS = ("weights", "cache", "compute", "communication", "kernels")


def latency(d: Demand, s: Servings) -> Latency:
    """Both times of every layout."""
    tpot, binds = decode(d, s)
    return Latency(ttft=prefill(d, s), tpot=tpot, binds=binds)


def prefill(d: Demand, s: Servings) -> Array:
    """Seconds until a prompt of `context` tokens has gone through the model, chunk after chunk through the stages."""
    c, model = values(), d.model
    chunks = np.ceil(d.context / d.server.chunk(d.cluster.device))
    tokens = d.context / chunks
    flops = forward_flops(model, seq_len=d.context).items
    products = (flops["attention_projections"] + flops["mlp"]) * tokens / s.tensor / d.rate
    # Attention runs on 16-bit tensors in either case.
    peak = d.cluster.device.peak("bfloat16") or d.cluster.device.peak(d.dtype)
    generation = d.facts.generation if d.facts.generation != "other" else "ampere"
    assert peak is not None, "a device without a peak has been refused"
    scores = flops["attention_scores"] * tokens / s.tensor / (peak * attention_share("cudnn", generation))
    reads = DTYPE_BYTES[d.dtype] * layers_elements(d, s, np.full(len(s), float(model.layers))) / d.memory_rate
    sent = model.layers * (_reduces(d, s, c, tokens) + _exchanges(d, s, c, tokens))
    floor = model.layers * c["launch"] * _kernels(d)
    whole = np.maximum(np.maximum(products, reads) + scores + sent, floor)
    stage = whole / s.pipeline + _hop(d, s, c, tokens)
    return np.asarray((chunks + s.pipeline - 1.0) * stage + _head(d, s, 1.0), dtype=np.float64)


def decode(d: Demand, s: Servings) -> tuple[Array, Array]:
    """Seconds between tokens, and what takes most of them. The requests of a replica go round its stages in
    `pipeline` groups, so that every stage always has one."""
    model, c = d.model, values() | {"latency": GRAPH_LATENCY, "call": 0.0}
    requests = np.ceil(np.ceil(d.concurrency / s.data) / s.pipeline)
    layers = np.full(len(s), float(model.layers))
    weights = DTYPE_BYTES[d.dtype] * _met_elements(d, s, layers, requests) / d.memory_rate
    cache = model.layers * requests * cache_token(d, s) * cached_tokens(d) / d.memory_rate
    flops = forward_flops(model, seq_len=1).items
    products = (flops["attention_projections"] + flops["mlp"]) * requests / s.tensor / d.rate
    scores = model.layers * requests * cached_tokens(d) * _score_flops(d) / s.tensor / d.rate
    sent = model.layers * (_reduces(d, s, c, requests) + _exchanges(d, s, c, requests)) + s.pipeline * _hop(
        d, s, c, requests
    )
    each = np.where(requests <= d.server.graph_requests, KERNEL_SECONDS, c["launch"])
    floor = model.layers * each * _kernels(d)
    head = _head(d, s, requests)
    total = np.maximum(weights, products) + np.maximum(cache, scores) + sent + floor + head
    compute = np.where(products > weights, products, 0.0) + np.where(scores > cache, scores, 0.0)
    read = np.where(products > weights, 0.0, weights) + head
    parts = np.stack([read, np.where(scores > cache, 0.0, cache), compute, sent, floor])
    return total, np.argmax(parts, axis=0)


def _met_elements(d: Demand, s: Servings, layers: Array, requests: Array) -> Array:
    """Elements of weights that a batch reads on a device: of its routed experts those that some token chose."""
    experts = d.model.experts
    whole = layers_elements(d, s, layers)
    if experts is None:
        return whole
    sparse = float(sum(d.model.is_sparse(layer) for layer in range(d.model.layers)))
    tokens = requests * np.where(s.expert > 1, s.data, 1.0)
    missed = (1.0 - experts.top_k / experts.count) ** tokens
    return whole - sparse * d.counts.routed / spread(s) * missed


def _score_flops(d: Demand) -> float:
    """FLOPs of a new token with one cached token in one layer, both products; latents are met by every head."""
    model = d.model
    if model.latent is None:
        return 4.0 * model.heads * model.head_dim
    return 2.0 * model.heads * (2.0 * model.latent.kv_rank + model.latent.rope)


def _kernels(d: Demand) -> float:
    """Kernels of a layer; experts add routing, permutation and grouped products."""
    return d.server.kernels + d.server.expert_kernels * (d.model.experts is not None)


def _head(d: Demand, s: Servings, tokens: Array | float) -> Array:
    """Seconds of the output projection of the last tokens, its vocabulary cut over tensor ranks."""
    matrix = d.counts.vocabulary / s.tensor
    return np.maximum(2.0 * matrix * tokens / d.rate, ends_width(d) * matrix / d.memory_rate)


def _reduces(d: Demand, s: Servings, c: Mapping[str, float], tokens: Array | float) -> Array:
    """Seconds of the two sums over tensor ranks in a layer; with expert parallel only attention has one.

    Small ones inside a fast domain are one kernel of the engine's own, others a ring of NCCL.
    """
    group = Group(members=s.tensor, stride=np.ones(len(s)))
    calls = np.where(s.expert > 1, 1.0, 2.0)
    size = 2.0 * d.model.hidden * tokens * np.ones(len(s))
    own = np.isin(s.tensor, d.server.own_reduce_ranks) & (group.inside(s.level_size[0]) == s.tensor)
    own &= size <= d.server.own_reduce_bytes
    return calls * np.where(own, small_all_reduce(s, c, group, size), all_reduce(s, c, group, size))


def _exchanges(d: Demand, s: Servings, c: Mapping[str, float], tokens: Array | float) -> Array:
    """Seconds of dispatch and combine of a sparse layer over the expert ranks; what stays inside a domain and what
    leaves it travel at once."""
    experts, model = d.model.experts, d.model
    if experts is None:
        return np.zeros(len(s))
    share = sum(model.is_sparse(layer) for layer in range(model.layers)) / model.layers
    size = tokens * experts.top_k * model.hidden * (DTYPE_BYTES[d.dtype] + 2.0) / 2.0 / s.tensor
    group = Group(members=s.tensor, stride=np.ones(len(s)), more=s.data, more_stride=s.tensor)
    slowest = np.zeros(len(s))
    for level in range(len(s.level_size)):
        below = s.level_size[level - 1] if level else np.ones(1)
        outside = 1.0 - group.inside(below) / group.size
        rate = s.level_bandwidth[level] * c["net_share" if level else "link_share"]
        slowest = np.maximum(slowest, outside * size / rate)
    return np.where(s.expert > 1, share * 2.0 * (slowest + c["call"] + reach(s, c, group).tree), 0.0)


def _hop(d: Demand, s: Servings, c: Mapping[str, float], tokens: Array | float) -> Array:
    """Seconds to hand hidden states to the next stage; 0 with one stage."""
    size = 2.0 * d.server.hop_tensors * d.model.hidden * tokens
    r = reach(s, c, Group(members=np.where(s.pipeline > 1, 2.0, 1.0), stride=s.tensor * s.data))
    return np.where(s.pipeline > 1, size / s.tensor / r.bandwidth + c["call"] + r.hops, 0.0)
