"""Search: the fastest plans of a model on a cluster, or the fewest or cheapest devices that train it in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from shardsmith.design.cost.estimate import estimate_plans
from shardsmith.design.cost.layouts import Layouts
from shardsmith.design.cost.price import price
from shardsmith.design.cost.subject import DEFAULT_TARGET, Subject
from shardsmith.design.planner.bounded import Bounded
from shardsmith.design.planner.explain import binding, neighbours
from shardsmith.design.planner.found import Found, Rivals
from shardsmith.design.planner.goodput import days
from shardsmith.design.planner.nearby import better_batch
from shardsmith.design.planner.plans import setup_of
from shardsmith.design.planner.question import GOAL, Question, size_faults
from shardsmith.design.planner.refusal import refuse, space_asked, subject_asked
from shardsmith.design.planner.result import Choice, SearchResult
from shardsmith.design.planner.thumb import rule_notes, sides
from shardsmith.design.targets import FLOAT8
from shardsmith.errors import Code, raise_errors
from shardsmith.plan.batch import divisors
from shardsmith.specs.model import parameter_count
from shardsmith.units import counted

TOO_SLOW = Code(
    code="L103",
    title="no number of nodes is fast enough",
    because="the time to train is tokens / tokens of a step x step time, over the goodput",
)


def search(question: Question) -> SearchResult:
    """The best plans. Raises `Refused`: H501 to H503 where cluster or target say too little, L101 where no layout is
    legal, L102 where none fits (with the nearest, what it lacks and what would help), L103 and L104 about goals.
    """
    start = perf_counter()
    q = question
    raise_errors(size_faults(q))
    if (q.goal_days is None) != (q.objective == "fastest") or (q.goal_days is not None and q.tokens is None):
        asked = {"days": q.goal_days, "tokens": q.tokens}
        values = [(f"--{key}", "not stated" if value is None else f"{key} = {value}") for key, value in asked.items()]
        raise GOAL.refuse(
            "fewest and cheapest need --days and --tokens, and only they do", *values, hint="--days 30 --tokens 1e12"
        )
    if q.objective != "fastest":
        q = q.on(_nodes(q))
    elif q.tokens is not None:
        q.failures.goodput(q.cluster.devices or 1)
    s = subject_asked(q)
    bounded = Bounded(space=space_asked(q, s), limit=q.limit, count=q.count)
    found, rivals = bounded.run_beside(sides(s, bounded.frames.layouts) if q.explained else ())
    if not found.plans:
        refuse(s, q, bounded.space, found)
    return _answer(q, s, found, rivals, bounded, start)


def _answer(q: Question, s: Subject, found: Found, rivals: Rivals, bounded: Bounded, start: float) -> SearchResult:
    choices = _choices(s, q, found.ranked()[: q.count])
    if q.explained:
        first = choices[0]
        choices[0] = replace(
            first,
            rules=rule_notes(s, first, bounded, rivals),
            neighbours=neighbours(s, first.setup, first.estimate, q.limit, held=q.varied),
        )
    robust = min(choices, key=lambda choice: choice.estimate.interval_s[1])
    return SearchResult(
        objective=q.objective,
        plans=tuple(choices),
        pareto=pareto(q, choices, bounded),
        robust=robust,
        searched=found.searched,
        priced=found.priced,
        dismissed=found.dismissed,
        seconds=perf_counter() - start,
        target=q.target,
        assumptions=assumptions(q),
        totals=_totals(q, choices[0]),
        nearby=better_batch(q, choices[0].estimate.step_time_s, found.searched) if q.explained else None,
    )


LESS, STEPS = 0.8, 8
"""Each plan of a front may hold this share of what the one before it holds, for so many steps."""


def pareto(q: Question, choices: Sequence[Choice], bounded: Bounded) -> tuple[Choice, ...]:
    """Plans that no other beats in time, memory and devices at once, fewest devices and then fastest first.

    On every number of nodes in `q.fronts`: the fastest of all plans, then the fastest that holds at most 4/5 of what
    the one before holds, and so on. Without any, those of `choices` that no other of them beats.
    """
    every = [] if q.fronts else list(choices)
    for nodes in dict.fromkeys(q.fronts):
        on = q.on(nodes)
        s = subject_asked(on)
        search = bounded if nodes == q.cluster.nodes else Bounded(space=space_asked(on, s), limit=on.limit)
        every += _choices(s, on, list(_smaller(search)))
    return tuple(sorted(_unbeaten(every), key=lambda c: (c.setup.plan.world, c.estimate.step_time_s)))


def _smaller(search: Bounded) -> Iterator[Layouts]:
    """The fastest plan of a search, then ever smaller ones, each the fastest of its size."""
    limit = search.limit
    for _ in range(STEPS):
        found = search.within(limit)
        if not found.plans:
            return
        (plan, *_) = found.ranked()
        yield plan
        limit = LESS * float(price(search.space.subject, plan, search.kinds).peak[0])


def _unbeaten(every: Sequence[Choice]) -> list[Choice]:
    costs = np.array([(c.estimate.step_time_s, c.estimate.peak, c.setup.plan.world) for c in every]).reshape(-1, 3)
    return [
        choice
        for choice, own in zip(every, costs, strict=True)
        if not ((costs <= own).all(axis=1) & (costs < own).any(axis=1)).any()
    ]


def _choices(s: Subject, q: Question, plans: Sequence[Layouts]) -> list[Choice]:
    target = None if q.target == DEFAULT_TARGET else q.target
    setups = [replace(setup_of(s, p, 0, q.base), target=target) for p in plans]
    estimates = estimate_plans(s, setups) if setups else ()
    return [Choice(setup=a, estimate=e, binds=binding(e, q.limit)) for a, e in zip(setups, estimates, strict=True)]


def _totals(q: Question, best: Choice) -> dict[str, float]:
    """Days, device hours and goodput of the best plan, where the tokens are known."""
    if q.tokens is None:
        return {}
    took = train_days(q, best.estimate.step_time_s, best.setup.plan.world)
    return {
        "days": took,
        "device_hours": took * 24.0 * best.setup.plan.world,
        "goodput": q.failures.goodput(best.setup.plan.world),
    }


def train_days(q: Question, step_time_s: float, devices: int) -> float:
    """Days to train on the question's tokens."""
    assert q.tokens is not None, "asked only where tokens are stated"
    a_step = float(q.workload.global_batch * q.workload.seq_len)
    return days(step_time_s, tokens=q.tokens, tokens_a_step=a_step, devices=devices, failures=q.failures)


