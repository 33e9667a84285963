"""Every rule of every axis over one setup: all faults at once, each with a legal neighbour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardsmith.errors import Code, Fault, Refused
from shardsmith.layout.axes.context import context_faults
from shardsmith.layout.axes.data import data_faults
from shardsmith.layout.axes.expert import expert_faults
from shardsmith.layout.axes.tensor import model_degrees, tensor_faults
from shardsmith.layout.capability import capability_faults
from shardsmith.layout.cures import with_cures
from shardsmith.layout.overlap import overlap_faults
from shardsmith.layout.shards import StageStates, stage_states
from shardsmith.plan.batch import TOO_SMALL, batch_faults, batching
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import settled, stage_faults, stages_per_rank
from shardsmith.schedule import orders
from shardsmith.schedule.rules import FEW_MICROBATCHES, SMALL_GROUP
from shardsmith.specs.cluster import ClusterSpec, link_warnings
from shardsmith.units import GIB, counted, format_bytes

ORDER = Code(
    code="H401",
    title="order does not name every axis once",
    because="order lists the four axes from neighbouring ranks outwards; it decides which axis stays inside a node",
)
WORLD = Code(
    code="H402",
    title="more ranks than devices",
    because="every rank has a device of its own: world = pipeline x data x context x tensor",
)
IDLE = Code(
    code="H403",
    title="devices without a rank",
    because="devices that no rank uses are paid for all the same",
    severity="warning",
)
MEMORY = Code(
    code="H404",
    title="the states of a rank exceed its device's memory",
    because="weights, gradients and optimiser state stay on the device between steps, and activations come on top",
)
CONTEXT = Code(
    code="B204",
    title="sequence longer than the learned positions",
    because="a model with learned positions has one embedding for each position up to its context, and no further one",
)
ROPE_CONTEXT = Code(
    code="B205",
    title="sequence longer than the model's context",
    because="rotary positions can be computed for any length, but the model was not meant for angles this large",
    severity="warning",
)

TOO_LARGE = Code(
    code="B206",
    title="a size beyond any machine",
    because="no cluster has a million ranks along an axis, nor a step a million microbatches, and to lay out such a "
    "plan would take more time and memory than this machine has",
)

PLAN_COUNTS = (
    *("data", "replicate", "tensor", "pipeline", "context", "ulysses", "expert", "expert_tensor"),
    *("stages_per_rank", "microbatch", "microbatches", "loss_chunk"),
)
MOST, MOST_DATA = 10**6, 10**9
"""Degrees and counts of a plan, and sequences and their lengths, above which nobody means what is written."""
STILL_PLACED = {FEW_MICROBATCHES.code, SMALL_GROUP.code}
"""Faults of a schedule that leave its stages where they are, so that what is wrong with those is known at once."""
AXES = ("tensor", "context", "data", "pipeline")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a check found: faults, and the states of each stage where the plan is sound enough to have stages."""

    setup: Setup
    faults: tuple[Fault, ...]
    memory: tuple[StageStates, ...]

    @property
    def errors(self) -> tuple[Fault, ...]:
        """Faults that forbid the plan."""
        return tuple(f for f in self.faults if f.severity == "error")

    @property
    def warnings(self) -> tuple[Fault, ...]:
        """Faults that the plan may have."""
        return tuple(f for f in self.faults if f.severity == "warning")


def check(setup: Setup, *, running: bool = False) -> list[Fault]:
    """Every rule that `setup` breaks, errors and warnings; `running` makes errors of what is not built yet."""
    return list(examine(setup, running=running).faults)


