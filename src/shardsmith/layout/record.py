"""What one training step of one rank does: the same record of a step that was run and of one that was computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardsmith.layout.facts import CollectiveCount
from shardsmith.units import GIB

ITEMS = ("weights", "gradients", "optimizer", "inputs", "activations", "messages", "buckets", "gathered", "temporary")
"""What memory is for: three kinds of states between steps; the batch; what waits for backward (or for a weight
gradient that was put off); hidden states under way between stages; gradients under way between data ranks; weights
that are whole only for a while; and what a computation needs while it lasts."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One training step of global `rank`, on `pipeline_rank`.

    `memory` are bytes by item (`ITEMS`) at the moment when they are most together; `flops` are those of matrix
    products by part: `linear` and `scores` (convention in `layout/flops.py`).
    """

    rank: int
    pipeline_rank: int
    memory: Mapping[str, int] = field(hash=False)
    collectives: tuple[CollectiveCount, ...]
    flops: Mapping[str, int] = field(hash=False)

    @property
    def peak(self) -> int:
        """Bytes of all tensors at that moment."""
        return sum(self.memory.values())

    @property
    def total_flops(self) -> int:
        """FLOPs of all parts."""
        return sum(self.flops.values())

    def as_json(self) -> dict[str, Any]:
        """The record as plain JSON values: `peak_gib`, `memory_gib` by item, `collectives` by kind, `flops`."""
        return {
            "peak_gib": self.peak / GIB,
            "memory_gib": {item: self.memory.get(item, 0) / GIB for item in ITEMS},
            "collectives": by_kind(self.collectives),
            "flops": self.total_flops,
        }


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One rank's step as it was run (`run`) and as it was computed (`model`)."""

    run: StepRecord
    model: StepRecord

    @property
    def peak_error(self) -> float:
        """By what share of the run's peak the model's is larger (or smaller: negative)."""
        return self.model.peak / self.run.peak - 1.0

    @property
    def same_collectives(self) -> bool:
        """Whether both count the same collectives and messages: axis, kind, purpose, calls and bytes."""
        return set(self.run.collectives) == set(self.model.collectives)

    def as_json(self) -> dict[str, Any]:
        """The run's record, with the model's under `model` and model minus run under `difference`."""
        run, model = by_kind(self.run.collectives), by_kind(self.model.collectives)
        none = {"count": 0, "bytes": 0}
        kinds = {
            kind: {key: model.get(kind, none)[key] - run.get(kind, none)[key] for key in none}
            for kind in sorted({*run, *model})
        }
        return {
            "rank": self.run.rank,
            "pipeline_rank": self.run.pipeline_rank,
            **self.run.as_json(),
            "model": self.model.as_json(),
            "difference": {
                "peak": self.peak_error,
                "peak_gib": (self.model.peak - self.run.peak) / GIB,
                "collectives": kinds,
                "flops": self.model.total_flops - self.run.total_flops,
            },
        }


def by_kind(counts: Iterable[CollectiveCount]) -> dict[str, dict[str, int]]:
    """`{kind: {count, bytes}}`: calls and payload bytes of each kind of collective, over all axes and purposes."""
    found: dict[str, dict[str, int]] = {}
    for c in counts:
        here = found.setdefault(c.kind, {"count": 0, "bytes": 0})
        here["count"] += c.count
        here["bytes"] += c.bytes
    return dict(sorted(found.items()))
