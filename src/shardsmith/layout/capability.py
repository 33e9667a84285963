"""What a plan may say but the engine cannot do yet: refused before a run, never ignored.

Whoever builds one of these removes its row.
"""

from __future__ import annotations

from dataclasses import replace

from shardsmith.errors import Code, Fault
from shardsmith.plan.setup import Setup
from shardsmith.schedule.orders import asynchronous_names
from shardsmith.schedule.rules import ASYNCHRONOUS

NOT_BUILT = Code(
    code="X101",
    title="not built yet",
    because="the engine cannot do what this field asks for, and ignoring it would train another plan than this",
)
COMPILED_EXPERTS = Code(
    code="X106",
    title="compile with experts or latent attention",
    because="how many rows an expert gets is known only when tokens have chosen, and a block is compiled whole",
)


def capability_faults(setup: Setup, *, running: bool) -> list[Fault]:
    """Fields that ask for what is not built: errors before a run, warnings where a plan is only thought about."""
    plan, model, faults = setup.plan, setup.model, []
    if model.mtp_layers:
        said = setup.said("model.mtp_layers")
        message = "training layers that predict further tokens is not built yet"
        faults.append(NOT_BUILT.fault(message, *said, hint="--set model.mtp_layers=0: the model without them"))
    for part in ("experts", "latent"):
        if getattr(model, part) is None:
            continue
        has = (setup.origin(f"model.{part}"), f"[{part}]")
        if plan.compile:
            message = f"{model.name} cannot be compiled"
            faults.append(COMPILED_EXPERTS.fault(message, *setup.said("plan.compile"), has, hint="compile = false"))
    faults += asynchronous_faults(setup)
    return faults if running else [replace(fault, severity="warning") for fault in faults]


def asynchronous_faults(setup: Setup) -> list[Fault]:
    """A schedule that never flushes."""
    name = setup.plan.schedule
    if name not in asynchronous_names():
        return []
    message = f"{name} has no flush, so it can be simulated but not trained"
    return [ASYNCHRONOUS.fault(message, *setup.said("plan.schedule"), hint="schedule = one_f_one_b, its flushed form")]
