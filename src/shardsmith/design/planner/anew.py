"""Anew: a plan's degrees, and those one step away, each with the best plan that has them."""

from __future__ import annotations

from dataclasses import fields

from shardsmith.design.cost.estimate import Estimate
from shardsmith.design.cost.price import price
from shardsmith.design.cost.subject import Subject
from shardsmith.design.planner.bounded import Bounded
from shardsmith.design.planner.explain import degree_steps
from shardsmith.design.planner.plans import plan_of
from shardsmith.design.planner.question import VARIED
from shardsmith.design.planner.result import Neighbour
from shardsmith.design.planner.space import DEGREES, Space
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup, shown
from shardsmith.units import GIB


def chosen_anew(s: Subject, setup: Setup, found: Estimate, limit: float) -> tuple[Neighbour, ...]:
    """The fastest plan with the degrees of `setup`, then those with a degree one step further.

    Unlike a neighbour, which moves one field and keeps the others, all that is no degree is chosen anew: schedule,
    microbatch, ZeRO level, recomputation. Degrees with which nothing is legal and fits are left out.
    """
    steps = [("", setup.plan), *degree_steps(s, setup)]
    every: dict[tuple[int, ...], Neighbour] = {}
    for axis, plan in steps:
        key = tuple(getattr(plan, name) for name in DEGREES)
        best = None if key in every else _best(s, plan, setup, limit)
        if best is None:
            continue
        other, seconds, size = best
        every[key] = Neighbour(
            axis=axis or "same degrees",
            before=shown(getattr(setup.plan, axis)) if axis else "",
            after=shown(getattr(plan, axis)) if axis else "",
            beside=_degrees(setup.plan, plan, axis) if axis else (),
            plan=str(other),
            ratio=seconds / found.step_time_s,
            peak_gib=size / GIB,
        )
    own = [n for n in every.values() if n.axis not in DEGREES]
    others = (n for n in every.values() if n.axis in DEGREES)
    return (*own, *sorted(others, key=lambda n: n.ratio or 0.0))


def _degrees(before: Plan, after: Plan, without: str) -> tuple[str, ...]:
    """Degrees that move beside the one called `without`, with their new values."""
    pairs = ((name, getattr(before, name), getattr(after, name)) for name in DEGREES if name != without)
    return tuple(f"{name} = {new}" for name, old, new in pairs if old != new)


def _best(s: Subject, plan: Plan, setup: Setup, limit: float) -> tuple[Plan, float, float] | None:
    """The fastest plan with the degrees of `plan`: seconds of its step, bytes of its fullest rank."""
    kept = {f.name: getattr(setup.plan, f.name) for f in fields(Plan) if f.name not in VARIED}
    degrees = {name: getattr(plan, name) for name in DEGREES}
    space = Space(subject=s, world=plan.world, fixed=degrees, base=Plan(**kept))
    search = Bounded(space=space, limit=limit)
    ranked = search.run()
    if not ranked.plans:
        return None
    (first, *_) = ranked.ranked()
    priced = price(s, first, search.kinds)
    return plan_of(first, 0, space.base), float(ranked.best.min()), float(priced.peak[0])
