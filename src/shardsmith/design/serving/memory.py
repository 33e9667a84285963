"""What a serving device holds: weights, key/value cache, workspace. Counted from the model's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardsmith.design.cost.batch import Array
from shardsmith.design.serving.demand import Demand, Servings
from shardsmith.units import DTYPE_BYTES, GIB


@dataclass(frozen=True, kw_only=True)
class ServingMemory:
    """Bytes on the fullest device: `weights`; `request`, the cache of one request; `workspace`; `room` for caches.

    `requests` is how many requests the cluster holds at once, over all replicas.
    """

    weights: Array
    request: Array
    workspace: Array
    room: Array
    requests: Array


def serving_memory(d: Demand, s: Servings) -> ServingMemory:
    """Memory of every layout. A pipeline rank holds ceil(layers / pipeline) layers; the last one the head, too."""
    assert d.cluster.device.memory_gib is not None, "a device without memory has been refused"
    layers = np.ceil(d.model.layers / s.pipeline)
    weights = weight_bytes(d, s, layers)
    request = layers * cache_token(d, s) * held_tokens(d)
    workspace = d.server.reserve_gib * GIB + activation_bytes(d, s)
    room = d.server.memory_share * d.cluster.device.memory_gib * GIB - weights - workspace
    each = np.floor(np.maximum(room, 0.0) / request + 1e-9)
    return ServingMemory(weights=weights, request=request, workspace=workspace, room=room, requests=each * s.data)


def weight_bytes(d: Demand, s: Servings, layers: Array) -> Array:
    """Bytes of weights on the fullest device: its layers, and embedding or head (both where there is one stage)."""
    return DTYPE_BYTES[d.dtype] * layers_elements(d, s, layers) + ends_width(d) * ends_elements(d, s)


def ends_width(d: Demand) -> float:
    """Bytes of an element of embedding and head, which some engines keep wide when weights are narrow."""
    return float(DTYPE_BYTES[d.dtype if d.server.narrow_ends else "bfloat16"])


def layers_elements(d: Demand, s: Servings, layers: Array) -> Array:
    """Elements of `layers` layers on a device; the fullest stage has as many sparse ones as it can."""
    sparse_all = float(sum(d.model.is_sparse(layer) for layer in range(d.model.layers)))
    sparse = np.minimum(layers, sparse_all)
    dense, c = layers - sparse, d.counts
    # A key/value head is copied where there are more tensor ranks than heads.
    copies = np.maximum(s.tensor / d.model.kv_heads, 1.0)
    key_value = c.key_value / s.tensor * copies
    held = dense * (c.dense_cut / s.tensor + c.dense_whole + key_value)
    return held + sparse * (c.sparse_cut / s.tensor + c.sparse_whole + key_value + c.routed / spread(s))


def ends_elements(d: Demand, s: Servings) -> Array:
    """Elements of embedding, positions, final norm and head on the fullest device, vocabulary cut over tensor."""
    c = d.counts
    matrices = np.where(s.pipeline > 1, 1.0, 1.0 if d.model.tied else 2.0)
    return matrices * c.vocabulary / s.tensor + c.final + np.where(s.pipeline > 1, 0.0, c.position)


def spread(s: Servings) -> Array:
    """Ranks over which the routed experts of a stage are spread: the expert ranks, or else the tensor ranks."""
    return np.where(s.expert > 1, s.expert, s.tensor)


def cache_token(d: Demand, s: Servings) -> Array:
    """Bytes that one token keeps in one layer on one device.

    Keys and values of the heads that stand there; of latent attention (DeepSeek-AI 2024) the latent and the rotated
    key, which every tensor rank needs whole.
    """
    size = DTYPE_BYTES[d.cache_dtype]
    if d.model.latent is not None:
        return np.full(len(s), float((d.model.latent.kv_rank + d.model.latent.rope) * size))
    heads = np.maximum(d.model.kv_heads / s.tensor, 1.0)
    return np.asarray(2.0 * heads * d.model.head_dim * size, dtype=np.float64)


def cached_tokens(d: Demand) -> int:
    """Tokens of a request in the cache: its context, or the sliding window where that is shorter."""
    return min(d.context, d.model.window or d.context)


def held_tokens(d: Demand) -> int:
    """Tokens whose place a request holds: the cached ones, in whole blocks (Kwon et al. 2023)."""
    block = block_tokens(d)
    return -(-cached_tokens(d) // block) * block


def block_tokens(d: Demand) -> int:
    """Tokens of a block of the cache."""
    return d.server.block_tokens if d.model.latent is None else d.server.latent_block_tokens


def activation_bytes(d: Demand, s: Servings) -> Array:
    """Bytes of activations of one full chunk of prompt, and of the logits that are reserved, at their peak."""
    model, tokens = d.model, float(d.server.chunk(d.cluster.device))
    width = float(model.ffn if model.experts is None else max(model.ffn, model.experts.ffn * model.experts.top_k))
    inner = np.maximum((model.heads + 2.0 * model.kv_heads) * model.head_dim, width * (2.0 if model.gated else 1.0))
    rows = np.maximum(np.ceil(d.concurrency / s.data), float(d.server.reserved_requests(d.cluster.device)))
    found = 2.0 * tokens * (3.0 * model.hidden + inner / s.tensor) + d.server.logit_bytes * rows * model.vocab
    return np.asarray(found, dtype=np.float64)
