"""Price many plans of one subject: the time of a step with its parts, and the memory of every decisive rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.held import Held, Share, held
from shardsmith.design.cost.layouts import Layouts, batch_of
from shardsmith.design.cost.step import Step, step
from shardsmith.design.cost.subject import Subject
from shardsmith.plan.precision import Precision


@dataclass(frozen=True, kw_only=True)
class Priced:
    """Plans with their `batch`, `step`, and bytes of the fullest rank."""

    layouts: Layouts
    batch: Batch
    step: Step
    peak: Array


def price(s: Subject, p: Layouts, kinds: Precision) -> Priced:
    """Time and peak memory of every plan."""
    b = batch_of(s, p, kinds)
    return Priced(layouts=p, batch=b, step=step(b, s.constants), peak=peak(s, p, b, kinds))


def peak(s: Subject, p: Layouts, b: Batch, kinds: Precision) -> Array:
    """Bytes of the fullest pipeline rank of every plan: the first, the last, or the fullest between them."""
    found = np.zeros(len(p))
    for where in ("first", "middle", "last"):
        found = np.maximum(found, rank_held(s, p, b, kinds, where).total)
    return found


def rank_held(s: Subject, p: Layouts, b: Batch, kinds: Precision, where: str) -> Held:
    """What the `first`, second (`middle`) or `last` pipeline rank holds; layers are spread evenly.

    Ranks between the ends hold no more than the second: as many layers at most, and no more in flight.
    """
    return held(s, p, b, kinds, share_of(s, p, where))


def share_of(s: Subject, p: Layouts, where: str) -> Share:
    """Layers and ends of a rank where stages are even, earlier ones taking the remainder, sparse layers last."""
    v_shaped = p.schedule >= 5.0
    one = p.pipeline == 1
    rank = {"first": np.zeros(len(p)), "middle": np.minimum(1.0, p.pipeline - 1.0), "last": p.pipeline - 1.0}[where]
    stages = p.pipeline * p.stages_per_rank
    each, rest = np.floor_divide(s.model.layers, stages), np.mod(s.model.layers, stages)
    # Stages that a rank holds among the first `rest`, which have a layer more.
    low = np.clip(np.ceil((rest - rank) / p.pipeline), 0.0, p.stages_per_rank)
    folded = (rest > rank) * 1.0 + (rest > stages - 1.0 - rank)
    layers = each * p.stages_per_rank + np.where(v_shaped, folded, low)
    first_dense = float(s.model.experts.first_dense if s.model.experts else s.model.layers)
    dense = np.where(rank == 0, np.minimum(first_dense, layers), 0.0) if s.model.experts else layers
    dense = np.where(one, np.minimum(first_dense, float(s.model.layers)), dense)
    embedding = (rank == 0) * 1.0
    head = np.where(v_shaped, rank == 0, rank == p.pipeline - 1.0) * 1.0
    return Share(dense=dense, sparse=layers - dense, embedding=embedding, head=head, rank=rank)
