"""Legality of an order: what is wrong with it, and which action is the first that can never run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from shardsmith.errors import Fault
from shardsmith.schedule.ir import Action, Kind, Order, needs
from shardsmith.schedule.play import UNIT, advance
from shardsmith.schedule.rules import IMPOSSIBLE, MISSING, OUTSIDE, REPEATED, WRONG_RANK
from shardsmith.units import counted

Name = Callable[[Action], str]

SHOWN = 6
"""How many actions a message lists before it only counts."""


def check(order: Order, *, source: str = "order", name: Name = str) -> list[Fault]:
    """Everything that makes `order` illegal; an empty list means that it runs to its end.

    Each stage must run forward once and backward once (B, or I and W) for every microbatch, on the rank
    that holds it (S010, S011, S012, S014), and no action may wait for one that can only follow it
    (S013, naming the first impossible action). `name` says how actions are spelled in messages.
    """
    outside = _outside(order, source, name)
    if outside:
        return outside
    faults = [*_misplaced(order, source, name), *_repeated(order, source, name), *_missing(order, source, name)]
    return faults + _stuck(order, source, name)


def listing(names: Iterable[str]) -> str:
    """A few names in full, the rest counted."""
    every = list(names)
    return ", ".join(every[:SHOWN]) + (f" and {len(every) - SHOWN} more" if len(every) > SHOWN else "")


def _outside(order: Order, source: str, name: Name) -> list[Fault]:
    strays = [
        a
        for actions in order.ranks
        for a in actions
        if not (0 <= a.stage < order.stages and 0 <= a.microbatch < order.microbatches)
    ]
    if not strays:
        return []
    sizes = f"{counted(order.stages, 'stage')}, {counted(order.microbatches, 'microbatch')}"
    return [OUTSIDE.fault(f"{listing(map(name, strays))}: no such stage or microbatch", (source, sizes))]


def _misplaced(order: Order, source: str, name: Name) -> list[Fault]:
    return [
        WRONG_RANK.fault(
            f"rank {rank} runs {name(action)}, but stage {action.stage} lives on rank {order.placement[action.stage]}",
            (source, f"rank {rank}, position {position}: {name(action)}"),
            hint=f"move {name(action)} to rank {order.placement[action.stage]}",
        )
        for rank, actions in enumerate(order.ranks)
        for position, action in enumerate(actions)
        if order.placement[action.stage] != rank
    ][:SHOWN]


def _repeated(order: Order, source: str, name: Name) -> list[Fault]:
    counts = Counter(action for actions in order.ranks for action in actions)
    twice = [action for action, count in counts.items() if count > 1]
    both = [a for a in counts if a.kind is Kind.B and any(a._replace(kind=half) in counts for half in (Kind.I, Kind.W))]
    faults = []
    if twice:
        faults.append(REPEATED.fault(f"{listing(map(name, twice))}: more than once", (source, order.name)))
    if both:
        message = f"{listing(map(name, both))}: the whole backward stands beside one of its halves"
        faults.append(REPEATED.fault(message, (source, order.name), hint="either B, or I and W"))
    return faults


def _missing(order: Order, source: str, name: Name) -> list[Fault]:
    there = {action for actions in order.ranks for action in actions}
    missing: list[Action] = []
    for stage in range(order.stages):
        for m in range(order.microbatches):
            split = Action(Kind.I, stage, m) in there or Action(Kind.W, stage, m) in there
            kinds = (Kind.F, Kind.I, Kind.W) if split and Action(Kind.B, stage, m) not in there else (Kind.F, Kind.B)
            missing.extend(a for a in (Action(kind, stage, m) for kind in kinds) if a not in there)
    if not missing:
        return []
    return [MISSING.fault(f"{listing(map(name, missing))}: not in the order", (source, order.name))]


def _stuck(order: Order, source: str, name: Name) -> list[Fault]:
    """The first action that can never run: of the actions at which ranks stop, the one that stands earliest."""
    played, done = advance(order, UNIT)
    fronts = [(at, rank) for rank, at in enumerate(done) if at < len(order.ranks[rank])]
    if not fronts:
        return []
    where = {a: (rank, at) for rank, actions in enumerate(order.ranks) for at, a in reversed([*enumerate(actions)])}
    values, messages = [], []
    for at, rank in sorted(fronts):
        action = order.ranks[rank][at]
        awaited = next(one_of for one_of in needs(action, order.stages) if not any(a in played.end for a in one_of))
        found = next((a for a in awaited if a in where), None)
        if found is None:
            stands = f"{' or '.join(map(name, awaited))}, which is nowhere in the order"
        else:
            on, position = where[found]
            blocker = order.ranks[on][done[on]]
            stands = f"{name(found)}, which stands on rank {on} at position {position}"
            stands += "" if blocker == found else f" behind {name(blocker)} (position {done[on]})"
        values.append((source, f"rank {rank}, position {at}: {name(action)} waits for {stands}"))
        messages.append(f"{name(action)} on rank {rank} (position {at}) can never run: it waits for {stands}")
    return [IMPOSSIBLE.fault(messages[0], *values[:SHOWN])]
