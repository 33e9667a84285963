"""Question: what is asked of the search, the plan fields it holds, and what is wrong with its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, lcm, prod
from typing import Any

from shardsmith.design.cost.layouts import ORDERS, OVERLAPS
from shardsmith.design.cost.schedules import SCHEDULES
from shardsmith.design.cost.subject import DEFAULT_TARGET
from shardsmith.design.planner.goodput import HOURS_BETWEEN_FAILURES, Failures
from shardsmith.design.planner.result import Objective
from shardsmith.design.planner.space import SHAPE
from shardsmith.errors import Code, Fault, Refused, raise_errors
from shardsmith.layout.check import MOST, MOST_DATA, TOO_LARGE, axis_faults, length_faults
from shardsmith.layout.check import size_faults as plan_size_faults
from shardsmith.plan.batch import TOO_SMALL
from shardsmith.plan.fixed import OneOf, combinations, held_values, word
from shardsmith.plan.line import TWICE, parse_plan_line, pieces, plan_table
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.specs.cluster import ClusterSpec, cluster_faults
from shardsmith.specs.job import Workload
from shardsmith.specs.model import ModelSpec
from shardsmith.units import GIB

UNSEARCHED = Code(
    code="L105",
    title="a value that the search does not vary",
    because="a grid from a file or a list of layers belongs to one plan; the search compares what it can build itself, "
    "and fields that are no part of its space have one value",
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
        """Fields of the search that are held, to one value each or to some (`OneOf`)."""
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
    """Plan fields to hold, from `key=value` or `key=one|other` texts.

    Raises `Refused` with everything at once: what is no plan field or has no such value, and what is not searched.
    """
    faults: list[Fault] = []
    pairs = [_alternatives(piece) for piece in pieces(",".join(texts))]
    first = ",".join(text for text, *_ in pairs)
    named = plan_table(first, "--fix", [])
    held: dict[str, list[Any]] = {key: [] for key in named}
    # The first of each together, as only then it shows that one is given twice; the others one by one.
    for line in (first, *(text for _, *others in pairs for text in others)):
        try:
            plan = parse_plan_line(line, source="--fix")
        except Refused as refused:
            faults += [_both(fault) for fault in refused.faults]
            continue
        for key in plan_table(line, "--fix", []):
            held[key].append(_canonical(key, getattr(plan, key)))
    raise_errors(faults)
    for key, values in held.items():
        faults += _unsearched(key, values)
    raise_errors(faults)
    return {key: values[0] if len(values) == 1 else OneOf(tuple(dict.fromkeys(values))) for key, values in held.items()}


def _alternatives(piece: str) -> list[str]:
    """`key=one` and `key=other` of `key=one|other`; no overlap reads `none`."""
    key, equals, value = piece.partition("=")
    if not equals or '"' in value:
        return [piece]
    nothing = key.strip() == "overlap"
    values = ("[]" if nothing and one.strip() == "none" else one for one in value.split("|"))
    return [f"{key}={one}" for one in values]


def _both(fault: Fault) -> Fault:
    """A field that is given twice may have either value, said so."""
    if fault.code != TWICE.code:
        return fault
    key = fault.message.partition(" ")[0]
    return replace(fault, hint=f"keep one {key}, or --fix '{key}=ONE|OTHER' for either of two values")


def _canonical(key: str, value: Any) -> Any:
    return tuple(sorted(value, key=OVERLAPS.index)) if key == "overlap" else value


def _unsearched(key: str, values: Sequence[Any]) -> list[Fault]:
    """Values that no plan of the search has, and several of a field that the search does not vary."""
    legal: dict[str, Sequence[Any]] = {"schedule": SCHEDULES, "layers": (None, "weighed"), "order": ORDERS}
    faults = []
    for value in values:
        if key in legal and value not in legal[key]:
            message, hint = f"{key} = {value} is not searched", "one of " + ", ".join(str(v) for v in legal[key] if v)
            faults.append(UNSEARCHED.fault(message, ("--fix", f"{key} = {value}"), hint=hint))
    if len(values) > 1 and key not in VARIED:
        said = ("--fix", f"{key} = {OneOf(tuple(values))}")
        faults.append(UNSEARCHED.fault(f"the search does not vary {key}", said, hint=f"{key}={word(values[0])}"))
    return faults


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
        setups = [_setup(q, Plan(**held)) for held in _each_alone(q.fixed)]
        faults += [fault for setup in setups for fault in plan_size_faults(setup)]
        faults += [fault for fault in length_faults(setups[0]) if fault.severity == "error"]
    if not faults:
        several = {key: held_values(q.fixed, key) for key in q.fixed if isinstance(q.fixed[key], OneOf)}
        alone = [replace(q, fixed={key: value}) for key, values in several.items() for value in values]
        faults += [fault for one in alone for fault in fixed_faults(one)]
    return list(dict.fromkeys(faults))


def _each_alone(fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first value of every held field, then each further value with the first ones of all others."""
    first = {key: held_values(fixed, key)[0] for key in fixed}
    return [first, *(first | {key: value} for key in fixed for value in held_values(fixed, key)[1:])]


