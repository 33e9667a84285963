"""Simulation: one training step of a plan, with where its lengths come from, stragglers and the picture's ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardsmith.design.cost.estimate import rank_memory
from shardsmith.design.cost.interval import interval
from shardsmith.design.cost.layouts import batch_of, layouts_of
from shardsmith.design.cost.limit import total_faults
from shardsmith.design.cost.subject import DEFAULT_TARGET, Subject, subject_of
from shardsmith.design.simulator.lengths import StageLengths, StepLengths
from shardsmith.design.simulator.plan_lengths import plan_lengths
from shardsmith.design.simulator.simulate import Gather, Simulated, simulate
from shardsmith.errors import Code, Fault, raise_errors
from shardsmith.layout.axes.data import streams_gradients
from shardsmith.layout.check import MEMORY, examine
from shardsmith.plan.batch import batching
from shardsmith.plan.mesh import Coord, mesh_of
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import settled, stages_per_rank
from shardsmith.schedule import orders
from shardsmith.schedule.ir import Order
from shardsmith.schedule.play import weight_versions
from shardsmith.schedule.study import Times
from shardsmith.timeline import LANE_KINDS, Timeline

SLOW = Code(
    code="S402",
    title="a straggler that does not exist",
    because="a slow rank is one of the plan's world, and how slow it is a factor on its compute time",
)
SLOWEST = 1e9
"""A factor beyond this is a slip of the pen: a second would be 30 years."""
TIMES_AND_TARGET = Code(
    code="S403",
    title="given lengths beside a target",
    because="a target says how long things take; where lengths are given, it would silently be ignored",
)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One step of `setup`: figures in seconds, lanes by pipeline rank, and the timeline of one replica.

    `ranks` are the global ranks that stand for the pipeline ranks: of the replica that ends last where there are
    stragglers. `target` is the software that was priced. `low` and `high` hold 80 % of measured runs, None for given
    lengths. `steady` is the time of a step in a run of many, other than `seconds` only without a flush.
    """

    setup: Setup
    order: Order
    lengths: StepLengths
    origin: str
    target: str
    seconds: float
    steady: float
    bubble: float
    low: float | None
    high: float | None
    slow: Mapping[int, float]
    undisturbed: float
    ranks: tuple[int, ...]
    simulated: Simulated
    warnings: tuple[Fault, ...]

    @property
    def timeline(self) -> Timeline:
        """The spans, by global rank."""
        spans = tuple(replace(s, rank=self.ranks[s.rank]) for s in self.simulated.timeline.spans)
        notes = [self.origin] + [f"rank {rank} slowed by {factor:g}" for rank, factor in self.slow.items()]
        return Timeline(origin="simulated", spans=spans, notes=tuple(notes))

    def lanes(self) -> dict[str, list[float]]:
        """Busy seconds of every lane that is used, a number a pipeline rank."""
        return {lane: list(self.simulated.busy[lane]) for lane in LANE_KINDS if any(self.simulated.busy[lane])}

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; `lanes` are busy seconds by pipeline rank, `bubble` the idle share of compute lanes."""
        versions = weight_versions(self.order)
        return {
            "plan": str(self.setup.plan),
            "schedule": self.order.name,
            "lengths": self.origin,
            "step_time_s": self.seconds,
            "steady_step_time_s": self.steady,
            "interval_s": None if self.low is None else [self.low, self.high],
            "bubble": self.bubble,
            "exposed_reduce_s": self.simulated.exposed_reduce,
            "ranks": list(self.ranks),
            "lanes": self.lanes(),
            "slow": {str(rank): factor for rank, factor in self.slow.items()},
            "step_time_without_slow_s": self.undisturbed,
            "asynchronous": self.order.asynchronous,
            "weight_versions": [v.held for v in versions],
            "update_delay": [v.delay for v in versions],
            "warnings": [f.as_json() for f in self.warnings],
        }


def simulate_plan(
    setup: Setup,
    *,
    slow: Mapping[int, float] | None = None,
    times: Times | None = None,
    target: str | None = None,
    constants: Mapping[str, float] | None = None,
    imbalance: float | None = None,
    record: bool = True,
) -> Simulation:
    """Simulate one step of a plan; lengths by the cost model, or `times` a microbatch and rank in seconds.

    `constants` of the cost model stand in for the shipped ones; the fullest expert rank receives `imbalance` times
    the mean of rows (None: balanced).

    `slow` gives factors on the compute of global ranks. Their tensor, context and expert partners wait for them in
    every layer, other replicas in the reduction; of several affected replicas the one that ends last is shown (exact
    unless level 3 gathers in each pass, where it is a lower bound). On a cluster without figures (`local`) and without
    `times`, F = I = W = 1 s. Without `record` the timeline stays empty. Raises `Refused` for a plan that breaks a rule
    (a rank too large for the device is only warned of), S402, S403, E107, H502, H503, X351.
    """
    setup, found = settled(setup), examine(setup).faults
    raise_errors([f for f in found if f.code != MEMORY.code])
    slow = dict(slow or {})
    raise_errors(slow_faults(setup, slow))
    if times is not None and target is not None:
        raise TIMES_AND_TARGET.refuse("either lengths or a target", ("--times", "given"), ("--target", target))
    if times is not None and constants is not None:
        raise TIMES_AND_TARGET.refuse(
            "either lengths or constants of the cost model", ("--times", "given"), ("--constants", "given")
        )
    has_price = times is None and _says_something(setup)
    if imbalance is not None and not has_price:
        raise TIMES_AND_TARGET.refuse(
            "an imbalance belongs to lengths by the cost model",
            ("--imbalance", f"imbalance = {imbalance:g}"),
            ("--times", "given") if times is not None else ("cluster", f"{setup.cluster.name}, without figures"),
        )
    order = _order(setup, batching(setup.plan, setup.workload).microbatches)
    even = 1.0 if imbalance is None else imbalance
    priced = subject_of(setup, DEFAULT_TARGET if target is None else target, constants, even) if has_price else None
    lengths, origin = _given(setup, order, times) if priced is None else _by_cost(priced, setup)
    gather, each = _gather(setup), streams_gradients(setup.plan)

    def run(order: Order, slow: Mapping[int, float], record: bool = False) -> Simulated:
        return simulate(order, replace(lengths, slow=slow), reduce_each=each, gather=gather, record=record)

    replicas = [({}, _ranks(setup, 0))] if not slow else _replicas(setup, slow)
    slowed, ranks = max(replicas, key=lambda r: run(order, r[0]).seconds) if len(replicas) > 1 else replicas[0]
    shown = run(order, slowed, record)
    low, high = (None, None) if priced is None else _interval(priced, setup, shown.seconds)
    steady = shown.seconds
    if order.asynchronous:
        steady = run(_order(setup, 2 * order.microbatches), slowed).seconds - shown.seconds
    return Simulation(
        setup=setup,
        order=order,
        lengths=lengths,
        origin=origin,
        target=DEFAULT_TARGET if target is None else target,
        seconds=shown.seconds,
        steady=steady,
        bubble=shown.bubble,
        low=low,
        high=high,
        slow=slow,
        undisturbed=run(order, {}).seconds if slow else shown.seconds,
        ranks=ranks,
        simulated=shown,
        warnings=tuple(replace(f, severity="warning") for f in (*found, *_too_large(priced, setup))),
    )


def _too_large(priced: Subject | None, setup: Setup) -> list[Fault]:
    """A peak above the device's memory (H405): the step can be simulated, but not run."""
    if priced is None:
        return []
    return total_faults(setup, rank_memory(priced, setup), "shardsmith check names neighbours that fit")


