"""Play an order by the clock, and count what each rank holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardsmith.schedule.ir import Action, Kind, Order, needs

Lengths = Mapping[Kind, float] | Callable[[Action], float]
"""How long an action takes: by kind, or by the action itself where stages differ."""

UNIT: Mapping[Kind, int] = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}
"""Unit lengths: a backward costs two forwards, and its halves one each."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """When each action starts and ends, in the unit of the lengths it was played with.

    The two of a pair have the same start and end. `busy` is the time spent computing, summed over ranks.
    """

    start: Mapping[Action, float]
    end: Mapping[Action, float]
    busy: float

    @property
    def step_time(self) -> float:
        """End of the last action; the step starts at 0."""
        return max(self.end.values(), default=0)


def advance(order: Order, lengths: Lengths) -> tuple[Played, tuple[int, ...]]:
    """Play `order` as far as its dependencies allow.

    Every rank performs its list in order, each action as soon as the rank is free and all inputs
    exist; communication takes no time. Returns the times, and how many actions each rank has
    performed: all of them where the order is legal.
    """
    length_of = lengths if callable(lengths) else lambda action: lengths[action.kind]
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    done: list[int] = [0] * order.pipeline
    free: list[float] = [0] * order.pipeline
    waiting: dict[Action, list[int]] = {}
    ready = deque(range(order.pipeline))
    busy: float = 0
    while ready:
        rank = ready.popleft()
        actions = order.ranks[rank]
        while done[rank] < len(actions):
            at = done[rank]
            together = actions[at : at + 2] if actions[at] in order.pairs else actions[at : at + 1]
            wanted = [one_of for action in together for one_of in needs(action, order.stages)]
            inputs = [([end[a] for a in one_of if a in end], one_of) for one_of in wanted]
            missing = next((one_of for ends, one_of in inputs if not ends), ())
            if missing:
                for alternative in missing:
                    waiting.setdefault(alternative, []).append(rank)
                break
            begin = max([free[rank], *(ends[0] for ends, _ in inputs)])
            length = sum(map(length_of, together))
            free[rank] = begin + length
            busy += length
            for action in together:
                start[action], end[action] = begin, free[rank]
                ready.extend(waiting.pop(action, ()))
            done[rank] += len(together)
    return Played(start=start, end=end, busy=busy), tuple(done)


def play(order: Order, lengths: Lengths = UNIT) -> Played:
    """Play a legal `order`: the times of all its actions, with free communication.

    `lengths` gives the time of one action of one stage, by kind or by action, all positive.
    """
    assert callable(lengths) or all(length > 0 for length in lengths.values()), "actions take time"
    played, done = advance(order, lengths)
    assert all(n == len(actions) for n, actions in zip(done, order.ranks, strict=True)), "the order is not legal"
    return played


class Live(NamedTuple):
    """What a rank holds, counted in (stage, microbatch) pairs.

    `activations`: forward done (or running), B or I not yet over, so everything saved is held.
    `deferred`: I over, W not yet over, so only inputs of linear layers and their output gradients are held.
    """

    activations: int
    deferred: int


def live(actions: Iterable[Action]) -> Iterator[Live]:
    """What one rank holds while it performs each of its `actions`."""
    activations = deferred = 0
    for action in actions:
        activations += action.kind is Kind.F
        yield Live(activations, deferred)
        activations -= action.kind in (Kind.B, Kind.I)
        deferred += (action.kind is Kind.I) - (action.kind is Kind.W)


def peak_live(order: Order) -> tuple[Live, ...]:
    """Per pipeline rank, the most it ever holds of either kind (the two peaks may lie at different times).

    One unit is one microbatch in one stage: with v stages per rank it is 1/v of the rank's layers.
    """
    peaks = []
    for actions in order.ranks:
        held = list(live(actions))
        peaks.append(Live(max((h.activations for h in held), default=0), max((h.deferred for h in held), default=0)))
    return tuple(peaks)


class Versions(NamedTuple):
    """What a rank needs of its weights: `held`, the most versions of a stage at once; `delay`, the most updates
    between the weights that a gradient was computed with and those it is added to."""

    held: int
    delay: int


def weight_versions(order: Order) -> tuple[Versions, ...]:
    """Per pipeline rank, versions held and delay of gradients, counted action by action.

    With a flush every microbatch of a step sees the same weights: 1 and 0. Without one a stage updates after each
    backward, and keeps the weights of every forward whose backward is to come (weight stashing).
    """
    if not order.asynchronous:
        return (Versions(1, 0),) * order.pipeline
    return tuple(_versions(actions) for actions in order.ranks)


def _versions(actions: Iterable[Action]) -> Versions:
    updates: dict[int, int] = {}
    stashed: dict[tuple[int, int], int] = {}
    held, delay = 1, 0
    for kind, stage, m in actions:
        now = updates.get(stage, 0)
        if kind is Kind.F:
            stashed[stage, m] = now
            held = max(held, len({now, *(version for (s, _), version in stashed.items() if s == stage)}))
        elif kind in (Kind.B, Kind.W):
            delay = max(delay, now - stashed.pop((stage, m)))
            updates[stage] = now + 1
    return Versions(held, delay)
