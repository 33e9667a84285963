"""Simulate one step of an order: who computes, sends, reduces and waits when.

The rules are the runtime's. A rank performs its list in order; an action starts when the rank is free and its
input has arrived; a message leaves when its producer ends, and messages of one rank in one direction leave one
after another. A stage's buckets are reduced on the rank's data lane, in order, each from the moment when backward has
filled it. The step ends with the last reduction and the work after it; in an order without a flush every backward
is followed by its own reduction and update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from shardsmith.design.simulator.lengths import StepLengths
from shardsmith.schedule.ir import Action, Kind, Order
from shardsmith.timeline import LANE_KINDS, LaneKind, Span, Timeline

NEVER = -1.0
MAKES_GRADIENTS = (Kind.B, Kind.W)

Gather = Literal["never", "per_pass", "per_step"]


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """One simulated step: its `seconds`, the idle share of compute lanes up to the last action, and the timeline.

    `busy` holds the seconds in which each lane of each rank is occupied; `exposed_reduce` is what the reduction of
    gradients adds after the last action.
    """

    seconds: float
    bubble: float
    exposed_reduce: float
    busy: Mapping[LaneKind, tuple[float, ...]]
    timeline: Timeline


def simulate(
    order: Order,
    lengths: StepLengths,
    *,
    reduce_each: bool = False,
    gather: Gather = "never",
    record: bool = True,
) -> Simulated:
    """Run `order` with `lengths`; exact on closed forms when only compute takes time.

    `reduce_each` reduces after every microbatch (ZeRO 2 and 3), `gather` makes sharded weights whole (ZeRO 3) in
    every pass or before a stage's first. Without `record` only the figures are kept, which is several times faster.
    """
    run = _Run(order=order, lengths=lengths, reduce_each=reduce_each, gather=gather, record=record)
    run.go()
    return run.result()


@dataclass
class _Run:
    order: Order
    lengths: StepLengths
    reduce_each: bool
    gather: Gather
    record: bool
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks, places = self.order.pipeline, self.order.stages * self.order.microbatches
        # When what an action of a stage and microbatch made is at its consumer; never, as long as it is not done.
        self.activation, self.gradient, self.deferred = ([NEVER] * places for _ in range(3))
        self.free = [0.0] * ranks
        self.data_free = [0.0] * ranks
        self.busy: dict[LaneKind, list[float]] = {lane: [0.0] * ranks for lane in LANE_KINDS}
        self.wire_free: dict[tuple[int, bool], float] = {}
        self.done = [0] * ranks
        self.gathered: set[int] = set()
        # Reductions that are ready or will be, and have not begun: a gather that a pass waits for goes first.
        self.pending: list[deque[tuple[float, float, str, Action]]] = [deque() for _ in range(ranks)]
        self.lasts = [_last_backward(actions) for actions in self.order.ranks]
        pace = [self.lengths.slow.get(rank, 1.0) for rank in self.order.placement]
        stages = self.lengths.stages
        self.seconds = [{kind: s.slowed(kind, p) for kind in Kind} for s, p in zip(stages, pace, strict=True)]
        self.next = [_other(self.order, stage, 1) for stage in range(self.order.stages)]
        self.previous = [_other(self.order, stage, -1) for stage in range(self.order.stages)]
        self.each = self.reduce_each or self.order.asynchronous

    def go(self) -> None:
        """Advance every rank as far as its inputs allow, until all are done."""
        waiting: dict[tuple[bool, int], list[int]] = {}
        ready = deque(range(self.order.pipeline))
        pairs = self.order.pairs
        while ready:
            rank = ready.popleft()
            actions = self.order.ranks[rank]
            while (at := self.done[rank]) < len(actions):
                together = actions[at : at + 2] if actions[at] in pairs else actions[at : at + 1]
                begin, missing = self._inputs(rank, together)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                self._perform(rank, together, begin)
                self.done[rank] += len(together)
                for kind, stage, m in together:
                    ready.extend(waiting.pop((kind is Kind.F, stage * self.order.microbatches + m), ()))
        stuck = [rank for rank, n in enumerate(self.done) if n < len(self.order.ranks[rank])]
        assert not stuck, f"the order is not legal: ranks {stuck} never finish"

    def result(self) -> Simulated:
        """The figures of the step."""
        for rank in range(self.order.pipeline):
            self._drain(rank)
        computed = max(self.free)
        reduced = max(computed, *self.data_free)
        busy = sum(self.busy["compute"])
        end = 0.0 if self.order.asynchronous else self.lengths.end
        for rank in range(self.order.pipeline if end else 0):
            self._span(rank, "compute", "optimizer", reduced, reduced + end)
        return Simulated(
            seconds=reduced + end,
            bubble=1.0 - busy / (computed * self.order.pipeline) if computed else 0.0,
            exposed_reduce=reduced - computed,
            busy={lane: tuple(seconds) for lane, seconds in self.busy.items()},
            timeline=Timeline(origin="simulated", spans=tuple(self.spans)),
        )

    def _inputs(self, rank: int, together: tuple[Action, ...]) -> tuple[float, tuple[bool, int] | None]:
        """When the rank and all inputs are there, or what does not exist yet: (made by a forward, its place)."""
        begin, of_stage = self.free[rank], self.order.microbatches
        for kind, stage, m in together:
            place = stage * of_stage + m
            if kind is Kind.F:
                if stage == 0:
                    continue
                made, found = self.activation, place - of_stage
            elif kind is Kind.W:
                made, found = self.deferred, place
            else:
                last = stage == self.order.stages - 1
                made, found = (self.activation, place) if last else (self.gradient, place + of_stage)
            if made[found] == NEVER:
                return begin, (made is self.activation, found)
            begin = max(begin, made[found])
        return begin, None

    def _perform(self, rank: int, together: tuple[Action, ...], begin: float) -> None:
        halves = []
        for action in together:
            length = self.seconds[action.stage][action.kind]
            if self._gathers(action):
                length = self._gathered(rank, action, begin, length)
            halves.append(length)
        whole = sum(halves)
        if len(halves) == 2:
            whole -= self.lengths.pair_gain * min(halves)
        end = begin + whole
        self.free[rank], share = end, begin
        for action, length in zip(together, halves, strict=True):
            part = length * whole / sum(halves) if whole else 0.0
            self._span(rank, "compute", str(action) if self.record else "", share, share + part, action)
            self._inside(rank, action, share, share + part)
            share += part
            self._send(rank, action, end)
            if action.kind in MAKES_GRADIENTS and (self.each or self.lasts[rank][action.stage] == action):
                self._reduce(rank, action, end - part, end)

    def _gathers(self, action: Action) -> bool:
        if action.kind is Kind.W or self.gather == "never":
            return False
        return self.gather == "per_pass" or action.stage not in self.gathered

    def _gathered(self, rank: int, action: Action, begin: float, length: float) -> float:
        """Length of a pass over gathered weights: what cannot run beside the compute, or is longer, is waited for."""
        stage = self.lengths.stages[action.stage]
        if not stage.gather:
            return length
        self.gathered.add(action.stage)
        self._drain(rank, begin)
        start = max(begin, self.data_free[rank])
        self.data_free[rank] = start + stage.gather
        self._span(rank, "data", f"gather {action}", start, start + stage.gather, action)
        return max(length + (1.0 - stage.alongside) * stage.gather, start + stage.gather - begin)

    def _send(self, rank: int, action: Action, end: float) -> None:
        """Hand over what `action` made: at once on the same rank, else after its turn on the wire."""
        forward, place = action.kind is Kind.F, action.stage * self.order.microbatches + action.microbatch
        if action.kind is Kind.I:
            self.deferred[place] = end
        made, other = (self.activation, self.next) if forward else (self.gradient, self.previous)
        if action.kind is Kind.W:
            return
        if not other[action.stage]:
            made[place] = end
            return
        stage = self.lengths.stages[action.stage]
        start = max(end, self.wire_free.get((rank, forward), 0.0))
        made[place] = self.wire_free[rank, forward] = start + stage.transfer
        self.free[rank] = max(self.free[rank], end + stage.blocking * stage.transfer)
        if stage.transfer:
            self._span(rank, "pipeline", f"send {action}" if self.record else "", start, made[place], action)

    def _reduce(self, rank: int, action: Action, begin: float, end: float) -> None:
        """Queue the reduction of a stage's buckets; without a flush the update follows at once and waits for it."""
        stage = self.lengths.stages[action.stage]
        each = stage.reduce / stage.buckets
        for bucket in range(stage.buckets if stage.reduce else 0):
            filled = begin + (end - begin) * (bucket + 1) / stage.buckets
            name = f"reduce {action.stage}.{bucket}" if self.record else ""
            self.pending[rank].append((filled, each, name, action))
        if self.reduce_each:
            self.free[rank] = max(self.free[rank], end + (1.0 - stage.alongside) * stage.reduce)
        if self.order.asynchronous:
            self._drain(rank)
            start = max(self.free[rank], self.data_free[rank])
            self.free[rank] = start + self.lengths.end
            if self.lengths.end:
                self._span(rank, "compute", "update", start, self.free[rank], action)

    def _drain(self, rank: int, before: float = inf) -> None:
        """Run queued reductions that begin before a moment."""
        queue = self.pending[rank]
        while queue:
            filled, each, name, action = queue[0]
            start = max(filled, self.data_free[rank])
            if start >= before:
                return
            queue.popleft()
            self.data_free[rank] = start + each
            self._span(rank, "data", name, start, start + each, action)

    def _inside(self, rank: int, action: Action, begin: float, end: float) -> None:
        """Communication inside an action, drawn at its end: it is spread over the layers in truth."""
        if action.kind is Kind.W:
            return
        for lane, pair in self.lengths.stages[action.stage].inside.items():
            seconds = min(pair[action.kind is not Kind.F], end - begin)
            if seconds:
                self._span(rank, lane, f"{lane} {action}", end - seconds, end, action)

    def _span(
        self, rank: int, lane: LaneKind, name: str, start: float, end: float, action: Action | None = None
    ) -> None:
        self.busy[lane][rank] += end - start
        if self.record:
            stage, m = (action.stage, action.microbatch) if action else (-1, -1)
            self.spans.append(Span(rank=rank, lane=lane, name=name, start=start, end=end, stage=stage, microbatch=m))


def _other(order: Order, stage: int, step: int) -> bool:
    """Whether the stage `step` further exists and stands on another rank."""
    to = stage + step
    return 0 <= to < order.stages and order.placement[to] != order.placement[stage]


def _last_backward(actions: tuple[Action, ...]) -> dict[int, Action]:
    return {a.stage: a for a in actions if a.kind in MAKES_GRADIENTS}
