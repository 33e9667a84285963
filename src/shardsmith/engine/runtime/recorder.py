"""The recorder: counts every collective, and on request keeps a measured Timeline."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from shardsmith.timeline import LaneKind, Span


class Traffic(NamedTuple):
    """One kind of communication: on which axis, which collective, what for."""

    axis: LaneKind
    kind: str
    purpose: str


@dataclass
class Tally:
    """How often, how many payload bytes in all, and how many bytes this rank put on the wire itself."""

    count: int = 0
    bytes: int = 0


_UNTIMED = nullcontext()


@dataclass
class Recorder:
    """Counts and spans of one rank; both are off until `counting` or `tracing` is set.

    Times are `time.monotonic()` seconds, one clock for all processes of a host; `offset` is added to
    them so that hosts agree (see `align`).
    """

    rank: int
    counting: bool = False
    tracing: bool = False
    offset: float = 0.0
    tallies: dict[Traffic, Tally] = field(default_factory=lambda: defaultdict(Tally))
    spans: list[Span] = field(default_factory=list)

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self.tallies.clear()
        self.spans.clear()

    def count(self, axis: LaneKind, kind: str, purpose: str, size: int) -> None:
        """Count one call of `size` payload bytes."""
        if self.counting:
            tally = self.tallies[Traffic(axis, kind, purpose)]
            tally.count += 1
            tally.bytes += size

    def launched(self, axis: LaneKind, kind: str, purpose: str, size: int, work: dist.Work) -> dist.Work:
        """Count an asynchronous collective that has just been started as `work`, and time it to its end.

        Returns what to wait on. Some works do not tell when they end (gloo's reduce-scatter): their span ends
        when they have been waited for.
        """
        self.count(axis, kind, purpose, size)
        if not self.tracing:
            return work
        start = time.monotonic()

        def finished(_: object = None) -> None:
            self._add(axis, f"{kind} {purpose}", start, size=size)

        try:
            work.get_future().add_done_callback(finished)
        except RuntimeError:
            return _Waited(work, finished)
        return work

    def communicating(self, axis: LaneKind, kind: str, purpose: str, size: int) -> AbstractContextManager[None]:
        """Count and time a blocking collective of `size` payload bytes."""
        self.count(axis, kind, purpose, size)
        return self.waiting(axis, f"{kind} {purpose}", size)

    def waiting(self, axis: LaneKind, name: str, size: int) -> AbstractContextManager[None]:
        """Time, without counting, a wait for `size` bytes that were asked for earlier."""
        return self._timing(axis, name, size) if self.tracing else _UNTIMED

    @contextmanager
    def _timing(self, axis: LaneKind, name: str, size: int) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._add(axis, name, start, size=size)

    def computed(self, name: str, start: float, *, stage: int, microbatch: int) -> None:
        """Note a compute action that began at `start` and ends now."""
        if self.tracing:
            self._add("compute", name, start, stage=stage, microbatch=microbatch)

    def _add(
        self, lane: LaneKind, name: str, start: float, *, stage: int = -1, microbatch: int = -1, size: int = 0
    ) -> None:
        self.spans.append(
            Span(
                rank=self.rank,
                lane=lane,
                name=name,
                start=start + self.offset,
                end=time.monotonic() + self.offset,
                stage=stage,
                microbatch=microbatch,
                bytes=size,
            )
        )


class _Waited(dist.Work):
    """A work that reports its end when it has been waited for."""

    def __init__(self, work: dist.Work, finished: Callable[[], None]) -> None:
        super().__init__()
        self.work, self.finished = work, finished

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait as `work` does."""
        done = self.work.wait(timeout)
        self.finished()
        return done
