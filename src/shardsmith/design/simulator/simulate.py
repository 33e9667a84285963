"""Simulate one step of an order: who computes, sends, reduces and waits when.

The rules are the runtime's. A rank performs its list in order; an action starts when the rank is free and its
input has arrived; a message leaves when its producer ends, and messages of one rank in one direction leave one
after another; nothing else waits for a message. A stage's buckets are reduced on the rank's data lane, in order,
each from the moment when backward has filled it. The step ends with the last reduction and the work after it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from shardsmith.design.simulator.lengths import StepLengths
from shardsmith.schedule.ir import Action, Kind, Order, needs
from shardsmith.timeline import LaneKind, Span, Timeline


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """One simulated step: its `seconds`, the idle share of compute lanes up to the last action, and the timeline."""

    seconds: float
    bubble: float
    exposed_reduce: float
    timeline: Timeline


def simulate(
    order: Order,
    lengths: StepLengths,
    *,
    reduce_each: bool = False,
    gather_each: bool = False,
    record: bool = True,
) -> Simulated:
    """Run `order` with `lengths`; exact on closed forms when only compute takes time.

    `reduce_each` reduces after every microbatch (ZeRO 2 and 3), `gather_each` gathers weights in every pass
    (ZeRO 3). Without `record` only the figures are kept, which is several times faster.
    """
    run = _Run(order=order, lengths=lengths, reduce_each=reduce_each, gather_each=gather_each, record=record)
    run.go()
    return run.result()


@dataclass
class _Run:
    order: Order
    lengths: StepLengths
    reduce_each: bool
    gather_each: bool
    record: bool
    arrived: dict[Action, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks = self.order.pipeline
        self.free = [0.0] * ranks
        self.busy = [0.0] * ranks
        self.data_free = [0.0] * ranks
        self.wire_free: dict[tuple[int, bool], float] = {}
        self.done = [0] * ranks
        self.lasts = [_last_backward(actions) for actions in self.order.ranks]
        self.pace = [self.lengths.slow.get(rank, 1.0) for rank in range(ranks)]

    def go(self) -> None:
        """Advance every rank as far as its inputs allow, until all are done."""
        waiting: dict[Action, list[int]] = {}
        ready = deque(range(self.order.pipeline))
        while ready:
            rank = ready.popleft()
            actions = self.order.ranks[rank]
            while self.done[rank] < len(actions):
                at = self.done[rank]
                together = actions[at : at + 2] if actions[at] in self.order.pairs else actions[at : at + 1]
                begin, missing = self._inputs(rank, together)
                if missing:
                    for alternative in missing:
                        waiting.setdefault(alternative, []).append(rank)
                    break
                self._perform(rank, together, begin)
                self.done[rank] += len(together)
                for action in together:
                    ready.extend(waiting.pop(action, ()))
        stuck = [rank for rank, n in enumerate(self.done) if n < len(self.order.ranks[rank])]
        assert not stuck, f"the order is not legal: ranks {stuck} never finish"

    def result(self) -> Simulated:
        """The figures of the step."""
        computed = max(self.free)
        reduced = max(computed, *self.data_free)
        if self.record and self.lengths.end:
            for rank in range(self.order.pipeline):
                self._span(rank, "compute", "optimizer", reduced, reduced + self.lengths.end)
        bubble = 1.0 - sum(self.busy) / (computed * self.order.pipeline) if computed else 0.0
        return Simulated(
            seconds=reduced + self.lengths.end,
            bubble=bubble,
            exposed_reduce=reduced - computed,
            timeline=Timeline(origin="simulated", spans=tuple(self.spans)),
        )

    def _inputs(self, rank: int, together: tuple[Action, ...]) -> tuple[float, tuple[Action, ...]]:
        """When the rank and all inputs are there, or the alternatives of an input that does not exist yet."""
        begin = self.free[rank]
        for action in together:
            for one_of in needs(action, self.order.stages):
                found = [self.arrived[a] for a in one_of if a in self.arrived]
                if not found:
                    return begin, one_of
                begin = max(begin, found[0])
        return begin, ()

    def _perform(self, rank: int, together: tuple[Action, ...], begin: float) -> None:
        stages, halves = self.lengths.stages, []
        for action in together:
            length = stages[action.stage].of(action.kind) * self.pace[rank]
            if self.gather_each and action.kind is not Kind.W:
                begin, length = self._gathered(rank, action, begin, length)
            halves.append(length)
        whole = sum(halves)
        if len(halves) == 2:
            whole -= self.lengths.pair_gain * min(halves)
        end = begin + whole
        self.free[rank], self.busy[rank] = end, self.busy[rank] + whole
        share = begin
        for action, length in zip(together, halves, strict=True):
            part = length * whole / sum(halves) if whole else 0.0
            if self.record:
                self._span(rank, "compute", str(action), share, share + part, action)
                self._tensor_span(rank, action, share, share + part)
            share += part
            self.arrived[action] = self._send(rank, action, end)
            if action.kind in (Kind.B, Kind.W) and (self.reduce_each or self.lasts[rank][action.stage] == action):
                self._reduce(rank, action, end - part, end)

    def _gathered(self, rank: int, action: Action, begin: float, length: float) -> tuple[float, float]:
        """A pass over streamed weights: gathers run beside the compute, and only what is longer is waited for."""
        gather = self.lengths.stages[action.stage].gather
        if not gather:
            return begin, length
        start = max(begin, self.data_free[rank])
        self.data_free[rank] = start + gather
        self._span(rank, "data", f"gather {action}", start, start + gather, action)
        return begin, max(length, start + gather - begin)

    def _send(self, rank: int, action: Action, end: float) -> float:
        """When what `action` made is at its consumer: at once on the same rank, else after its turn on the wire."""
        forward = action.kind is Kind.F
        to = action.stage + 1 if forward else action.stage - 1
        if action.kind is Kind.W or not 0 <= to < self.order.stages or self.order.placement[to] == rank:
            return end
        seconds = self.lengths.stages[action.stage].transfer
        start = max(end, self.wire_free.get((rank, forward), 0.0))
        self.wire_free[rank, forward] = start + seconds
        if seconds:
            self._span(rank, "pipeline", f"send {action}", start, start + seconds, action)
        return start + seconds

    def _reduce(self, rank: int, action: Action, begin: float, end: float) -> None:
        stage = self.lengths.stages[action.stage]
        if not stage.reduce:
            return
        each = stage.reduce / stage.buckets
        for bucket in range(stage.buckets):
            filled = begin + (end - begin) * (bucket + 1) / stage.buckets
            start = max(filled, self.data_free[rank])
            self.data_free[rank] = start + each
            self._span(rank, "data", f"reduce {action.stage}.{bucket}", start, start + each, action)

    def _tensor_span(self, rank: int, action: Action, begin: float, end: float) -> None:
        stage = self.lengths.stages[action.stage]
        inside = stage.tensor_forward if action.kind is Kind.F else stage.tensor_backward
        if inside and action.kind is not Kind.W:
            self._span(rank, "tensor", f"tensor {action}", end - min(inside, end - begin), end, action)

    def _span(
        self, rank: int, lane: LaneKind, name: str, start: float, end: float, action: Action | None = None
    ) -> None:
        if self.record:
            stage, m = (action.stage, action.microbatch) if action else (-1, -1)
            self.spans.append(Span(rank=rank, lane=lane, name=name, start=start, end=end, stage=stage, microbatch=m))


def _last_backward(actions: tuple[Action, ...]) -> dict[int, Action]:
    return {a.stage: a for a in actions if a.kind in (Kind.B, Kind.W)}
