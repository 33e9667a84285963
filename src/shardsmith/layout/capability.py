"""What a plan may say but the engine cannot do yet: refused before a run, never ignored.

Whoever builds one of these removes its row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardsmith.errors import Code, Fault
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.schedule import orders

NOT_BUILT = Code(
    code="X101",
    title="not built yet",
    because="the engine cannot do what this field asks for, and ignoring it would train another plan than this",
)
SCHEDULE_NOT_BUILT = Code(
    code="X102",
    title="schedule not built yet",
    because="without its order of actions nothing about this schedule can be computed or run",
)

PLAN_FIELDS: dict[str, tuple[Any, str]] = {
    "replicate": (1, "sharding inside groups of data ranks"),
    "context": (1, "splitting the sequence of attention over ranks"),
    "ulysses": (1, "exchanging heads for sequence in attention"),
    "expert": (1, "placing experts on different ranks"),
    "expert_tensor": (1, "splitting experts over ranks"),
    "zero": (0, "sharding optimiser state, gradients or weights over data ranks"),
    "zero_gather": ("per_pass", "gathering sharded weights once a step"),
    "recompute": ("none", "computing activations a second time in the backward pass"),
    "overlap": ((), "running communication beside computation inside a layer"),
    "capacity_factor": (None, "limiting the tokens of an expert"),
    "compile": (False, "compiling blocks"),
}
"""Plan fields of which only one value is built: that value, and what any other would be."""

DTYPES = ("float32", "float64")
"""Dtypes that a workload may compute in; states are then kept in the same dtype."""

SCHEDULES = ("zb_h1", "zb_v", "dualpipe_v", "looped_bfs")
"""Names that plans may use once their schedule stands in `schedule.orders`."""


def capability_faults(setup: Setup, *, running: bool) -> list[Fault]:
    """Fields that ask for what is not built: errors before a run, warnings where a plan is only thought about."""
    plan, faults = setup.plan, []
    for key, (built, what) in PLAN_FIELDS.items():
        if getattr(plan, key) != built:
            hint = f"leave {key} out" if built in (None, ()) else f"{key} = {str(built).lower()}"
            faults.append(NOT_BUILT.fault(f"{what} is not built yet", *setup.said(f"plan.{key}"), hint=hint))
    if setup.workload.dtype not in DTYPES:
        message = f"training in {setup.workload.dtype} is not built yet"
        faults.append(NOT_BUILT.fault(message, *setup.said("workload.dtype"), hint="dtype = " + " or ".join(DTYPES)))
    usual = precision(
        plan.with_(param_dtype=None, grad_dtype=None, reduce_dtype=None, optimizer_dtype=None), setup.workload
    )
    for kind in ("param", "grad", "reduce", "optimizer"):
        key, dtype = f"{kind}_dtype", getattr(usual, kind)
        if getattr(plan, key) not in (None, dtype):
            message = f"a {key} other than the workload's is not built yet"
            said = setup.said(f"plan.{key}", "workload.dtype")
            faults.append(NOT_BUILT.fault(message, *said, hint=f"leave {key} out ({dtype})"))
    return faults if running else [replace(fault, severity="warning") for fault in faults]


def schedule_capability_faults(setup: Setup) -> list[Fault]:
    """A schedule that is known by name but has no order yet; always an error."""
    name = setup.plan.schedule
    if name not in SCHEDULES or name in orders.names():
        return []
    hint = "schedule = one of " + ", ".join(orders.names())
    return [SCHEDULE_NOT_BUILT.fault(f"the schedule {name} is not built yet", *setup.said("plan.schedule"), hint=hint)]
