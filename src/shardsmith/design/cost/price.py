"""Price many plans of one subject: the time of a step with its parts, and the memory of every decisive rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.held import Held, Share, held
from shardsmith.design.cost.layouts import Layouts, batch_of
from shardsmith.design.cost.schedules import DUALPIPE_V, ZB_V
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
    """What the `first`, a `middle` or the `last` pipeline rank holds; those between the ends hold no more than that."""
    return held(s, p, b, kinds, share_of(s, p, where))


def share_of(s: Subject, p: Layouts, where: str) -> Share:
    """Layers and ends of the `first`, a `middle` or the `last` pipeline rank.

    The middle one has the layers of the fullest rank between the ends, and as much in flight as the second.
    """
    table, last = s.split.table(p), p.pipeline - 1.0
    rank = {"first": 0.0 * last, "middle": np.minimum(1.0, last), "last": last}[where]
    dense = table[f"{where}_dense"]
    folded = (p.schedule == ZB_V) | (p.schedule == DUALPIPE_V)
    return Share(
        dense=dense,
        sparse=table[where] - dense,
        embedding=(rank == 0) * 1.0,
        head=np.where(folded, rank == 0, rank == last) * 1.0,
        rank=rank,
    )
