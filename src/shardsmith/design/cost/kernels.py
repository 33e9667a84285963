"""Compute of one layer and of the head on one rank: matrix products, attention, memory-bound kernels, launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array, Batch, Columns

Constants = Mapping[str, float]

GENERATIONS = ("volta", "ampere", "hopper", "blackwell", "other", "measured")
"""Families of devices that share a sustained share of their matmul ceiling; `measured` says that the ceiling itself
was measured at the clocks of training."""
TILES = ((128.0, 256.0, 1.0), (128.0, 128.0, 0.97))
"""Output tiles of the large matrix kernels, with their relative rate; a wave is one tile on every multiprocessor.
The library takes the one that wastes least of the last wave."""
ATTENTION_RAMP = 512.0
"""Sequence length at which a fused attention kernel reaches half of its rate (FlashAttention-2, 2023, figures)."""
SCORE_BYTES_FORWARD, SCORE_BYTES_BACKWARD = 13.0, 22.0
"""Traffic a score when attention is not fused: fp16 scores written by the product and read by scale-mask-softmax,
probabilities and dropout mask written, dropped-out values read again; backward likewise twice."""
CAST_BYTES_FORWARD, TRANSPOSE_BYTES, CAST_BYTES_BACKWARD = 3.0, 2.0, 4.0
"""fp8 traffic: cast of an input element, its transpose for the weight gradient, cast and transpose of a gradient."""


@dataclass(frozen=True, kw_only=True)
class Layer(Columns):
    """Seconds of one layer and microbatch on one rank, without communication: parts, forward and backward.

    `gemm_last` is what the layer's last product takes of `gemm_forward`.
    """

    gemm_forward: Array
    gemm_last: Array
    gemm_backward: Array
    attention_forward: Array
    attention_backward: Array
    elementwise_forward: Array
    elementwise_backward: Array
    accumulate: Array

    @property
    def forward(self) -> Array:
        """Forward compute."""
        return self.gemm_forward + self.attention_forward + self.elementwise_forward

    @property
    def backward(self) -> Array:
        """Backward compute, input and weight gradients, without recomputation."""
        return self.gemm_backward + self.attention_backward + self.elementwise_backward + self.accumulate


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Seconds of one microbatch on one rank in what every model has: a layer, the head with its loss, the embedding."""

    layer: Layer
    head: Array
    embedding: Array

    def select(self, which: NDArray[np.intp]) -> Dense:
        """The cases that `which` names, in its order."""
        return Dense(layer=self.layer.select(which), head=self.head[which], embedding=self.embedding[which])


def sustained(b: Batch, c: Constants) -> Array:
    """Share of the measured matmul ceiling that training sustains; power binds more where a watt buys more FLOP/s."""
    shares: Array = np.array([c[f"gemm_{generation}"] for generation in GENERATIONS])
    return np.asarray(shares[b.generation.astype(int)], dtype=np.float64)


def rate16(b: Batch, c: Constants) -> Array:
    """Sustained FLOP/s of large 16-bit matrix products."""
    return b.peak16 * b.matmul16 * sustained(b, c)


def memory_rate(b: Batch, c: Constants) -> Array:
    """Sustained bytes/s of device memory."""
    return b.memory_bandwidth * c["memory_share"]


def gemm(
    b: Batch, c: Constants, m: Array, n: Array, k: Array, rate: Array, width: Array | float, count: Array | float = 1.0
) -> Array:
    """Seconds of `count` (m, k) x (k, n) products in one launch: rate, ramps, waves of tiles, operand traffic."""
    partial = np.minimum(*(idle(b, m, n, count, tile) for tile in TILES))
    ramp = 1.0 + c["gemm_k_ramp"] / k + c["gemm_mn_ramp"] / np.minimum(m, n)
    traffic = width * (m * k + k * n) + 2.0 * m * n
    compute = 2.0 * m * n * k / rate * ramp * (1.0 + c["gemm_wave"] * partial)
    return count * (compute + c["gemm_traffic"] * traffic / memory_rate(b, c))


def idle(b: Batch, m: Array, n: Array, count: Array | float, tile: tuple[float, float, float]) -> Array:
    """Time that an (m, n) output loses, as a share of the ideal, to the last wave and to a smaller tile."""
    waves = np.ceil(m / tile[0]) * np.ceil(n / tile[1]) * count / b.processors
    return np.clip(np.maximum(1.0, np.ceil(waves)) / waves / tile[2] - 1.0, 0.0, 20.0)


def product_rate(b: Batch, c: Constants) -> tuple[Array, Array]:
    """Sustained FLOP/s of a layer's products in the run's precision, and bytes of an operand's element."""
    fp8 = b.fp8 > 0
    return np.where(fp8, b.peak8 * b.matmul8 * c["gemm_fp8"], rate16(b, c)), np.where(fp8, 1.0, 2.0)


