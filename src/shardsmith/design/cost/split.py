"""Split: how many layers stand on which pipeline rank, looked up for many plans at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array
from shardsmith.design.cost.schedules import SCHEDULES
from shardsmith.plan.stages import even_layers, weighed_layers
from shardsmith.schedule import orders
from shardsmith.specs.model import ModelSpec


class Staged(Protocol):
    """Many plans, as far as their split goes: one number a plan in each column."""

    @property
    def schedule(self) -> Array:
        """Index of the schedule."""

    @property
    def pipeline(self) -> Array:
        """Pipeline ranks."""

    @property
    def stages_per_rank(self) -> Array:
        """Stages of each."""

    @property
    def weighed(self) -> Array:
        """1 where layers are split by what stages cost, 0 where evenly."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Layers of a pipeline rank: the fullest, the head's, the first, of those between the ends the fullest and the ones
    with most layers with and without experts, the last.

    `first_dense` to `last_dense` count those of them without experts.
    """

    fullest: int
    beside_head: int
    first: int
    middle: int
    sparsest: int
    densest: int
    last: int
    first_dense: int
    middle_dense: int
    sparsest_dense: int
    densest_dense: int
    last_dense: int


FIELDS = tuple(Ranks.__dataclass_fields__)


@dataclass(kw_only=True, eq=False)
class Split:
    """The splits of one model's layers, each computed once."""

    model: ModelSpec
    seq_len: int
    _rows: list[tuple[float, ...]] = field(default_factory=list, repr=False)
    _figures: Array = field(default_factory=lambda: np.empty((len(FIELDS), 0)), repr=False)
    """Every field (rows) of every split so far."""
    _last: tuple[Staged, NDArray[np.intp]] | None = field(default=None, repr=False)
    """The plans asked for last, as several fields of the same ones are wanted, and their splits."""

    @cached_property
    def _places(self) -> NDArray[np.intp]:
        """Row of each split by its code; -1 where it was not asked for yet."""
        return np.full(2 * len(SCHEDULES) * (self.model.layers + 3) ** 2, -1, dtype=np.intp)

    def rows(self, p: Staged) -> NDArray[np.intp]:
        """The split of every plan, as a row number of `column`'s figures."""
        if self._last is None or self._last[0] is not p:
            self._last = (p, self._find(p))
        return self._last[1]

    def _find(self, p: Staged) -> NDArray[np.intp]:
        size = self.model.layers + 3.0
        code = (((p.schedule * 2.0 + p.weighed) * size + p.stages_per_rank) * size + p.pipeline).astype(np.intp)
        found = self._places[code]
        if found.min(initial=0) < 0:
            self._add(p, code)
            found = self._places[code]
        return found

    def column(self, p: Staged, name: str) -> Array:
        """The field `name` of `Ranks` for every plan."""
        rows = self.rows(p)
        found: Array = self._figures[FIELDS.index(name)][rows]
        return found

    def _add(self, p: Staged, code: NDArray[np.intp]) -> None:
        new, first = np.unique(code[self._places[code] < 0]), np.empty(len(self._places), dtype=np.intp)
        first[code] = np.arange(len(code))
        known = {row: at for at, row in enumerate(map(tuple, self._rows))}
        for each in new:
            at = first[each]
            one = (int(column[at]) for column in (p.schedule, p.pipeline, p.stages_per_rank, p.weighed))
            ranks = self._ranks(*one)
            row = tuple(float(getattr(ranks, name)) for name in FIELDS)
            if row not in known:
                known[row] = len(self._rows)
                self._rows.append(row)
            self._places[each] = known[row]
        self._figures = np.array(self._rows).T

    def _ranks(self, schedule: int, pipeline: int, stages: int, weighed: int) -> Ranks:
        count = pipeline * stages
        layers = self.model.layers
        counts = weighed_layers(self.model, count, self.seq_len) if weighed else even_layers(layers, count)
        placement = orders.load(SCHEDULES[schedule]).placement(pipeline=pipeline, stages_per_rank=stages)
        first_dense = self.model.experts.first_dense if self.model.experts else layers
        own, at = np.array(counts), np.cumsum(counts) - counts
        held = np.bincount(placement, own, pipeline)
        dense = np.bincount(placement, np.clip(first_dense - at, 0, own), pipeline)
        # Ranks by what counts first and by what decides between equals, the earliest of them.
        start, stop = (1, pipeline - 1) if pipeline > 2 else (pipeline - 1, pipeline)
        some, plain, first = held[start:stop], dense[start:stop], layers + 1.0
        middle = start + int(np.argmax(some * first - plain))
        sparsest = start + int(np.argmax((some - plain) * first + some))
        densest = start + int(np.argmax(plain * first + some))
        return Ranks(
            fullest=int(held.max()),
            beside_head=int(held[placement[-1]]),
            first=int(held[0]),
            middle=int(held[middle]),
            sparsest=int(held[sparsest]),
            densest=int(held[densest]),
            last=int(held[-1]),
            first_dense=int(dense[0]),
            middle_dense=int(dense[middle]),
            sparsest_dense=int(dense[sparsest]),
            densest_dense=int(dense[densest]),
            last_dense=int(dense[-1]),
        )
