"""Found: what a search keeps of the plans that it has priced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array
from shardsmith.design.cost.layouts import Layouts
from shardsmith.design.planner.space import Index
from shardsmith.design.planner.tables import joined


@dataclass(kw_only=True)
class Found:
    """What a search has kept: the best plan of every combination of degrees, and the front of time and memory."""

    best: Array
    """Seconds of the best plan that fits, a combination of degrees each; infinity where none does."""
    plans: dict[int, Layouts] = field(default_factory=dict)
    front: Layouts | None = None
    front_seconds: Array = field(default_factory=lambda: np.empty(0))
    front_bytes: Array = field(default_factory=lambda: np.empty(0))
    smallest: Layouts | None = None
    """The plan with the least memory, whether it fits or not."""
    smallest_bytes: float = np.inf
    searched: int = 0
    total: float = 0.0

    @property
    def dismissed(self) -> int:
        """Plans that were never priced, because a bound ruled them out."""
        return int(self.total) - self.searched

    def mark(self, count: int) -> float:
        """Seconds that a plan must beat to be among the best `count` combinations of degrees."""
        return float(np.partition(self.best, count - 1)[count - 1]) if len(self.best) >= count else np.inf

    def threshold(self, count: int) -> Array:
        """Seconds that a plan of each combination of degrees must beat to be kept among the best `count`."""
        return np.minimum(self.best, self.mark(count))

    def ranked(self) -> list[Layouts]:
        """The best plan of each combination of degrees, fastest first."""
        order = sorted(self.plans, key=lambda at: self.best[at])
        return [self.plans[at] for at in order]

    def keep(self, seconds: Array, size: Array, group: Index, limit: float, rows: Callable[[Index], Layouts]) -> None:
        """Take in priced plans, of which `rows` makes those that are kept; infinite `seconds` are those of no use."""
        self.searched += len(seconds)
        least = int(np.argmin(size))
        if size[least] < self.smallest_bytes:
            self.smallest, self.smallest_bytes = rows(np.array([least])), float(size[least])
        fits = np.flatnonzero((size <= limit) & np.isfinite(seconds))
        if not len(fits):
            return
        better = fits[seconds[fits] < self.best[group[fits]]]
        order = better[np.lexsort((size[better], seconds[better]))]
        for at, row in zip(*_first_of(group[order]), strict=True):
            self.best[at], self.plans[int(at)] = seconds[order[row]], rows(order[row : row + 1])
        self._extend_front(fits, seconds, size, rows)

    def _extend_front(self, fits: Index, seconds: Array, size: Array, rows: Callable[[Index], Layouts]) -> None:
        """Keep plans that hold less than every faster one."""
        if len(self.front_seconds):
            # The least that any plan of the front as fast as this one holds.
            at = np.searchsorted(self.front_seconds, seconds[fits], side="right")
            held = np.concatenate([[np.inf], self.front_bytes])[at]
            fits = fits[size[fits] < held]
        order = fits[np.lexsort((size[fits], seconds[fits]))]
        lead = order[_leads(size[order])]
        if not len(lead):
            return
        parts, times, sizes = [rows(lead)], [seconds[lead]], [size[lead]]
        if self.front is not None:
            parts, times, sizes = [self.front, *parts], [self.front_seconds, *times], [self.front_bytes, *sizes]
        every, t, m = joined(parts), np.concatenate(times), np.concatenate(sizes)
        order = np.lexsort((m, t))
        order = order[_leads(m[order])]
        self.front, self.front_seconds, self.front_bytes = every.select(order), t[order], m[order]


@dataclass(kw_only=True)
class Rivals(Found):
    """The best plan of each kind, as far as it can be the best of any of some sets of kinds, here rows of `sets`."""

    sets: NDArray[np.bool_]

    def threshold(self, count: int) -> Array:
        """Seconds that a plan of each kind must beat to be the best of a set."""
        of_set = np.where(self.sets, self.best, np.inf).min(axis=1, initial=np.inf)
        wanted = np.where(self.sets, of_set[:, None], -np.inf).max(axis=0, initial=-np.inf)
        return np.asarray(np.minimum(self.best, wanted), dtype=np.float64)

    def best_of(self, which: int) -> tuple[Layouts, float] | None:
        """The best plan of a set, and its seconds; None where none fits."""
        kinds = [kind for kind in self.plans if self.sets[which, kind]]
        if not kinds:
            return None
        first = min(kinds, key=lambda kind: self.best[kind])
        return self.plans[first], float(self.best[first])


def _leads(size: Array) -> Index:
    """Which of these sizes are below all before them."""
    if not len(size):
        return np.empty(0, dtype=np.intp)
    return np.flatnonzero(np.concatenate([[True], size[1:] < np.minimum.accumulate(size)[:-1]]))


def _first_of(group: Index) -> tuple[Index, Index]:
    """The different groups, and the first row of each."""
    groups, first = np.unique(group, return_index=True)
    return groups, first
