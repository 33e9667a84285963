"""Price many plans of one subject: the time of a step with its parts, and the memory of every decisive rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.held import Share, kept_layer, moving, states, with_reserve
from shardsmith.design.cost.layouts import Layouts, batch_of
from shardsmith.design.cost.schedules import DUALPIPE_V, ZB_V
from shardsmith.design.cost.step import Step, step
from shardsmith.design.cost.subject import Subject
from shardsmith.plan.precision import Precision
from shardsmith.specs.model import ModelSpec

Decisive = Literal["first", "middle", "sparsest", "densest", "last"]


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
    kept, found = kept_layer(s, p, b), np.zeros(len(p))
    for where in decisive(s.model):
        share = share_of(s, p, where)
        found = np.maximum(found, states(s, p, kinds, share).total + moving(s, p, share, kept).total)
    return with_reserve(found)


def decisive(model: ModelSpec) -> tuple[Decisive, ...]:
    """Pipeline ranks of which one is the fullest.

    Those between the ends hold no more than the one with most layers. Where some layers have experts and some have
    none, either kind may be the larger: then also no more than those with most of each.
    """
    mixed = model.experts is not None and model.experts.first_dense > 0
    return ("first", "middle", "sparsest", "densest", "last") if mixed else ("first", "middle", "last")


def share_of(s: Subject, p: Layouts, where: Decisive) -> Share:
    """Layers and ends of the `first`, the `last` or another decisive pipeline rank.

    One between the ends has its own layers, and as much in flight as the second.
    """
    last = p.pipeline - 1.0
    rank = {"first": 0.0 * last, "last": last}.get(where, np.minimum(1.0, last))
    dense = s.split.column(p, f"{where}_dense")
    folded = (p.schedule == ZB_V) | (p.schedule == DUALPIPE_V)
    return Share(
        dense=dense,
        sparse=s.split.column(p, where) - dense,
        embedding=(rank == 0) * 1.0,
        head=np.where(folded, rank == 0, rank == last) * 1.0,
        rank=rank,
    )
