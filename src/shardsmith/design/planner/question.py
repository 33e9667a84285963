"""Question: what is asked of the search, the plan fields it holds, and what is wrong with its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, lcm
from typing import Any

from shardsmith.design.cost.layouts import ORDERS
from shardsmith.design.cost.schedules import SCHEDULES
from shardsmith.design.cost.subject import DEFAULT_TARGET
from shardsmith.design.planner.goodput import HOURS_BETWEEN_FAILURES, Failures
from shardsmith.design.planner.result import Objective
from shardsmith.design.planner.space import SHAPE
from shardsmith.errors import Code, Fault, Refused
from shardsmith.layout.check import MOST, MOST_DATA, TOO_LARGE, axis_faults, length_faults
from shardsmith.layout.check import size_faults as plan_size_faults
from shardsmith.plan.batch import TOO_SMALL
from shardsmith.plan.line import parse_plan_line, plan_table
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.specs.cluster import ClusterSpec
from shardsmith.specs.job import Workload
from shardsmith.specs.model import ModelSpec
from shardsmith.units import GIB

UNSEARCHED = Code(
    code="L105",
    title="a value that the search does not vary",
    because="a grid from a file or a list of layers belongs to one plan; the search compares what it can build itself",
)
GOAL = Code(
    code="L104",
    title="a goal that is half stated",
    because="a time to train follows from the tokens, and tokens alone set no goal",
)

ABOVE_DEVICE = Code(
    code="L106",
    title="a cap above the device",
    because="a plan that needs more memory than its device has cannot run, whatever is asked for",
)

VARIED = (
    *SHAPE,
    *("order", "zero", "zero_gather", "replicate", "schedule", "stages_per_rank", "layers", "microbatch"),
    *("microbatches", "sequence_parallel", "recompute", "overlap"),
)
"""Plan fields that the search varies; all others are those of the base plan."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: model, workload, cluster, the `target` software, plan fields held `fixed`, and the goal.

    `imbalance` is what the fullest expert rank receives over the mean (a plan with fewer expert ranks: all there is).
    `memory_gib` caps what a rank may hold (None: what the device has). With `goal_days` and `tokens`, the answer
    is the fewest nodes of at most `cluster.nodes` (or the cheapest in device hours) that train in time.
    """

    model: ModelSpec
    workload: Workload
    cluster: ClusterSpec
    target: str = DEFAULT_TARGET
    imbalance: float = 1.0
    fixed: Mapping[str, Any] = field(default_factory=dict)
    count: int = 5
    memory_gib: float | None = None
    tokens: float | None = None
    goal_days: float | None = None
    objective: Objective = "fastest"
    failures: Failures = field(default_factory=Failures)
    explained: bool = True
    fronts: tuple[int, ...] = ()
    """Numbers of nodes whose plans that no other beats in time, memory and devices are wanted."""

    @property
    def base(self) -> Plan:
        """Fields that do not vary."""
        return Plan(**{key: value for key, value in self.fixed.items() if key not in VARIED})

    @property
    def varied(self) -> dict[str, Any]:
        """Fields of the search that are held to one value."""
        return {key: value for key, value in self.fixed.items() if key in VARIED}

    def on(self, nodes: int) -> Question:
        """The same question for so many nodes."""
        return replace(self, cluster=self.cluster.with_nodes(nodes))

    @property
    def limit(self) -> float:
        """Bytes that a rank may hold."""
        gib = self.memory_gib if self.memory_gib is not None else self.cluster.device.memory_gib
        assert gib is not None, "a device without a memory size has been refused"
        return gib * GIB


def fixed_fields(texts: Sequence[str]) -> dict[str, Any]:
    """Plan fields to hold, from `key=value` texts. Raises `Refused` for what is no plan field or cannot be searched."""
    faults: list[Fault] = []
    line = ",".join(texts)
    named = plan_table(line, "--fix", faults)
    plan = parse_plan_line(line, source="--fix")
    fixed = {key: getattr(plan, key) for key in named}
    for key, legal in (("schedule", SCHEDULES), ("layers", (None, "weighed")), ("order", ORDERS)):
        if key in fixed and fixed[key] not in legal:
            message, hint = f"{key} = {fixed[key]} is not searched", "one of " + ", ".join(str(v) for v in legal if v)
            faults.append(UNSEARCHED.fault(message, ("--fix", f"{key} = {fixed[key]}"), hint=hint))
    if faults:
        raise Refused(faults)
    return fixed


def size_faults(q: Question) -> list[Fault]:
    """Sizes of the question below 1 or beyond any machine, figures that are no positive numbers, a cap above the
    device, failures that nothing counts, and a model whose positions end before the sequence.
    """
    ranks = MOST // (q.cluster.devices_per_node or 1)
    sizes = {"nodes": (q.cluster.nodes, ranks), "global_batch": (q.workload.global_batch, MOST_DATA)}
    sizes |= {"seq_len": (q.workload.seq_len, MOST_DATA), "top": (q.count, MOST)}
    faults: list[Fault] = []
    for key, (value, most) in [*sizes.items(), *(("pareto", (nodes, ranks)) for nodes in q.fronts)]:
        said = (f"--{key.replace('_', '-')}", f"{key} = {value}")
        if value < 1:
            faults.append(TOO_SMALL.fault(f"{key} = {value} is below 1", said, hint="1"))
        if value > most:
            faults.append(TOO_LARGE.fault(f"{key} = {value} is above {most:,}", said, hint=f"{most} or less"))
    between = q.failures.interval_s
    positive = {
        "memory_gib": (q.memory_gib, f"{q.cluster.device.memory_gib or 80:g} or less"),
        "tokens": (q.tokens, "1e12"),
        "days": (q.goal_days, "30"),
        "mtbf_hours": (q.failures.device_hours, f"{HOURS_BETWEEN_FAILURES:g}"),
        "checkpoint_minutes": (None if between is None else between / 60.0, "30"),
    }
    for key, (figure, such_as) in positive.items():
        if figure is not None and not 0 < figure < inf:
            said = (f"--{key.replace('_', '-')}", f"{key} = {figure:g}")
            faults.append(TOO_SMALL.fault(f"{key} = {figure:g} is no number above 0", said, hint=such_as))
    faults += _without_effect(q)
    if not faults:
        setup = _setup(q, Plan(**q.fixed))
        faults += plan_size_faults(setup) + [fault for fault in length_faults(setup) if fault.severity == "error"]
    return faults


def fixed_faults(q: Question) -> list[Fault]:
    """Errors of the held fields alone, with as many ranks beside them as they can use: no other choice mends them."""
    held = Plan(**q.fixed)
    beside = {"context": held.ulysses, "data": lcm(held.replicate, held.expert * held.expert_tensor)}
    plan = held.with_(**{key: value for key, value in beside.items() if key not in q.fixed})
    return [fault for fault in axis_faults(_setup(q, plan)) if fault.severity == "error"]


def _setup(q: Question, plan: Plan) -> Setup:
    origins = {"workload.seq_len": "--seq-len", "workload.global_batch": "--global-batch"}
    return Setup(model=q.model, workload=q.workload, cluster=q.cluster, plan=plan, source="--fix", origins=origins)


def _without_effect(q: Question) -> list[Fault]:
    """A cap above what the device has, and failures without tokens, which alone make days of them."""
    faults, device = [], q.cluster.device
    if q.memory_gib is not None and device.memory_gib is not None and q.memory_gib > device.memory_gib:
        message = f"memory_gib = {q.memory_gib:g} is more than the {device.memory_gib:g} GiB of {device.name}"
        said = (("--memory-gib", f"{q.memory_gib:g}"), (q.cluster.name, f"memory_gib = {device.memory_gib:g}"))
        hint = f"{device.memory_gib:g} or less, or a cluster file whose device has more"
        faults.append(ABOVE_DEVICE.fault(message, *said, hint=hint))
    if q.tokens is None and q.failures != Failures():
        message = "failures and checkpoints count in the days of a training, and nothing says how long it is"
        faults.append(GOAL.fault(message, ("--tokens", "not stated"), hint="--tokens 1e12"))
    return faults
