"""Held: what a pipeline rank of a plan holds at its peak, itemised; a closed form over arrays, nothing fitted."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.layouts import Layouts
from shardsmith.design.cost.memory import dropout_masks, kept_per_layer
from shardsmith.design.cost.schedules import in_flight
from shardsmith.design.cost.subject import Subject
from shardsmith.plan.precision import Precision
from shardsmith.units import DTYPE_BYTES, GIB, MIB

RESERVE = 1.5 * GIB
"""Device context, communicators and their buffers, declared: 0.5 GiB of context and some hundred MiB a communicator."""
FRAGMENTATION = 0.02
"""Share of everything else that the allocator cannot use, declared, with expandable segments."""
BUCKETS = 2.0 * 25.0 * MIB
"""Two buckets of gradients on their way."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes on one rank at its peak, by item."""

    weights: Array
    gradients: Array
    optimizer: Array
    gathered: Array
    activations: Array
    logits: Array
    transient: Array
    reserve: Array

    @property
    def total(self) -> Array:
        """All items together."""
        total = np.zeros_like(self.weights)
        for f in fields(self):
            total = total + getattr(self, f.name)
        return total

    def select(self, at: int) -> Self:
        """The one case `at`."""
        return type(self)(**{f.name: np.asarray(getattr(self, f.name)[at]) for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Share:
    """What stands on the pipeline rank that is asked about: layers by kind, the ends, and its number."""

    dense: Array
    sparse: Array
    embedding: Array
    head: Array
    rank: Array


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes on one rank that no microbatch changes: states as ZeRO keeps them, what is gathered, and `largest`.

    `largest` is the gradient of the largest matrix before it is added to the sum, with buckets on their way.
    """

    weights: Array
    gradients: Array
    optimizer: Array
    gathered: Array
    largest: Array

    @property
    def total(self) -> Array:
        """All together."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.largest


@dataclass(frozen=True, kw_only=True)
class Moving:
    """Bytes on one rank that grow with its microbatch: `activations` and `logits`, and the `hidden` ones at work."""

    activations: Array
    logits: Array
    hidden: Array

    @property
    def total(self) -> Array:
        """All together."""
        return self.activations + self.logits + self.hidden


def held(s: Subject, p: Layouts, b: Batch, kinds: Precision, share: Share) -> Held:
    """What the rank of each plan holds. `b` is the plans' Batch; `share` says which rank it is."""
    kept, moves = states(s, p, kinds, share), moving(s, p, share, kept_layer(s, p, b))
    known = kept.total + moves.total
    return Held(
        weights=kept.weights,
        gradients=kept.gradients,
        optimizer=kept.optimizer,
        gathered=kept.gathered,
        activations=moves.activations,
        logits=moves.logits,
        transient=kept.largest + moves.hidden,
        reserve=with_reserve(known) - known,
    )


def with_reserve(known: Array) -> Array:
    """Bytes of a rank with what the runtime takes and the allocator cannot use."""
    return RESERVE + (1.0 + FRAGMENTATION) * known


def without_reserve(total: float) -> float:
    """Bytes that states and microbatches may take of `total`."""
    return (total - RESERVE) / (1.0 + FRAGMENTATION)


def states(s: Subject, p: Layouts, kinds: Precision, share: Share) -> States:
    """States follow `layout`: level 1 shards the optimiser's, 2 the gradients where they are reduced each
    microbatch, 3 the weights.
    """
    param, grad, moment = (float(DTYPE_BYTES[kind]) for kind in (kinds.param, kinds.grad, kinds.optimizer))
    layer, routed, whole = _elements(s, p, share)
    own, shards = layer + whole, p.shards
    copies = np.where(p.zero > 0, np.maximum(shards * p.tensor / (p.expert * p.expert_tensor), 1.0), 1.0)
    full, cut = own + routed, own / shards + routed / copies
    streams = (p.zero >= 2) & (p.per_step == 0)
    mean = layer / np.maximum(share.dense + share.sparse, 1.0) + routed / np.maximum(share.sparse, 1.0)
    gathered = np.where(p.per_step > 0, full - cut, 2.0 * mean + np.maximum(whole, 0.0))
    # The gradient of the largest matrix before it is added to the sum, and buckets on their way.
    largest = np.maximum(s.model.hidden * s.model.ffn * (1.0 + s.model.gated) / p.tensor, whole * 0.5)
    return States(
        weights=np.where(p.zero == 3.0, cut, full) * param,
        gradients=(np.where(streams, cut, full) + _waiting(s, p, share, streams)) * grad,
        optimizer=np.where(p.zero > 0, cut, full) * (moment * (2.0 + kinds.master)),
        gathered=np.where(p.zero == 3.0, gathered, 0.0) * param,
        largest=largest * param + np.where(p.data * p.context > 1, BUCKETS, 0.0),
    )


def moving(s: Subject, p: Layouts, share: Share, kept: tuple[Array, Array]) -> Moving:
    """Activations of the most microbatches in flight, of layers that keep `kept` bytes (and in full), and logits."""
    each, one_layer = kept
    flight = in_flight(p.schedule, p.pipeline, p.microbatches, p.stages_per_rank, share.rank)
    flight = np.where(p.pipeline > 1, flight, 1.0) / p.stages_per_rank
    again = np.where(p.recompute == 2.0, one_layer, 0.0)
    width = _bytes(s)
    tokens = p.microbatch * s.workload.seq_len / p.context
    # The loss is softmaxed in float32: logits in the dtype of the computation, their copy and its gradient.
    at_once = np.where(p.chunk > 0, np.minimum(p.chunk, tokens), tokens)
    hidden = tokens * s.model.hidden * width / np.where(p.sequence_parallel > 0, p.tensor, 1.0)
    embedded = share.embedding * (hidden + float(s.model.dropout > 0) * hidden / width)
    return Moving(
        activations=flight * ((share.dense + share.sparse) * each + embedded + share.head * hidden) + again,
        logits=share.head * at_once * np.ceil(s.model.vocab / p.tensor) * (width + 8.0),
        hidden=hidden,
    )


def _bytes(s: Subject) -> float:
    return float(DTYPE_BYTES[s.workload.dtype])


def _waiting(s: Subject, p: Layouts, share: Share, streams: NDArray[np.bool_]) -> Array:
    """Elements of a tied embedding's gradient that stay whole, as they wait for the other end's, beyond their shard."""
    matrix = np.ceil(s.model.vocab / p.tensor) * s.model.hidden
    apart = s.model.tied & (p.pipeline > 1) & streams & (share.embedding + share.head == 1.0)
    return np.where(apart, matrix * (1.0 - 1.0 / p.shards), 0.0)


def _elements(s: Subject, p: Layouts, share: Share) -> tuple[Array, Array, Array]:
    """Elements on a rank before ZeRO: of its layers, of routed experts, and of the ends."""
    c, m = s.counts, s.model
    own = np.where((p.replicate_kv > 0) & (p.tensor > m.kv_heads), float(m.kv_heads), p.tensor)
    layers = share.dense * (c.dense_cut / p.tensor + c.dense_whole)
    layers = layers + share.sparse * (c.sparse_cut / p.tensor + c.sparse_whole)
    layers = layers + (share.dense + share.sparse) * c.key_value / own
    routed = share.sparse * c.routed / (p.expert * p.expert_tensor)
    matrix = np.ceil(m.vocab / p.tensor) * m.hidden
    twice = np.minimum(share.embedding + share.head, 2.0 - m.tied)
    ends = twice * matrix + share.embedding * c.position + share.head * c.final
    return layers, routed, np.where(share.embedding + share.head > 0, ends, 0.0)


def kept_layer(s: Subject, p: Layouts, b: Batch) -> tuple[Array, Array]:
    """Bytes a microbatch keeps in the mean layer for backward, as recomputed and in full, experts included."""
    width = _bytes(s) / 2.0
    kept, full = kept_per_layer(b)
    masks = dropout_masks(b) * (1.0 - width)
    kept, full = kept * width + (1.0 - b.recompute_layer) * masks, full * width + masks
    kept, full = kept * b.halves, full * b.halves
    e = s.model.experts
    if e is None:
        return kept, full
    # Of every routed token: its copy as dispatched and its output, at each of an expert's ranks; gate, up and their
    # product, of which a rank has its part; and the shared MLP.
    sparse = float(s.columns["moe_layers"][0]) / s.model.layers
    tokens = p.microbatch * s.workload.seq_len / p.context
    elements = 2.0 * s.model.hidden * p.expert_tensor + 3.0 * e.ffn
    routed = b.imbalance * tokens * e.top_k / p.tensor * elements * 2.0 * width
    dense = tokens * s.model.ffn * (2.0 + s.model.gated) * 2.0 * width / p.tensor
    shared = tokens * e.shared_ffn * 3.0 * 2.0 * width / p.tensor
    more = sparse * (routed + shared - dense)
    inner = np.where(p.recompute == 2.0, 0.0, more)
    return kept + inner, full + more
