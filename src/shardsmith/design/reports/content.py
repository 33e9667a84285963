"""What a report shows, gathered from a search or from one simulated plan; `html.py` lays it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardsmith.design.cost.estimate import ITEM_WORDS, PART_WORDS, Estimate, estimate
from shardsmith.design.cost.subject import DEFAULT_TARGET, unpriceable
from shardsmith.design.planner.result import SearchResult
from shardsmith.design.reports.sensitivity import Change, sensitivity
from shardsmith.design.simulator.simulation import Simulation, simulate_plan
from shardsmith.plan.mesh import AXES, mesh_of
from shardsmith.plan.setup import Setup
from shardsmith.units import GIB, format_seconds


@dataclass(frozen=True, kw_only=True)
class Report:
    """One plan with its prediction (None on a cluster without figures), its simulated step, and the search, if any."""

    simulation: Simulation
    target: str
    estimate: Estimate | None = None
    search: SearchResult | None = None
    sensitivity: tuple[Change, ...] = ()

    @property
    def setup(self) -> Setup:
        """The plan that is shown."""
        return self.simulation.setup


def report_of_search(result: SearchResult) -> Report:
    """The report of a search: its best plan, simulated."""
    setup = result.best.setup
    return Report(
        simulation=simulate_plan(setup, target=result.target),
        target=result.target,
        estimate=result.best.estimate,
        search=result,
        sensitivity=sensitivity(setup, result.target),
    )


def report_of_simulation(simulation: Simulation, target: str = DEFAULT_TARGET) -> Report:
    """The report of one simulated plan; without prediction where the cluster does not say enough for one."""
    setup = simulation.setup
    if simulation.low is None or unpriceable(setup.cluster, setup.workload):
        return Report(simulation=simulation, target=target)
    return Report(
        simulation=simulation,
        target=target,
        estimate=estimate(setup, target),
        sensitivity=sensitivity(setup, target),
    )


def figures(report: Report) -> list[tuple[str, str, str]]:
    """The headline: (label, value, note); of a search by the formulas that ranked, of a simulation what it prints."""
    s, e = report.simulation, report.estimate
    by_formulas = report.search is not None and e is not None
    step, (low, high) = (e.step_time_s, e.interval_s) if by_formulas and e else (s.seconds, (s.low, s.high))
    span = "" if low is None or high is None else f"80 % of runs: {format_seconds(low)} to {format_seconds(high)}"
    found = [
        ("step time, by formulas" if by_formulas else "step time, simulated", format_seconds(step), span),
        ("bubble, simulated", f"{s.bubble:.1%}", "idle share of compute lanes"),
    ]
    if s.slow:
        change = s.seconds / s.undisturbed - 1
        found.append(("stragglers cost", f"{change:+.1%}", ", ".join(f"rank {r} x {f:g}" for r, f in s.slow.items())))
    if e is not None:
        memory = report.setup.cluster.device.memory_gib
        found += [
            ("tokens/s a device", f"{e.tokens_per_s_per_gpu:,.0f}", f"{report.setup.plan.world:,} devices"),
            ("MFU", f"{e.mfu:.1%}", f"{e.tflops_per_gpu:.0f} TFLOP/s a device"),
            ("fullest device", f"{e.peak / GIB:.1f} GiB", "" if memory is None else f"of {memory:g} GiB"),
        ]
    return found


def plan_rows(setup: Setup) -> list[tuple[str, str]]:
    """The plan, key by key: degrees first, then everything that is not at its default."""
    plan = setup.plan
    degrees = [(key, str(getattr(plan, key))) for key in ("tensor", "pipeline", "data", "context", "expert")]
    shown = {key for key, _ in degrees}
    return degrees + [
        (key, "+".join(map(str, v)) if isinstance(v, tuple) else str(v).lower() if isinstance(v, bool) else str(v))
        for key, v in plan.stated().items()
        if key not in shown
    ]


def memory_bars(report: Report) -> dict[str, Any]:
    """Stacked bars of memory: a row a pipeline rank, segments in per cent of the widest of bars and device."""
    e = report.estimate
    assert e is not None, "memory needs an estimate"
    limit = report.setup.cluster.device.memory_gib
    most = max([e.peak / GIB, limit or 0.0]) * 1.02
    items = [item for item in ITEM_WORDS if any(rank.items.get(item, 0.0) > 0 for rank in e.memory)]
    rows = [
        {
            "label": f"pipeline rank {rank.pipeline_rank}",
            "stages": _stages(rank.stages),
            "total": rank.total / GIB,
            "parts": [
                {"item": item, "gib": rank.items[item] / GIB, "share": 100 * rank.items[item] / GIB / most}
                for item in items
            ],
        }
        for rank in e.memory
    ]
    return {
        "rows": rows,
        "items": [(item, ITEM_WORDS[item]) for item in items],
        "limit": limit,
        "limit_share": None if limit is None else 100 * limit / most,
    }


def _stages(stages: tuple[int, ...]) -> str:
    return ("stage " if len(stages) == 1 else "stages ") + ", ".join(map(str, stages))


def breakdown(report: Report) -> list[dict[str, Any]]:
    """Parts of the step: seconds and share of all, largest first."""
    e = report.estimate
    assert e is not None, "a breakdown needs an estimate"
    parts = sorted(e.breakdown.items(), key=lambda part: -part[1])
    return [
        {"part": part, "words": PART_WORDS.get(part, part), "seconds": seconds, "share": 100 * seconds / e.step_time_s}
        for part, seconds in parts
        if seconds > 0
    ]


def two_ways(report: Report) -> str:
    """Why the step by closed forms and the simulated one, and their bubbles, are not the same figures."""
    e, s = report.estimate, report.simulation
    assert e is not None, "two ways need an estimate"
    change = s.undisturbed / e.step_time_s - 1
    return (
        f"By formulas a step takes {format_seconds(e.step_time_s)}, simulated {format_seconds(s.undisturbed)} "
        f"({change:+.1%}). The simulated bubble counts all that compute waits for, messages and uneven stages too, "
        f"that of the formulas ({e.breakdown['bubble'] / e.step_time_s:.1%}) the filling and emptying of the pipeline."
    )


def rank_map(setup: Setup) -> Mapping[str, Any]:
    """What the picture of the cluster computes coordinates from: sizes and strides of the mesh, size of a node.

    `experts` is the second cut of the ranks of a replica (None: no expert axis): `plane` names the axes that number
    them, neighbours first; of these numbers `part` (expert_tensor) is the fastest digit, `size` (expert) the next.
    """
    mesh, plan = mesh_of(setup.plan), setup.plan
    plane = [axis for axis in mesh.order if axis in ("shard", "context", "tensor")]
    return {
        "experts": {"plane": plane, "size": plan.expert, "part": plan.expert_tensor} if plan.expert > 1 else None,
        "world": mesh.world,
        "node": setup.cluster.devices_per_node or mesh.world,
        "axes": [
            {"name": axis, "size": getattr(mesh.sizes, axis), "stride": getattr(mesh.strides, axis)} for axis in AXES
        ],
    }


def assumptions(report: Report) -> list[str]:
    """What the figures rest on, in words."""
    setup, s = report.setup, report.simulation
    found = list(report.search.assumptions) if report.search else []
    found.append(f"timeline: {s.origin}; one replica is shown, each row stands for its tensor and context ranks")
    if report.estimate is not None:
        found.append(f"software as declared for the target {report.target}")
    cluster = setup.cluster
    found.append(f"{cluster.device.name}: {cluster.device.origin}")
    found += [
        f"{link.name} ({link.path}): {link.bandwidth_gbs:g} GB/s a device one way, {link.latency_us:g} us a hop; "
        f"{link.origin}"
        for link in cluster.levels
    ]
    return list(dict.fromkeys(found))
