"""Rising: ways to shard states by what they hold, and the least seconds of those that leave enough room.

Gathers and reductions layer by layer (`streams`) only lengthen the passes, and so the slowest rank's work, by `longer`
a layer; `after` comes on top at the end of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array, Columns
from shardsmith.design.planner.space import Index

ROUNDING = 1024.0
"""Bytes that a bound on bytes allows for sums that are rounded."""
FAR = 2.0**46
"""Bytes that no rank holds."""


@dataclass(frozen=True, kw_only=True)
class Fastest(Columns):
    """Of the ways that leave enough room to each plan: the least `after` without (`never`) and with streams (`often`),
    infinite where there are none; and the least `longer` of those with.
    """

    never: Array
    often: Array
    longer: Array

    def floor(self, whole: Array, streamed: Array, passes: Array) -> Array:
        """Seconds that no way goes below: `whole` ones in the pipeline without streams, and at least `streamed` with
        them, of which `passes` layers become longer.
        """
        return np.minimum(whole + self.never, streamed + passes * self.longer + self.often)


@dataclass(frozen=True, kw_only=True)
class Rising:
    """Options of kinds of plans (rows) by rising bytes of states, and what the fastest of all up to each costs."""

    size: Array
    never: Array
    often: Array
    longer: Array

    @classmethod
    def of(cls, counts: Index, size: Array, streams: NDArray[np.bool_], after: Array, longer: Array) -> Self:
        """Of options that stand one after another, so many of each kind."""
        kind = np.repeat(np.arange(len(counts)), counts)
        place = kind, np.arange(len(kind)) - np.repeat(np.cumsum(counts) - counts, counts)
        columns = [np.full((len(counts), int(counts.max(initial=1))), np.inf) for _ in range(4)]
        costs = np.where(streams, np.inf, after), np.where(streams, after, np.inf), np.where(streams, longer, np.inf)
        for column, values in zip(columns, (size, *costs), strict=True):
            column[place] = values
        order = np.argsort(columns[0], axis=1, kind="stable")
        size, *least = (np.take_along_axis(column, order, axis=1) for column in columns)
        never, often, longer = (np.minimum.accumulate(column, axis=1) for column in least)
        # Where no option streams, `often` is infinite already.
        return cls(size=size, never=never, often=often, longer=np.where(np.isfinite(longer), longer, 0.0))

    def fastest(self, kind: Index, room: Array) -> Fastest:
        """Of plans of these kinds the ways that hold no more than `room` bytes on one rank."""
        width = self.size.shape[1]
        # One sorted list of all kinds, each so far from the one before that no rank's bytes reach it.
        steps = np.minimum(self.size, FAR - 1.0) + FAR * np.arange(len(self.size))[:, None]
        wanted = FAR * kind + np.clip(room + ROUNDING, -1.0, FAR / 2.0)
        fits = np.searchsorted(steps.ravel(), wanted, side="right") - width * kind
        at, some = (kind, np.maximum(fits - 1, 0)), fits > 0
        return Fastest(
            never=np.where(some, self.never[at], np.inf),
            often=np.where(some, self.often[at], np.inf),
            longer=self.longer[at],
        )
