"""Peak memory of a rank as a sum of items, from what its stage holds; a closed form, nothing fitted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.experts import expert_weights
from shardsmith.design.cost.kernels import layer_weights


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes a parameter: 16-bit weights, gradients, optimiser states; a logit; layers gathered at once (level 3).

    `gathered` bytes a gathered parameter have streams of their own; `update` bytes a parameter stand beside the states
    while the optimiser steps, where activations, logits and gradients on their way stood before. `spare` bytes a
    parameter of one layer stay for gradients that were summed inside products (0: each gradient stands for itself).
    """

    weights: Array
    gradients: Array
    states: Array
    logits: Array
    gathered_layers: Array
    gathered: Array
    update: Array
    spare: Array


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank at its peak, by item."""

    weights: Array
    gradients: Array
    optimizer: Array
    gathered: Array
    activations: Array
    logits: Array
    transient: Array
    update: Array

    @property
    def total(self) -> Array:
        """What stands all the time, and the larger of what backward and what the update need beside it."""
        always = self.weights + self.gradients + self.optimizer + self.gathered
        return np.asarray(always + np.maximum(self.activations + self.logits + self.transient, self.update))


def memory(b: Batch, s: StateBytes, *, last: bool) -> Memory:
    """What the first (or the `last`) pipeline rank holds at its peak.

    1F1B keeps `pipeline` microbatches in flight on the first rank and one on the last; interleaving adds
    (pipeline - 1) / (pipeline x stages) of a rank's layers. Level 0 to 2 hold whole weights (and, below 2,
    gradients); level 3 a shard, and some layers gathered with their gradients.
    """
    layers = np.ceil(b.layers / b.pipeline)
    matrix = b.vocab * b.hidden / b.tensor
    ends = np.where(b.pipeline > 1, 1.0, 2.0 - b.tied)
    dense = layers * layer_weights(b) / b.tensor + matrix * ends
    routed = layers * (b.moe_layers / b.layers) * expert_weights(b) / b.expert / b.expert_tensor
    copies = np.maximum(b.shard * b.tensor / (b.expert * b.expert_tensor), 1.0)
    whole, sharded = dense + routed, dense / b.shard + routed / copies
    at_once = s.gathered_layers * layer_weights(b) + 2.0 * matrix
    gathered = np.where((b.zero > 2) & (b.shard > 1), at_once * s.gathered, 0.0)
    kept, full = kept_per_layer(b)
    one = np.where(b.pipeline > 1, np.minimum(b.pipeline, b.microbatches), 1.0)
    extra = np.where(b.stages_per_rank > 1, (b.pipeline - 1.0) / (b.pipeline * b.stages_per_rank), 0.0)
    in_flight = np.ones(len(b)) if last else one * (1.0 + extra)
    again = np.where(b.recompute_layer > 0, full, 0.0)
    loss = np.ones(len(b)) if last else np.where(b.pipeline > 1, 0.0, 1.0)
    largest = np.maximum(matrix, b.hidden * b.ffn * (1.0 + b.gated) / b.tensor)
    return Memory(
        weights=np.where(b.zero > 2, sharded, whole) * s.weights,
        gradients=np.where(b.zero > 1, sharded, whole) * s.gradients,
        optimizer=np.where(b.zero > 0, sharded, whole) * s.states,
        gathered=gathered,
        activations=layers * kept * in_flight + again,
        logits=loss * b.tokens * b.vocab / b.tensor * s.logits,
        transient=np.where(s.spare > 0, _spare(b, s, layers * kept), 2.0 * largest),
        update=np.where(b.zero > 0, sharded, whole) * s.update,
    )


def _spare(b: Batch, s: StateBytes, kept: Array) -> Array:
    """Bytes beside activations where products sum their weight gradients: room for one layer's, and the larger of two.

    Gradients of the inner values of an MLP, or that of the embedding, which comes when the microbatch's activations
    (`kept`) have gone.
    """
    inner = 2.0 * b.tokens * b.ffn * (2.0 + b.gated) / b.tensor
    embedding = 2.0 * b.vocab * b.hidden / b.tensor - kept
    return np.asarray(s.spare * layer_weights(b) / b.tensor + np.maximum(inner, embedding), dtype=np.float64)


def kept_per_layer(b: Batch) -> tuple[Array, Array]:
    """Bytes a microbatch keeps in one layer for backward, with the recomputation asked for and without any.

    16 bits an element: inputs of both norms and of what follows them, q, k, v, attention output, the inputs
    of the activation and of the last product. Unfused attention adds scores, probabilities and masks, dropout a mask
    of a byte an element of what either half of the layer adds.
    """
    split = np.where(b.sequence_parallel > 0, b.tensor, 1.0)
    wide = b.tokens * b.hidden * 2.0 / split
    products = (b.heads + 2.0 * b.kv_heads + b.heads) * b.head_dim + b.ffn * (2.0 + b.gated)
    inner = 2.0 * b.tokens * products / b.tensor
    scores = 5.0 * b.rows * b.seq_len * (b.seq_len / b.context) * b.heads / b.tensor
    scores = np.where((b.flash > 0) | (b.recompute_attention > 0), 0.0, scores)
    masks = dropout_masks(b)
    full = 4.0 * wide + inner + scores + masks
    operators = masks + 2.0 * wide + 0.5 * inner + 2.0 * b.tokens * b.heads * b.head_dim / b.tensor
    kept = np.where(b.recompute_gemm > 0, operators, full)
    return b.recompute_layer * wide + (1.0 - b.recompute_layer) * kept, full


def dropout_masks(b: Batch) -> Array:
    """Bytes of the masks that a layer keeps of what attention and the MLP add: one an element, whatever the dtype."""
    return 2.0 * b.dropout * b.tokens * b.hidden / np.where(b.sequence_parallel > 0, b.tensor, 1.0)


def peak(b: Batch, s: StateBytes) -> Array:
    """Bytes of the fuller of the first and the last pipeline rank."""
    return np.maximum(memory(b, s, last=False).total, memory(b, s, last=True).total)