def slow_faults(setup: Setup, slow: Mapping[int, float]) -> list[Fault]:
    """Ranks outside the world, and factors that are none."""
    world, faults = setup.plan.world, []
    for rank, factor in slow.items():
        said = ("--slow", f"{rank}={factor:g}")
        if not 0 <= rank < world:
            message = f"there is no rank {rank} in a world of {world}"
            faults.append(SLOW.fault(message, said, hint=f"a rank from 0 to {world - 1}"))
        elif not 0 < factor <= SLOWEST:
            message = f"a factor of {factor:g}, not above 0 and up to {SLOWEST:g}"
            faults.append(SLOW.fault(message, said, hint=f"{rank}=1.2: a fifth slower"))
    return faults


def parse_slow(items: Iterable[str]) -> dict[int, float]:
    """`rank=factor` texts as a mapping. Raises `Refused` (S402) for anything else, and for a rank named twice."""
    found: dict[int, float] = {}
    faults = []
    for text in items:
        rank, _, factor = text.partition("=")
        try:
            key, value = int(rank), float(factor)
        except ValueError:
            faults.append(SLOW.fault(f"{text!r} is not rank=factor", ("--slow", text), hint="3=1.2"))
            continue
        if key in found:
            faults.append(SLOW.fault(f"rank {key} is given twice", ("--slow", text), hint=f"one factor for rank {key}"))
        found[key] = value
    raise_errors(faults)
    return found


