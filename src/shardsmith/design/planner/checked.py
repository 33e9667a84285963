"""Checked: a plan under every rule, priced, with the pitfalls it is in and better legal neighbours."""

from __future__ import annotations

from dataclasses import replace

from shardsmith.design.cost.estimate import Estimate, estimate_plan
from shardsmith.design.cost.subject import DEFAULT_TARGET, subject_of
from shardsmith.design.planner.anew import chosen_anew
from shardsmith.design.planner.explain import binding, neighbours
from shardsmith.design.planner.priced import Priced
from shardsmith.design.planner.result import Neighbour
from shardsmith.design.rules.pitfalls import pitfalls
from shardsmith.design.targets import software_faults
from shardsmith.errors import Code, Fault
from shardsmith.layout.check import Checked
from shardsmith.plan.setup import Setup
from shardsmith.units import GIB

TOTAL = Code(
    code="H405",
    title="a rank's peak exceeds its device's memory",
    because="weights, states, activations in flight, logits, buffers and the runtime's own share have to fit together",
)
NOTICED = 0.99
"""A neighbour is better where it takes less than this share of the time."""
SHOWN = 5


def price_checked(checked: Checked, target: str = DEFAULT_TARGET, *, anew: bool = False) -> Priced:
    """`checked`, which must be `priceable`, with its price; with `anew` also what its degrees and those beside them can
    do at best.
    """
    setup = checked.setup
    s = subject_of(setup, target)
    found = estimate_plan(s, setup)
    limit = (setup.cluster.device.memory_gib or 0.0) * GIB
    every = neighbours(s, setup, found, limit)
    helped = [with_neighbour(fault, every, found, limit) for fault in checked.faults]
    faults = [*helped, *total_faults(setup, found, limit, every), *pitfalls(s, setup, found)]
    faults += software_faults(setup, s.target)
    return Priced(
        checked=checked,
        faults=tuple(faults),
        estimate=found,
        better=better(every, found, limit),
        barred=barred(every),
        binds=binding(s, [setup], [found], limit)[0],
        anew=chosen_anew(s, setup, found, limit) if anew else (),
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
    """The change that makes a neighbour of a plan, and what it then holds."""
    return f"{neighbour.axis} = {neighbour.after} ({neighbour.peak_gib:.1f} GiB)"


def total_faults(setup: Setup, found: Estimate, limit: float, every: tuple[Neighbour, ...]) -> list[Fault]:
    """A peak above the device's memory (H405), with what it is made of and the fastest neighbour that fits."""
    fullest = max(found.memory, key=lambda rank: rank.total)
    if fullest.total <= limit:
        return []
    items = ", ".join(f"{name} {size / GIB:.1f}" for name, size in fullest.items.items() if size > 0.005 * limit)
    message = (
        f"pipeline rank {fullest.pipeline_rank} holds {fullest.total / GIB:.1f} GiB at its peak ({items}), "
        f"{(fullest.total - limit) / GIB:.1f} GiB more than {setup.cluster.device.name} has"
    )
    fits = better(every, found, limit)
    hint = hint_of(fits[0]) if fits else "a plan from shardsmith plan"
    said = setup.said("plan.tensor", "plan.pipeline", "plan.zero", "plan.recompute", "plan.microbatch")
    device = (setup.cluster.name, f"memory_gib = {limit / GIB:g}")
    return [TOTAL.fault(message, *said, device, hint=hint)]
