"""Explain: what binds a plan, and what becomes of it when one field moves by one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from shardsmith.design.cost.estimate import ITEM_WORDS, PART_WORDS, Estimate
from shardsmith.design.cost.layouts import ORDERS, RECOMPUTE, layouts_of
from shardsmith.design.cost.price import price
from shardsmith.design.cost.schedules import SCHEDULES
from shardsmith.design.cost.subject import Subject
from shardsmith.design.planner.result import Neighbour
from shardsmith.design.rules.changes import changes, typed
from shardsmith.errors import Refused
from shardsmith.layout.check import examine
from shardsmith.plan.batch import batching, divisors
from shardsmith.plan.fixed import OneOf, held_values
from shardsmith.plan.plan import Plan
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup, shown
from shardsmith.plan.stages import brief, even_layers, placement_of, settled, stages_per_rank
from shardsmith.schedule import orders
from shardsmith.units import GIB

TIGHT = 0.9
"""Share of the memory from which it is said to bind."""
MOST_STAGES = 16
"""Stages up to which a table lists their layers."""


def binding(e: Estimate, limit: float) -> str:
    """What holds a plan back: the largest part of the step that is not compute, and memory where it is short."""
    parts = {name: seconds for name, seconds in e.breakdown.items() if name != "compute"}
    worst = max(parts, key=lambda name: parts[name])
    fullest = max(e.memory, key=lambda rank: rank.total)
    item = max(fullest.items, key=lambda name: fullest.items[name])
    text = f"compute is {e.breakdown['compute'] / e.step_time_s:.0%} of the step"
    if parts[worst] > 0:
        text += f", then {PART_WORDS[worst]} {parts[worst] / e.step_time_s:.1%}"
    tight = "memory binds" if fullest.total > TIGHT * limit else "memory is free"
    return (
        f"{text}; {tight}: {fullest.total / GIB:.1f} of {limit / GIB:.1f} GiB on pipeline rank "
        f"{fullest.pipeline_rank}, most of it {ITEM_WORDS[item]} ({fullest.items[item] / GIB:.1f})"
    )


def neighbours(
    s: Subject, setup: Setup, found: Estimate, limit: float, held: Mapping[str, Any] | None = None
) -> tuple[Neighbour, ...]:
    """Every plan one step away from `setup`: its time over this plan's, its memory, or why it is not legal.

    A degree moves to the next one that divides the devices, and the data ranks (for data: the pipeline) make up
    for it; a microbatch that no longer divides becomes the next smaller one that does. Two steps to the same plan are
    one. A step that moves one of the fields that are `held` to a value that they may not have says so.
    """
    moved, own = _moved(s, setup), setup.plan
    sound, reasons = [], {}
    for at, (_, plan) in enumerate(moved):
        other = _settled(replace(setup, plan=plan))
        faults = [] if other is None else list(examine(other, cured=False).errors)
        if other is None or faults:
            reasons[at] = str(faults[0].code + ": " + faults[0].message) if faults else "the batch cannot be cut so"
        else:
            sound.append((at, other))
    figures: dict[int, tuple[float, float]] = {}
    if sound:
        p = layouts_of([other.plan for _, other in sound], s.model, s.workload)
        priced = price(s, p, precision(setup.plan, setup.workload))
        for (at, _), seconds, size in zip(sound, priced.step.total, priced.peak, strict=True):
            figures[at] = (float(seconds), float(size))
    out = []
    for at, (axis, plan) in enumerate(moved):
        seconds, size = figures.get(at, (np.nan, np.nan))
        short = f"holds {size / GIB:.1f} GiB, {(size - limit) / GIB:.1f} too many" if size > limit else ""
        # A split of layers that was weighed for these stages is another one for others.
        free = () if axis == "layers" else ("layers",)
        moves = [k for k in held or {} if k not in free and getattr(plan, k) != getattr(setup.plan, k)]
        moves = [k for k in moves if held and getattr(plan, k) not in held_values(held, k)]
        fixed = "held: " + ", ".join(f"{k} = {_held(held, k, setup.plan)}" for k in moves) if held and moves else ""
        out.append(
            Neighbour(
                axis=axis,
                before=_value(setup, own, axis),
                after=_value(setup, plan, axis),
                beside=tuple(changes(setup, plan, without=axis)),
                plan=str(brief(replace(setup, plan=plan))),
                ratio=None if at in reasons else seconds / found.step_time_s,
                peak_gib=None if at in reasons else size / GIB,
                reason=reasons.get(at, fixed or short),
            )
        )
    return tuple(out)


def _held(held: Mapping[str, Any], key: str, plan: Plan) -> str:
    """What a field is held to: its own value, or all that it may have."""
    return str(held[key]) if isinstance(held[key], OneOf) else shown(getattr(plan, key))


def degree_steps(s: Subject, setup: Setup) -> Iterator[tuple[str, Plan]]:
    """(degree, plan) of every step of a degree; what else has to follow is made to fit."""
    plan = setup.plan
    for axis in ("tensor", "pipeline", "context", "expert", "expert_tensor", "data"):
        if axis.startswith("expert") and s.model.experts is None:
            continue
        for value in _steps(axis, plan, s):
            yield axis, _fitted(plan, setup, **_with_degree(plan, axis, value))


def _moved(s: Subject, setup: Setup) -> list[tuple[str, Plan]]:
    """(field, plan) of every step, each plan once and in words that can be typed."""
    found: dict[Plan, str] = {}
    for axis, plan in _moves(s, setup):
        found.setdefault(typed(setup, plan), axis)
    return [(axis, plan) for plan, axis in found.items() if plan != setup.plan]


def _value(setup: Setup, plan: Plan, axis: str) -> str:
    """A field of a legal plan as a table shows it, in numbers where they follow from others."""
    if axis == "layers":
        even = even_layers(setup.model.layers, len(placement_of(plan)))
        value = brief(replace(setup, plan=plan)).layers or even
        return "even" if value == even and len(even) > MOST_STAGES else shown(value)
    if axis in ("microbatch", "microbatches"):
        return shown(getattr(batching(plan, setup.workload), axis))
    return shown(stages_per_rank(plan) if axis == "stages_per_rank" else getattr(plan, axis))


def _settled(setup: Setup) -> Setup | None:
    try:
        batching(setup.plan, setup.workload)
    except Refused:
        return None
    return settled(setup)


def _moves(s: Subject, setup: Setup) -> Iterator[tuple[str, Plan]]:
    """(field, plan) of every step."""
    plan = setup.plan
    yield from degree_steps(s, setup)
    for value in _around(divisors(plan.data), plan.replicate):
        if plan.zero:
            yield "replicate", plan.with_(replicate=value)
    each = setup.workload.global_batch // plan.data
    name = "microbatches" if plan.microbatch is None and plan.microbatches is not None else "microbatch"
    for value in _around(divisors(each), batching(plan, setup.workload).microbatch):
        yield name, plan.with_(microbatch=value, microbatches=each // value)
    for level in (plan.zero - 1, plan.zero + 1):
        if 0 <= level <= 3 and plan.shard * plan.context > 1:
            yield "zero", plan.with_(zero=level, replicate=plan.replicate if level else 1)
    if plan.zero >= 2:
        yield "zero_gather", plan.with_(zero_gather="per_step" if plan.zero_gather == "per_pass" else "per_pass")
    yield from _pipelines(s, plan)
    for name in RECOMPUTE:
        if name != plan.recompute:
            yield "recompute", plan.with_(recompute=name)
    if plan.tensor > 1:
        yield "sequence_parallel", plan.with_(sequence_parallel=not plan.sequence_parallel)
        for policy in ((), *((name,) for name in s.target.overlaps)):
            if policy != plan.overlap:
                yield "overlap", plan.with_(overlap=policy)
    for order in _orders(plan):
        yield "order", plan.with_(order=order)


def _pipelines(s: Subject, plan: Plan) -> Iterator[tuple[str, Plan]]:
    if plan.pipeline == 1:
        return
    for name in SCHEDULES:
        if name != plan.schedule:
            yield "schedule", plan.with_(schedule=name, stages_per_rank=None, layers=None)
    if plan.schedule in ("interleaved", "looped_bfs"):
        for value in (stages_per_rank(plan) - 1, stages_per_rank(plan) + 1):
            if value >= 2 and value * plan.pipeline <= s.model.layers:
                yield "stages_per_rank", plan.with_(stages_per_rank=value, layers=None)
    even = even_layers(s.model.layers, len(placement_of(plan)))
    yield "layers", plan.with_(layers=even if plan.layers else "weighed")


def _orders(plan: Plan) -> Iterator[str]:
    """Orders with two neighbouring axes swapped, where both have several ranks."""
    axes = plan.order.replace(",", "-").split("-")
    large = [axis for axis in axes if getattr(plan, axis) > 1]
    for first, second in pairwise(large):
        swapped = [second if axis == first else first if axis == second else axis for axis in axes]
        if "-".join(swapped) in ORDERS:
            yield "-".join(swapped)


def _steps(axis: str, plan: Plan, s: Subject) -> list[int]:
    """The next smaller and larger value of a degree that divides the ranks."""
    now = getattr(plan, axis)
    if axis == "expert":
        assert s.model.experts is not None, "asked only for a model with experts"
        return _around(divisors(s.model.experts.count), now)
    if axis == "expert_tensor":
        assert s.model.experts is not None, "asked only for a model with experts"
        return _around(divisors(s.model.experts.ffn), now)
    give = plan.pipeline if axis == "data" else plan.data
    return _around([d for d in divisors(now * give) if (now * give) % d == 0], now)


def _around(values: Any, now: int) -> list[int]:
    below, above = [v for v in values if v < now], [v for v in values if v > now]
    return [*below[-1:], *above[:1]]


def _with_degree(plan: Plan, axis: str, value: int) -> dict[str, Any]:
    if axis.startswith("expert"):
        return {axis: value}
    other = "pipeline" if axis == "data" else "data"
    return {axis: value, other: getattr(plan, axis) * getattr(plan, other) // value}


def _fitted(plan: Plan, setup: Setup, **degrees: Any) -> Plan:
    """`plan` with other degrees, and what follows from them made to fit: microbatch, replicas, layers, copied heads."""
    new = plan.with_(**degrees, layers=None)
    each, rest = divmod(setup.workload.global_batch, new.data)
    size = batching(plan, setup.workload).microbatch
    if not rest:
        size = max(d for d in divisors(each) if d <= size)
        new = new.with_(microbatch=size, microbatches=each // size)
    else:
        new = new.with_(microbatches=None)
    if new.data % new.replicate:
        new = new.with_(replicate=1)
    kv = setup.model.kv_heads
    new = new.with_(replicate_kv=new.tensor > kv, sequence_parallel=new.tensor > 1 and plan.sequence_parallel)
    if new.tensor == 1:
        new = new.with_(overlap=())
    if new.context % new.ulysses:
        new = new.with_(ulysses=1)
    if new.pipeline == 1:
        new = new.with_(schedule="one_f_one_b", stages_per_rank=None)
    elif stages_per_rank(new) * new.pipeline > setup.model.layers:
        most = setup.model.layers // new.pipeline
        default = orders.load(new.schedule).DEFAULT_STAGES_PER_RANK
        one = new.with_(schedule="one_f_one_b", stages_per_rank=None)
        new = new.with_(stages_per_rank=most) if most >= 2 and default == 2 and new.schedule != "zb_v" else one
    return new
