"""Found: what a search keeps of the plans that it has priced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array
from shardsmith.design.cost.layouts import Layouts
from shardsmith.design.planner.space import Index


@dataclass(kw_only=True)
class Found:
    """What a search has kept: the best plan of every combination of degrees."""

    best: Array
    """Seconds of the best plan that fits, a combination of degrees each; infinity where none does."""
    limit: float
    """Bytes that no rank may go beyond."""
    plans: dict[int, Layouts] = field(default_factory=dict)
    ceiling: float = np.inf
    """Seconds from which on plans are of no interest."""
    searched: int = 0
    """Plans weighed by placement: what all their ways to shard states hold and take, whatever the schedule."""
    priced: int = 0
    """Those of them whose own time was computed, beside the memory of every decisive rank."""
    total: float = 0.0

    @property
    def dismissed(self) -> int:
        """Plans that were never priced, because a bound ruled them out."""
        return int(self.total) - self.searched

    def mark(self, count: int) -> float:
        """Seconds that a plan must beat to be among the best `count` combinations of degrees, below the ceiling."""
        last = float(np.partition(self.best, count - 1)[count - 1]) if len(self.best) >= count else np.inf
        return min(last, self.ceiling)

    def threshold(self, count: int) -> Array:
        """Seconds that a plan of each combination of degrees must beat to be kept among the best `count`."""
        return np.minimum(self.best, self.mark(count))

    def ranked(self) -> list[Layouts]:
        """The best plan of each combination of degrees, fastest first."""
        order = sorted(self.plans, key=lambda at: self.best[at])
        return [self.plans[at] for at in order]

    def keep(self, seconds: Array, size: Array, group: Index, rows: Callable[[Index], Layouts]) -> None:
        """Take in priced plans, of which `rows` makes those that are kept."""
        better = np.flatnonzero((size <= self.limit) & (seconds < np.minimum(self.best[group], self.ceiling)))
        order = better[np.lexsort((size[better], seconds[better]))]
        for at, row in zip(*_first_of(group[order]), strict=True):
            self.best[at], self.plans[int(at)] = seconds[order[row]], rows(order[row : row + 1])


@dataclass(kw_only=True)
class Leanest(Found):
    """The plan with the least memory, however slow: `limit` bytes."""

    def threshold(self, count: int) -> Array:
        """Time is no object."""
        return np.full(len(self.best), np.inf)

    def keep(self, seconds: Array, size: Array, group: Index, rows: Callable[[Index], Layouts]) -> None:
        """Take in priced plans."""
        if len(size) and size.min() < self.limit:
            least = np.array([np.argmin(size)])
            self.limit, self.plans = float(size[least[0]]), {0: rows(least)}


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


@dataclass(kw_only=True)
class Joint(Found):
    """Several searches made as one: `parts`, each with its own group for every group of this one."""

    parts: Sequence[tuple[Found, Index]]

    def threshold(self, count: int) -> Array:
        """Seconds that a plan must beat to be kept by any of them."""
        return np.asarray(np.maximum.reduce([part.threshold(count)[own] for part, own in self.parts]))

    def keep(self, seconds: Array, size: Array, group: Index, rows: Callable[[Index], Layouts]) -> None:
        """Let each take in priced plans."""
        for part, own in self.parts:
            part.keep(seconds, size, own[group], rows)


def _first_of(group: Index) -> tuple[Index, Index]:
    """The different groups, and the first row of each."""
    groups, first = np.unique(group, return_index=True)
    return groups, first
