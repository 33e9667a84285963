"""Split: how many layers stand on which pipeline rank, looked up for many plans at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array
from shardsmith.design.cost.schedules import SCHEDULES
from shardsmith.plan.stages import even_layers, weighed_layers
from shardsmith.schedule import orders
from shardsmith.specs.model import ModelSpec

if TYPE_CHECKING:
    from shardsmith.design.cost.layouts import Layouts


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Layers of a pipeline rank: the fullest, the head's, the first, the fullest between the ends, the last.

    `first_dense` to `last_dense` count those of them without experts.
    """

    fullest: int
    beside_head: int
    first: int
    middle: int
    last: int
    first_dense: int
    middle_dense: int
    last_dense: int


FIELDS = tuple(Ranks.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class Split:
    """The splits of one model's layers, each computed once."""

    model: ModelSpec
    seq_len: int
    _rows: list[list[float]] = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def _places(self) -> NDArray[np.int32]:
        """Row of each split by its code; -1 where it was not asked for yet."""
        return np.full(2 * len(SCHEDULES) * (self.model.layers + 3) ** 2, -1, dtype=np.int32)

    def table(self, p: Layouts) -> dict[str, Array]:
        """Every field of `Ranks` for every plan."""
        size = self.model.layers + 3.0
        code = (((p.schedule * 2.0 + p.weighed) * size + p.stages_per_rank) * size + p.pipeline).astype(np.intp)
        for new in np.unique(code[self._places[code] < 0]):
            at = int(np.flatnonzero(code == new)[0])
            one = (int(column[at]) for column in (p.schedule, p.pipeline, p.stages_per_rank, p.weighed))
            ranks = self._ranks(*one)
            self._places[new] = len(self._rows)
            self._rows.append([float(getattr(ranks, name)) for name in FIELDS])
        found = np.array(self._rows).T[:, self._places[code]]
        return dict(zip(FIELDS, found, strict=True))

    def _ranks(self, schedule: int, pipeline: int, stages: int, weighed: int) -> Ranks:
        count = pipeline * stages
        layers = self.model.layers
        counts = weighed_layers(self.model, count, self.seq_len) if weighed else even_layers(layers, count)
        placement = orders.load(SCHEDULES[schedule]).placement(pipeline=pipeline, stages_per_rank=stages)
        first_dense = self.model.experts.first_dense if self.model.experts else layers
        held, dense, at = [0] * pipeline, [0] * pipeline, 0
        for rank, own in zip(placement, counts, strict=True):
            held[rank] += own
            dense[rank] += max(0, min(first_dense, at + own) - at)
            at += own
        inner = range(1, pipeline - 1) if pipeline > 2 else range(pipeline - 1, pipeline)
        middle = max(inner, key=lambda rank: (held[rank], -rank))
        return Ranks(
            fullest=max(held),
            beside_head=held[placement[-1]],
            first=held[0],
            middle=held[middle],
            last=held[-1],
            first_dense=dense[0],
            middle_dense=dense[middle],
            last_dense=dense[-1],
        )