def examine(setup: Setup, *, running: bool = False, cured: bool = True) -> Checked:
    """`check`, with the bytes of states a stage where the plan has no structural fault.

    Hints are tried against all rules unless `cured` is false: for whoever asks only whether a plan is legal.
    """
    able = capability_faults(setup, running=running)
    small = size_faults(setup)
    if small:  # nothing below can be computed from a degree of zero
        return Checked(setup=setup, faults=(*small, *able), memory=())
    faults = [*order_faults(setup), *axis_faults(setup), *overlap_faults(setup)]
    batch = batch_faults(setup.plan, setup.workload, setup.origin)
    schedule = schedule_faults(setup, 1 if batch else batching(setup.plan, setup.workload).microbatches)
    if batch:  # nobody knows yet whether there are enough microbatches
        schedule = [fault for fault in schedule if fault.code != FEW_MICROBATCHES.code]
    faults += [*batch, *schedule]
    if all(fault.code in STILL_PLACED for fault in schedule):
        setup = settled(setup)
        faults += stage_faults(setup)
    errors = {f.code for f in faults if f.severity == "error"}
    memory = stage_states(setup) if errors <= STILL_PLACED else ()
    faults += [*world_faults(setup), *length_faults(setup), *memory_faults(setup, memory)]
    faults += link_warnings(setup.cluster, setup.origin("cluster.levels"))
    if cured and errors:
        faults = with_cures(setup, faults, _errors)
    return Checked(setup=setup, faults=(*faults, *able), memory=memory)


def _errors(setup: Setup) -> frozenset[str]:
    """Codes of the errors of `setup`."""
    return frozenset(fault.code for fault in examine(setup, cured=False).errors)


def axis_faults(setup: Setup) -> list[Fault]:
    """What the degrees of the axes forbid, whatever the batch, the schedule and the cluster."""
    return [*tensor_faults(setup), *context_faults(setup), *data_faults(setup), *expert_faults(setup)]


def size_faults(setup: Setup) -> list[Fault]:
    """Degrees and sizes below 1, and far above what any machine has."""
    keys = [f"plan.{k}" for k in PLAN_COUNTS] + ["workload.seq_len", "workload.global_batch"]
    values = {key: getattr(getattr(setup, key.split(".")[0]), key.split(".")[1]) for key in keys}
    low = [(key, value) for key, value in values.items() if value is not None and value < 1]
    faults = [
        TOO_SMALL.fault(f"{key.split('.')[1]} = {value} is below 1", *setup.said(key), hint="1 or more")
        for key, value in low
    ]
    for key, value in values.items():
        most = MOST if key.startswith("plan.") and key != "plan.loss_chunk" else MOST_DATA
        if value is not None and value > most:
            message = f"{key.split('.')[1]} = {value} is above {most:,}"
            faults.append(TOO_LARGE.fault(message, *setup.said(key), hint=f"{most} or less"))
    return faults


def order_faults(setup: Setup) -> list[Fault]:
    """An order of axes that does not name each of the four once."""
    names = [axis.strip() for axis in setup.plan.order.replace(",", "-").split("-")]
    if sorted(names) == sorted(AXES):
        return []
    message = f"order = {setup.plan.order!r} does not name {', '.join(AXES)} once each"
    return [ORDER.fault(message, *setup.said("plan.order"), hint="order = " + "-".join(AXES))]


def schedule_faults(setup: Setup, microbatches: int) -> list[Fault]:
    """A schedule that does not exist, or forbids these numbers of pipeline ranks, stages and microbatches."""
    plan = setup.plan
    try:
        schedule = orders.load(plan.schedule)
    except Refused as refused:
        return list(refused.faults)
    return schedule.faults(
        pipeline=plan.pipeline,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank(plan),
        source=setup.origin("plan.schedule"),
    )


def world_faults(setup: Setup) -> list[Fault]:
    """More ranks than devices, or fewer; a cluster that takes any number of ranks (`local`) has neither."""
    plan, cluster = setup.plan, setup.cluster
    if cluster.devices is None or plan.world == cluster.devices:
        return []
    axes = [axis for axis in ("tensor", "pipeline", "data", "context") if axis != "context" or plan.context > 1]
    degrees = [getattr(plan, axis) for axis in axes]
    factors = f"{' x '.join(axes)} = {' x '.join(map(str, degrees))} = {plan.world}"
    message = f"{factors} ranks, but {_devices(cluster)}"
    said = setup.said(*(f"plan.{axis}" for axis in axes), "cluster.nodes", "cluster.devices_per_node")
    code = WORLD if plan.world > cluster.devices else IDLE
    return [code.fault(message, *said, hint=_world_hint(setup, cluster.devices))]


