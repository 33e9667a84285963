"""Least: bytes that no plan with the same degrees, microbatch and recomputation goes below on its fullest rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardsmith.design.cost.batch import Array
from shardsmith.design.cost.held import Share, kept_layer, moving, states, with_reserve
from shardsmith.design.cost.layouts import RECOMPUTE, Layouts, batch_of
from shardsmith.design.cost.subject import Subject
from shardsmith.plan.precision import Precision


def frame_bytes(s: Subject, p: Layouts, kinds: Precision) -> Array:
    """Bytes of plans however their layers are run: cut over tensor ranks, and all of them recomputed.

    Of the layer at work everything is held once more then, so a rank that has few of them holds less with a part
    recomputed.
    """
    split = p.with_(sequence_parallel=np.where(p.tensor > 1, 1.0, 0.0))
    part, full = (
        split.with_(recompute=np.full(len(p), float(RECOMPUTE.index(name)))) for name in ("selective", "full")
    )
    first = np.minimum(first_rank_bytes(s, part, kinds), first_rank_bytes(s, full, kinds))
    return np.maximum(first, mean_rank_bytes(s, full, kinds))


def first_rank_bytes(s: Subject, p: Layouts, kinds: Precision) -> Array:
    """Bytes of the first rank: what it holds of layers at least, and 1F1B's microbatches in flight."""
    share = least_share(s, p)
    sizes = [states(s, _most_sharded(p, level), kinds, share).total for level in (2.0, 3.0)]
    more = moving(s, p, share, kept_layer(s, p, batch_of(s, p, kinds))).total
    return with_reserve(np.minimum(*sizes) + more)


def mean_rank_bytes(s: Subject, p: Layouts, kinds: Precision) -> Array:
    """Bytes of the mean rank: its part of all layers, one microbatch of which is in flight."""
    dense = float(s.model.experts.first_dense if s.model.experts else s.model.layers)
    part, sparse = 1.0 / p.pipeline, float(s.model.layers) - dense
    # A tied matrix stands once where one rank has both ends.
    head = part * (1.0 - s.model.tied)
    share = Share(dense=dense * part, sparse=sparse * part, embedding=part, head=head, rank=p.pipeline - 1.0)
    # Layers of a kind differ by rank, and so does what is gathered of them: left out.
    whole = [replace(states(s, _most_sharded(p, level), kinds, share), gathered=0.0 * part) for level in (2.0, 3.0)]
    kept, _ = kept_layer(s, p, batch_of(s, p, kinds))
    return with_reserve(np.minimum(*(each.total for each in whole)) + kept * s.model.layers * part)


def least_share(s: Subject, p: Layouts) -> Share:
    """What stands on the first rank at least: a layer less than the mean."""
    layers = float(s.model.layers)
    mean = np.where(p.pipeline > 1, np.maximum(np.floor_divide(layers, p.pipeline) - 1.0, 0.0), layers)
    dense = np.minimum(mean, float(s.model.experts.first_dense if s.model.experts else layers))
    alone = np.where(p.pipeline > 1, 0.0, 1.0)
    return Share(dense=dense, sparse=mean - dense, embedding=alone, head=alone, rank=0.0 * mean)


def _most_sharded(p: Layouts, level: float) -> Layouts:
    """Plans with states at a ZeRO level and spread as widely as they can be."""
    one = np.ones(len(p))
    zero = np.where(p.data * p.context > 1, level, 0.0)
    return p.with_(zero=zero, per_step=0.0 * one, replicate=one)