def _nodes(q: Question) -> int:
    """The number of nodes, of at most the cluster's, that meets the goal with the fewest nodes or device hours.

    Numbers of nodes on which no layout is legal are left out. More nodes that take more time are possible, so
    every number is tried, from the first that could be enough if it had no losses at all.
    """
    assert q.goal_days is not None, "asked only with a goal"
    best: tuple[float, int] | None = None
    tried = _candidates(q)
    for nodes in tried:
        # No more days than asked for, and no more device hours than the best so far.
        most = q.goal_days if best is None else min(q.goal_days, best[0] / nodes)
        devices = nodes * (q.cluster.devices_per_node or 1)
        found = _fastest(q.on(nodes), most / train_days(q, 1.0, devices))
        if found is None:
            continue
        if q.objective == "fewest":
            return nodes
        best = (train_days(q, found, devices) * nodes, nodes)
    if best is None:
        fastest = _fewest_days(q, tried)
        near = f"the fastest of them takes {fastest:.1f} days" if np.isfinite(fastest) else "none has a plan that fits"
        near = near if tried else "whose devices at their peak need longer than that"
        raise TOO_SLOW.refuse(
            f"up to {counted(q.cluster.nodes, 'node')}, {near}",
            ("--days", f"days = {q.goal_days:g}"),
            (q.cluster.name, f"nodes = {q.cluster.nodes}"),
            hint="more nodes, more days, or fewer tokens",
        )
    return best[1]


def _fewest_days(q: Question, nodes: Sequence[int]) -> float:
    """Days of the fastest plan on any of these numbers of nodes; infinity where none fits."""
    fastest = np.inf
    for count in reversed(nodes):
        a_second = train_days(q, 1.0, count * (q.cluster.devices_per_node or 1))
        found = _fastest(q.on(count), fastest / a_second)
        fastest = fastest if found is None else found * a_second
    return fastest


def _candidates(q: Question) -> Sequence[int]:
    """Numbers of nodes on which a legal layout is likely: those whose devices divide evenly into batch and layers."""
    each = q.cluster.devices_per_node or 1
    tokens_a_step = float(q.workload.global_batch * q.workload.seq_len)
    assert q.tokens is not None, "asked only with a goal"
    assert q.goal_days is not None, "asked only with a goal"
    peak = q.cluster.device.peak(q.workload.dtype) or 1.0
    # Six FLOPs a parameter and token at the peak: fewer nodes cannot be enough.
    share = 1.0 if q.model.experts is None else q.model.experts.top_k / q.model.experts.count
    floor = 6.0 * parameter_count(q.model) * share * q.tokens / (peak * q.goal_days * 86400.0) / each
    assert tokens_a_step > 0, "sizes are at least 1"
    found = [n for n in _even(q, each) if n >= floor * 0.5]
    lasting = [n for n in found if q.failures.lost(n * each) < 1.0]
    if found and not lasting:
        q.failures.goodput(found[0] * each)
    return lasting


def _even(q: Question, each: int) -> list[int]:
    layers, batch = q.model.layers, q.workload.global_batch
    found = set()
    for pipeline in range(1, layers + 1):
        for data in divisors(batch):
            for tensor in divisors(each):
                nodes, rest = divmod(pipeline * data * tensor, each)
                if rest == 0 and 0 < nodes <= q.cluster.nodes:
                    found.add(nodes)
    return sorted(found)


def _fastest(q: Question, below: float = np.inf) -> float | None:
    """Step time of the best plan; None where none is legal, fits and takes less than `below` seconds."""
    s = subject_asked(q)
    found = Bounded(space=space_asked(q, s), limit=q.limit).run(below)
    return float(found.best.min()) if found.plans else None


def assumptions(q: Question) -> tuple[str, ...]:
    """What the figures rest on, in words."""
    e, share = q.model.experts, f"the fullest expert rank receives {q.imbalance:g} times the mean"
    routing = "experts balanced" if e is None or q.imbalance == 1.0 else share
    found = [
        f"kernels, overlap and buffers as {q.target} has them; constants fitted on published runs (docs/accuracy.md)",
        f"states: weights in {q.workload.dtype}, AdamW with two moments and a master copy in float32",
        f"{routing}; attention scores counted for the causal half; nothing computed twice counts for MFU",
        "1.5 GiB a device for contexts and communicators, and 2 % that the allocator cannot use",
    ]
    if q.target.endswith(FLOAT8):
        found.append(
            "matrix products of layers in float8, cast from bfloat16 tensors; head, states, messages in bfloat16"
        )
        found.append(
            "MFU is the share of the float8 peak; a plan file says bfloat16, as the engine runs it, and the target"
        )
    if q.tokens is not None:
        found.append(
            f"a device fails every {q.failures.device_hours:,.0f} hours; a checkpoint stops training for "
            f"{q.failures.save_s:g} s, a restart for {q.failures.restart_s:g} s"
        )
    return tuple(found)
