"""The pipeline interpreter: performs one rank's lowered steps, whatever the schedule.

It knows payloads by name (who produced them, for which microbatch) and nothing of tensors, stages or
process groups: `Work` computes, `Transport` moves. A hop between two stages of one rank is a hand-over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from shardsmith.schedule.ir import Action, Kind
from shardsmith.schedule.lower import Exchange, Payload, Reduce, Reshard, Step, Unshard, reduced

T = TypeVar("T")


class Key(NamedTuple):
    """What travels: the `payload` that `stage` produced for `microbatch`."""

    payload: Payload
    stage: int
    microbatch: int


class Work(Protocol[T]):
    """What the interpreter asks of the rank's stages."""

    def perform(self, action: Action, incoming: T | None) -> T | None:
        """Compute `action` from what arrived (None at the ends of the pipeline); return what goes on."""

    def reduce(self, stage: int) -> None:
        """All gradients of `stage` are complete: flush their reduction."""

    def unshard(self, stage: int) -> None:
        """Weights of `stage` are about to be used."""

    def reshard(self, stage: int) -> None:
        """Weights of `stage` are not used until the next `unshard`."""

    def before(self, action: Action, *, reduced: bool) -> None:
        """`action` comes next; `reduced` if a reduction of its stage follows it."""


class Transport(Protocol[T]):
    """What the interpreter asks of the wire."""

    def exchange(self, sends: Sequence[tuple[Key, int, T]], receives: Sequence[tuple[Key, int]]) -> None:
        """Start one batch: send each value to its pipeline rank, receive each key from its pipeline rank."""

    def take(self, key: Key) -> T:
        """The value received for `key`, waiting for it if need be."""

    def finish(self) -> None:
        """Return when everything sent has left."""


class Interpreter(Generic[T]):
    """Runs `steps`, the program of one pipeline rank, over and over."""

    def __init__(self, steps: Sequence[Step], stages: int) -> None:
        self.steps = tuple(steps)
        self.stages = stages
        self._received = {
            Key(t.payload, t.stage, t.microbatch) for s in steps if isinstance(s, Exchange) for t in s.receives
        }
        self._reduced = reduced(self.steps)

    def run(self, work: Work[T], transport: Transport[T]) -> None:
        """Perform one training step."""
        held: dict[Key, T] = {}
        for step in self.steps:
            if isinstance(step, Exchange):
                sends = [
                    (Key(t.payload, t.stage, t.microbatch), t.target, held.pop(Key(t.payload, t.stage, t.microbatch)))
                    for t in step.sends
                ]
                receives = [(Key(t.payload, t.stage, t.microbatch), t.source) for t in step.receives]
                transport.exchange(sends, receives)
            elif isinstance(step, Reduce):
                work.reduce(step.stage)
            elif isinstance(step, Unshard):
                work.unshard(step.stage)
            elif isinstance(step, Reshard):
                work.reshard(step.stage)
            else:
                work.before(step, reduced=step in self._reduced)
                outgoing = work.perform(step, self._incoming(step, held, transport))
                produced = _produces(step, self.stages)
                if produced is not None:
                    assert outgoing is not None, f"{step} produced nothing to pass on"
                    held[produced] = outgoing
        transport.finish()
        assert not held, f"never passed on: {sorted(held)}"

    def _incoming(self, action: Action, held: dict[Key, T], transport: Transport[T]) -> T | None:
        key = _consumes(action, self.stages)
        if key is None:
            return None
        return transport.take(key) if key in self._received else held.pop(key)


def _consumes(action: Action, stages: int) -> Key | None:
    if action.kind is Kind.F and action.stage > 0:
        return Key(Payload.ACTIVATION, action.stage - 1, action.microbatch)
    if action.kind in (Kind.B, Kind.I) and action.stage < stages - 1:
        return Key(Payload.GRADIENT, action.stage + 1, action.microbatch)
    return None


def _produces(action: Action, stages: int) -> Key | None:
    if action.kind is Kind.F and action.stage < stages - 1:
        return Key(Payload.ACTIVATION, action.stage, action.microbatch)
    if action.kind in (Kind.B, Kind.I) and action.stage > 0:
        return Key(Payload.GRADIENT, action.stage, action.microbatch)
    return None