def layer(b: Batch, c: Constants) -> Layer:
    """Compute of the mean layer and microbatch on one rank; routed experts are counted in `experts`."""
    t, tokens, dense = b.tensor, b.tokens, 1.0 - b.moe_layers / b.layers
    rate, width = product_rate(b, c)
    qkv = (b.heads + 2.0 * b.kv_heads) * b.head_dim / t
    out, up = b.heads * b.head_dim / t, b.ffn * (1.0 + b.gated) / t
    p, shared = b.projection, b.shared_ffn / t
    shapes = [(qkv, b.hidden, p), (b.hidden, out, p), (up, b.hidden, dense), (b.hidden, b.ffn / t, dense)]
    if b.shared_ffn.any():
        sparse = np.where(b.shared_ffn > 0, 1.0 - dense, 0.0)
        shared = np.maximum(shared, 1.0)
        shapes += [(shared * (1.0 + b.gated), b.hidden, sparse), (b.hidden, shared, sparse)]
    forward, backward, last = np.zeros(len(b)), np.zeros(len(b)), np.zeros(len(b))
    for n, k, share in shapes:
        last = share * gemm(b, c, tokens, n, k, rate, width)
        forward += last
        backward += share * (gemm(b, c, tokens, k, n, rate, width) + gemm(b, c, n, k, tokens, rate, width))
    attention_forward, attention_backward = attention(b, c)
    elementwise_forward, elementwise_backward = elementwise(b, c)
    return Layer(
        gemm_forward=forward,
        gemm_last=last,
        gemm_backward=backward,
        attention_forward=attention_forward,
        attention_backward=attention_backward,
        elementwise_forward=elementwise_forward,
        elementwise_backward=elementwise_backward,
        accumulate=accumulation(b, c, layer_weights(b)),
    )


def dense_kernels(b: Batch, c: Constants) -> Dense:
    """Compute of a layer and of both ends, without communication."""
    return Dense(layer=layer(b, c), head=head(b, c), embedding=embedding(b, c))


def accumulation(b: Batch, c: Constants, weights: Array) -> Array:
    """Seconds a microbatch to add its gradients of `weights` to the sum; inside a product, most traffic hides."""
    traffic = b.accumulate_bytes + c["gemm_traffic"] * b.accumulate_in_product_bytes
    return traffic * weights / b.tensor / memory_rate(b, c)


def layer_weights(b: Batch) -> Array:
    """Parameters of the mean layer without routed experts, all tensor ranks together."""
    dense = 1.0 - b.moe_layers / b.layers
    attention = b.projection * (2.0 * b.heads + 2.0 * b.kv_heads) * b.head_dim
    return b.hidden * (attention + (dense * b.ffn + (1.0 - dense) * b.shared_ffn) * (2.0 + b.gated))


def attention(b: Batch, c: Constants) -> tuple[Array, Array]:
    """Seconds of the attention core, forward and backward: fused (the causal half) or unfused (every score)."""
    scores = b.rows * b.seq_len * (b.seq_len / b.context) * b.heads / b.tensor
    seen = b.window * (2.0 * b.seq_len - b.window) / (2.0 * b.seq_len**2)
    flops = 4.0 * scores * b.head_dim
    ramp = b.seq_len / (b.seq_len + ATTENTION_RAMP) * np.minimum(1.0, b.head_dim / 128.0) ** c["attention_head_dim"]
    fused_forward = seen * flops / (b.peak16 * b.attention_forward * c["attention"] * ramp)
    fused_backward = (
        2.5 * seen * flops / (b.peak16 * b.attention_backward * c["attention"] * c["attention_backward"] * ramp)
    )
    aligned = np.where(np.mod(b.head_dim, 8.0) > 0, np.minimum(rate16(b, c), b.vector_peak), rate16(b, c))
    memory = memory_rate(b, c)
    forward = flops / aligned + c["score_traffic"] * SCORE_BYTES_FORWARD * scores / memory
    backward = 2.0 * flops / aligned + c["score_traffic"] * SCORE_BYTES_BACKWARD * scores / memory
    return np.where(b.flash > 0, fused_forward, forward), np.where(b.flash > 0, fused_backward, backward)


def elementwise(b: Batch, c: Constants) -> tuple[Array, Array]:
    """Seconds of norms, residuals, activation, rotary and layout copies, from declared bytes an element."""
    wide = b.tokens * b.hidden / np.where(b.sequence_parallel > 0, b.tensor, 1.0)
    sparse = b.moe_layers / b.layers
    ffn = b.tokens / b.tensor * (b.ffn * (1.0 - sparse) + b.shared_ffn * sparse)
    qkv = b.tokens * (b.heads + 2.0 * b.kv_heads) * b.head_dim / b.tensor
    out = b.tokens * b.heads * b.head_dim / b.tensor
    scale, memory = c["elementwise"] / memory_rate(b, c), memory_rate(b, c)
    forward = scale * (b.hidden_forward * wide + b.ffn_forward * ffn + b.qkv_forward * qkv)
    backward = scale * (b.hidden_backward * wide + b.ffn_backward * ffn + b.qkv_backward * qkv)
    inputs = b.fp8 * c["cast_traffic"] * (2.0 * wide + out + ffn) / memory
    gradients = b.fp8 * c["cast_traffic"] * (2.0 * wide + qkv + ffn * (1.0 + b.gated)) / memory
    return (
        forward + CAST_BYTES_FORWARD * inputs,
        backward + TRANSPOSE_BYTES * inputs + CAST_BYTES_BACKWARD * gradients,
    )


def head(b: Batch, c: Constants) -> Array:
    """Seconds of the output projection and loss of one microbatch, forward and backward, in 16 bits."""
    tokens, part, rate = b.tokens, b.vocab / b.tensor, rate16(b, c)
    products = (
        gemm(b, c, tokens, part, b.hidden, rate, 2.0)
        + gemm(b, c, tokens, b.hidden, part, rate, 2.0)
        + gemm(b, c, part, b.hidden, tokens, rate, 2.0)
    )
    return products + b.loss_bytes * tokens * part / memory_rate(b, c)


def embedding(b: Batch, c: Constants) -> Array:
    """Seconds of looking up and scattering back the embedding of one microbatch."""
    return 12.0 * b.tokens * b.hidden / memory_rate(b, c)


def smooth_max(x: Array, y: Array) -> Array:
    """A maximum that bends where both are near: launches and kernels hide one another only in the mean."""
    return (x**4 + y**4) ** 0.25
