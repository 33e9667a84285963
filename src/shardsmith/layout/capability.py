"""What a plan may say but the engine cannot do yet: refused before a run, never ignored.

Whoever builds one of these removes its row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardsmith.errors import Code, Fault
from shardsmith.plan.setup import Setup
from shardsmith.schedule.orders import asynchronous_names
from shardsmith.schedule.rules import ASYNCHRONOUS

NOT_BUILT = Code(
    code="X101",
    title="not built yet",
    because="the engine cannot do what this field asks for, and ignoring it would train another plan than this",
)
PLAN_FIELDS: dict[str, tuple[Any, str]] = {
    "context": (1, "splitting the sequence of attention over ranks"),
    "ulysses": (1, "exchanging heads for sequence in attention"),
}
"""Plan fields of which only one value is built: that value, and what any other would be."""


MODEL_FIELDS = {"experts": "experts", "latent": "latent attention"}
"""Parts of a model that can be planned but not trained yet."""


def capability_faults(setup: Setup, *, running: bool) -> list[Fault]:
    """Fields that ask for what is not built: errors before a run, warnings where a plan is only thought about."""
    plan, faults = setup.plan, []
    for key, (built, what) in PLAN_FIELDS.items():
        if getattr(plan, key) != built:
            hint = f"leave {key} out" if built in (None, ()) else f"{key} = {str(built).lower()}"
            faults.append(NOT_BUILT.fault(f"{what} is not built yet", *setup.said(f"plan.{key}"), hint=hint))
    for key, what in MODEL_FIELDS.items():
        if getattr(setup.model, key) is not None:
            message = f"training a model with {what} is not built yet"
            said = (setup.origin(f"model.{key}"), f"[model.{key}]")
            faults.append(NOT_BUILT.fault(message, said, hint="a dense model, such as llama3-8b"))
    faults += asynchronous_faults(setup)
    return faults if running else [replace(fault, severity="warning") for fault in faults]


def asynchronous_faults(setup: Setup) -> list[Fault]:
    """A schedule that never flushes."""
    name = setup.plan.schedule
    if name not in asynchronous_names():
        return []
    message = f"{name} has no flush, so it can be simulated but not trained"
    return [ASYNCHRONOUS.fault(message, *setup.said("plan.schedule"), hint="schedule = one_f_one_b, its flushed form")]