def _order(setup: Setup, microbatches: int) -> Order:
    plan = setup.plan
    per_rank = stages_per_rank(plan)
    return orders.build(plan.schedule, pipeline=plan.pipeline, microbatches=microbatches, stages_per_rank=per_rank)


def _by_cost(s: Subject, setup: Setup) -> tuple[StepLengths, str]:
    """Lengths by the cost model, and words for where they come from."""
    return plan_lengths(s, setup), f"lengths by the cost model, {s.target.name} on {s.cluster.name}"


def _given(setup: Setup, order: Order, times: Times | None) -> tuple[StepLengths, str]:
    """Equal stages with free communication, and words for where their lengths come from."""
    why = "lengths given: " if times else f"{setup.cluster.name} has no measured peak: "
    times, share = times or Times(), order.stages / order.pipeline
    forward, input_grad, weight_grad = (float(t) / share for t in (times.F, times.I, times.W))
    one = StageLengths(forward=forward, input_grad=input_grad, weight_grad=weight_grad)
    words = ", ".join(f"{k} = {float(getattr(times, k)):g} s" for k in "FIW")
    return StepLengths(stages=(one,) * order.stages), why + words + " a microbatch and rank, free communication"


def _says_something(setup: Setup) -> bool:
    """Whether the cluster has figures at all: `local` says nothing about its device until it is measured."""
    return bool(setup.cluster.device.peak_tflops)


def _gather(setup: Setup) -> Gather:
    return "never" if setup.plan.zero < 3 else setup.plan.zero_gather


def _interval(s: Subject, setup: Setup, seconds: float) -> tuple[float, float]:
    batch = batch_of(s, layouts_of([setup.plan], setup.model, setup.workload), precision(setup.plan, setup.workload))
    low, high = interval(batch, s.constants, batch.tensor * 0.0 + seconds)
    return float(low[0]), float(high[0])


def _ranks(setup: Setup, rank: int) -> tuple[int, ...]:
    """The global ranks of the pipeline that `rank` belongs to."""
    mesh = mesh_of(setup.plan)
    return mesh.group(rank, "pipeline")


def _replicas(setup: Setup, slow: Mapping[int, float]) -> list[tuple[dict[int, float], tuple[int, ...]]]:
    """Each replica that has slow ranks: factors by pipeline rank (that of its slowest partner), and its ranks."""
    mesh = mesh_of(setup.plan)
    found: dict[tuple[int, int], tuple[dict[int, float], Coord]] = {}
    for rank, factor in slow.items():
        at = mesh.coord(rank)
        factors, first = found.setdefault((at.replicate, at.shard), ({}, at))
        factors[at.pipeline] = max(factor, factors.get(at.pipeline, 0.0))
        found[at.replicate, at.shard] = (factors, first)
    return [(factors, _ranks(setup, mesh.rank(first))) for factors, first in found.values()]
