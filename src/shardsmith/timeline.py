"""Span and Timeline: one type for simulated and for measured time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

LaneKind = Literal["compute", "tensor", "pipeline", "data", "expert", "context"]
LANE_KINDS: tuple[LaneKind, ...] = ("compute", "tensor", "pipeline", "data", "expert", "context")


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that took time on one lane (a rank's compute, or its communication on one axis).

    `start` and `end` are seconds on a clock that all ranks of the timeline share. `stage` and
    `microbatch` are -1 where they do not apply; `bytes` is what this rank sent.
    """

    rank: int
    lane: LaneKind
    name: str
    start: float
    end: float
    stage: int = -1
    microbatch: int = -1
    bytes: int = 0

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Spans of one training step (or several) over all ranks.

    `origin` says whether the spans were measured or simulated; `notes` must say so when actions
    were paced, since then lengths are chosen and only their arrangement is measured.
    """

    origin: Literal["measured", "simulated"]
    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()
    groups: dict[str, Any] = field(default_factory=dict)

    @property
    def start(self) -> float:
        """Earliest start of any compute span, seconds."""
        return min(s.start for s in self.compute())

    @property
    def end(self) -> float:
        """Latest end of any compute span, seconds."""
        return max(s.end for s in self.compute())

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that appear, ascending."""
        return tuple(sorted({s.rank for s in self.spans}))

    def compute(self, rank: int | None = None) -> list[Span]:
        """Compute spans, of one rank or of all."""
        return [s for s in self.spans if s.lane == "compute" and rank in (None, s.rank)]

    def busy(self, rank: int) -> float:
        """Seconds in which `rank` computes (spans of one lane never overlap)."""
        return sum(s.seconds for s in self.compute(rank))

    def idle_share(self) -> float:
        """Share of ranks x makespan in which nothing computes: the bubble *of the step*, 0 to 1.

        With equal stages this is (P-1)/(m+P-1) for GPipe and 1F1B (Narayanan et al. 2021).
        """
        ranks = self.ranks
        span = self.end - self.start
        return 1.0 - sum(self.busy(r) for r in ranks) / (span * len(ranks)) if span > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` reads them back."""
        return {
            "origin": self.origin,
            "notes": list(self.notes),
            "groups": self.groups,
            "spans": [asdict(s) for s in self.spans],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Timeline:
        """The inverse of `as_json`."""
        return Timeline(
            origin=data["origin"],
            notes=tuple(data["notes"]),
            groups=dict(data.get("groups", {})),
            spans=tuple(Span(**s) for s in data["spans"]),
        )

    def chrome_trace(self) -> dict[str, Any]:
        """The Trace Event JSON that Perfetto and chrome://tracing open: a process a rank, a thread a lane."""
        zero = min((s.start for s in self.spans), default=0.0)
        events: list[dict[str, Any]] = []
        for rank in self.ranks:
            events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
            for tid, lane in enumerate(LANE_KINDS):
                events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": lane}})
        events.extend(_trace_events(self.spans, zero))
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"origin": self.origin, "notes": list(self.notes)},
        }


def _trace_events(spans: Iterable[Span], zero: float) -> Iterable[dict[str, Any]]:
    for s in spans:
        args = {"stage": s.stage, "microbatch": s.microbatch, "bytes": s.bytes}
        yield {
            "ph": "X",
            "name": s.name,
            "cat": s.lane,
            "pid": s.rank,
            "tid": LANE_KINDS.index(s.lane),
            "ts": (s.start - zero) * 1e6,
            "dur": s.seconds * 1e6,
            "args": {k: v for k, v in args.items() if v != -1},
        }