def fixed_faults(q: Question) -> list[Fault]:
    """Errors of the held fields alone, with as many ranks beside them as they can use: no other choice mends them.

    Empty where some of the values that they may have go together.
    """
    every = []
    for fixed in combinations(q.fixed):
        held = Plan(**fixed)
        beside = {"context": held.ulysses, "data": lcm(held.replicate, held.expert * held.expert_tensor)}
        plan = held.with_(**{key: value for key, value in beside.items() if key not in fixed})
        found = [fault for fault in axis_faults(_setup(q, plan)) if fault.severity == "error"]
        if not found:
            return []
        every += found
    return list(dict.fromkeys(every))


def held_ranks(q: Question) -> int:
    """The fewest ranks that the degrees that are held make together."""
    degrees = ("tensor", "context", "pipeline", "data")
    return prod(min(held_values(q.fixed, key)) for key in degrees if key in q.fixed)


def _setup(q: Question, plan: Plan) -> Setup:
    origins = {"workload.seq_len": "--seq-len", "workload.global_batch": "--global-batch"}
    return Setup(model=q.model, workload=q.workload, cluster=q.cluster, plan=plan, source="--fix", origins=origins)


def capped(setup: Setup, memory_gib: float) -> Setup:
    """`setup` on devices of which a rank may hold `memory_gib`. Raises `Refused` for more than they have (L106)."""
    device = replace(setup.cluster.device, memory_gib=memory_gib)
    cluster = replace(setup.cluster, device=device)
    raise_errors([*_cap_faults(setup.cluster, memory_gib), *cluster_faults(cluster, "--memory-gib")])
    return replace(setup, cluster=cluster)


def _cap_faults(cluster: ClusterSpec, memory_gib: float | None) -> list[Fault]:
    device = cluster.device
    if memory_gib is None or device.memory_gib is None or memory_gib <= device.memory_gib:
        return []
    message = f"memory_gib = {memory_gib:g} is more than the {device.memory_gib:g} GiB of {device.name}"
    said = (("--memory-gib", f"{memory_gib:g}"), (cluster.name, f"memory_gib = {device.memory_gib:g}"))
    hint = f"{device.memory_gib:g} or less, or a cluster file whose device has more"
    return [ABOVE_DEVICE.fault(message, *said, hint=hint)]


def _without_effect(q: Question) -> list[Fault]:
    """A cap above what the device has, and failures without tokens, which alone make days of them."""
    faults = _cap_faults(q.cluster, q.memory_gib)
    if q.tokens is None and q.failures != Failures():
        message = "failures and checkpoints count in the days of a training, and nothing says how long it is"
        faults.append(GOAL.fault(message, ("--tokens", "not stated"), hint="--tokens 1e12"))
    return faults