def _devices(cluster: ClusterSpec) -> str:
    each = cluster.devices_per_node or 1
    return f"{counted(cluster.nodes, 'node')} x {counted(each, 'device')} = {cluster.devices}"


def _world_hint(setup: Setup, devices: int) -> str:
    """Each single change that makes the ranks equal the devices."""
    plan, hints = setup.plan, []
    for axis in ("data", "pipeline", "tensor"):
        degree, rest = divmod(devices, plan.world // getattr(plan, axis))
        legal = axis != "tensor" or degree in model_degrees(setup.model, replicate_kv=plan.replicate_kv)
        legal &= axis != "pipeline" or degree * (plan.stages_per_rank or 1) <= setup.model.layers
        if rest == 0 and degree and legal:
            hints.append(f"{axis} = {degree}")
    nodes, rest = divmod(plan.world, setup.cluster.devices_per_node or plan.world)
    if rest == 0:
        hints.append(f"nodes = {nodes}")
    return ", or ".join(hints) or f"degrees whose product is {devices}"


def length_faults(setup: Setup) -> list[Fault]:
    """A sequence that is longer than the positions of the model."""
    model, seq_len = setup.model, setup.workload.seq_len
    if seq_len <= model.context:
        return []
    code = CONTEXT if model.positions == "learned" else ROPE_CONTEXT
    message = f"seq_len = {seq_len} is longer than the context of {model.name}, {model.context}"
    said = setup.said("workload.seq_len", "model.context")
    return [code.fault(message, *said, hint=f"seq_len = {model.context}")]


def memory_faults(setup: Setup, memory: tuple[StageStates, ...]) -> list[Fault]:
    """Pipeline ranks whose states alone do not fit on the cluster's device."""
    limit = setup.cluster.device.memory_gib
    if limit is None or not memory:
        return []
    by_rank: dict[int, int] = {}
    for stage in memory:
        by_rank[stage.pipeline_rank] = by_rank.get(stage.pipeline_rank, 0) + stage.states.total
    worst = max(by_rank, key=lambda rank: by_rank[rank])
    need, plan = by_rank[worst], setup.plan
    if need <= limit * GIB:
        return []
    message = (
        f"pipeline rank {worst} keeps {format_bytes(need)} of weights, gradients and optimiser state, "
        f"but {setup.cluster.device.name} has {limit:g} GiB"
    )
    least = -(-need * plan.tensor * plan.pipeline // int(limit * GIB))
    said = setup.said("plan.tensor", "plan.pipeline", "plan.zero")
    device = (setup.cluster.name, f"memory_gib = {limit:g}")
    hint = f"tensor x pipeline of at least {least} (now {plan.tensor} x {plan.pipeline})"
    return [MEMORY.fault(message, *said, device, hint=hint)]


def as_json(checked: Checked) -> dict[str, Any]:
    """A check as plain JSON values: faults, and the states of each stage in GiB.

    `memory_gib` counts states only (weights, gradients, AdamW), no activations. `step_time_s` is null and
    `better` empty, as a check does not price plans; `unknown` lists what a foreign configuration says that
    has no meaning here, and a Plan has nothing of the kind.
    """
    return {
        "errors": [f.as_json() for f in checked.errors],
        "warnings": [f.as_json() for f in checked.warnings],
        "unknown": [],
        "memory_gib": [
            {
                "stage": m.stage,
                "pipeline_rank": m.pipeline_rank,
                "weights": m.states.weights / GIB,
                "gradients": m.states.gradients / GIB,
                "optimizer": m.states.optimizer / GIB,
                "states": m.states.total / GIB,
            }
            for m in checked.memory
        ],
        "step_time_s": None,
        "better": [],
    }
