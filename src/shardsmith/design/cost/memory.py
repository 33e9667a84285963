"""Peak memory of a rank as a sum of items, from what its stage holds; a closed form, nothing fitted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.experts import expert_weights
from shardsmith.design.cost.kernels import layer_weights


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes a parameter: 16-bit weights, gradients, optimiser states; a logit; layers gathered at once (level 3)."""

    weights: Array
    gradients: Array
    states: Array
    logits: Array
    gathered_layers: Array


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

    @property
    def total(self) -> Array:
        """All items together."""
        parts = (self.weights, self.gradients, self.optimizer, self.gathered)
        return np.asarray(np.sum([*parts, self.activations, self.logits, self.transient], axis=0), dtype=np.float64)


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
    gathered = np.where(b.zero > 2, s.gathered_layers * layer_weights(b) * s.weights + 2.0 * matrix * s.weights, 0.0)
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
        transient=2.0 * largest,
    )


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
