"""Checked: a plan under every rule, priced, with the pitfalls it is in and better legal neighbours."""

from __future__ import annotations

from dataclasses import replace

from shardsmith.design.cost.estimate import Estimate, estimate_plan
from shardsmith.design.cost.limit import device_bytes, too_many, total_faults
from shardsmith.design.cost.subject import DEFAULT_TARGET, subject_of
from shardsmith.design.planner.anew import chosen_anew
from shardsmith.design.planner.explain import binding, neighbours
from shardsmith.design.planner.priced import Priced
from shardsmith.design.planner.result import Neighbour
from shardsmith.design.rules.pitfalls import pitfalls
from shardsmith.design.targets import software_faults
from shardsmith.errors import Fault
from shardsmith.layout.check import Checked
from shardsmith.units import GIB

NOTICED = 0.99
"""A neighbour is better where it takes less than this share of the time."""
SHOWN = 5


def price_checked(
    checked: Checked, target: str = DEFAULT_TARGET, *, anew: bool = False, imbalance: float = 1.0
) -> Priced:
    """`checked`, which must be `priceable`, with its price; with `anew` also what its degrees and those beside them can
    do at best. Raises `Refused` (E107) for an `imbalance` that the plan cannot have.
    """
    setup = checked.setup
    s = subject_of(setup, target, imbalance=imbalance)
    found = estimate_plan(s, setup)
    limit = device_bytes(setup)
    every = neighbours(s, setup, found, limit)
    helped = [with_neighbour(fault, every, found, limit) for fault in checked.faults]
    total = total_faults(setup, found.memory, memory_hint(every, found, limit))
    faults = [*helped, *total, *pitfalls(s, setup, found), *software_faults(setup, s.target)]
    return Priced(
        checked=checked,
        faults=tuple(faults),
        estimate=found,
        better=better(every, found, limit),
        barred=barred(every),
        binds=binding(found, limit),
        anew=chosen_anew(s, setup, found, limit) if anew else (),
        target=target,
    )


def better(every: tuple[Neighbour, ...], found: Estimate, limit: float) -> tuple[Neighbour, ...]:
    """The best legal neighbours that fit: faster ones, or for a plan that does not fit all that do."""
    fits = [n for n in every if n.ratio is not None and not n.reason]
    if found.peak <= limit:
        fits = [n for n in fits if n.ratio is not None and n.ratio < NOTICED]
    return tuple(sorted(fits, key=lambda n: n.ratio or 0.0)[:SHOWN])


def barred(every: tuple[Neighbour, ...]) -> tuple[Neighbour, ...]:
    """Legal neighbours that would be faster if they fitted, the fastest first."""
    large = [n for n in every if n.ratio is not None and n.reason and n.ratio < NOTICED]
    return tuple(sorted(large, key=lambda n: n.ratio or 0.0)[:SHOWN])


def with_neighbour(fault: Fault, every: tuple[Neighbour, ...], found: Estimate, limit: float) -> Fault:
    """`fault`, which for states that do not fit (H404) hints at the fastest legal neighbour that fits, if any does."""
    fits = better(every, found, limit) if fault.code == "H404" else ()
    return replace(fault, hint=hint_of(fits[0])) if fits else fault


def hint_of(neighbour: Neighbour) -> str:
    """The change that makes a neighbour of a plan, every field of it, and what it then holds."""
    return f"{neighbour.axis} = {neighbour.becomes} ({neighbour.peak_gib:.1f} GiB)"


def memory_hint(every: tuple[Neighbour, ...], found: Estimate, limit: float) -> str:
    """For a plan that does not fit: the fastest neighbour that does, else the smallest, with what is missing."""
    fits = better(every, found, limit)
    if fits:
        return hint_of(fits[0])
    legal = [n for n in every if n.peak_gib is not None and n.peak_gib * GIB < found.peak]
    if not legal:
        return "no plan one step away holds less; shardsmith plan searches all others, and says what the least takes"
    least = min(legal, key=lambda n: n.peak_gib or 0.0)
    missing = too_many((least.peak_gib or 0.0) * GIB, limit)
    return (
        f"none one step away fits: {hint_of(least)} is still {missing} too large; shardsmith plan searches all others"
    )
