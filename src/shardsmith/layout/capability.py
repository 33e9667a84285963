"""What a plan may say but the engine cannot do yet: refused before a run, never ignored.

Whoever builds one of these removes its row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardsmith.errors import Code, Fault
from shardsmith.plan.setup import Setup

NOT_BUILT = Code(
    code="X101",
    title="not built yet",
    because="the engine cannot do what this field asks for, and ignoring it would train another plan than this",
)
COMPILED_RECOMPUTE = Code(
    code="X103",
    title="compile with selective recompute",
    because="a compiler decides by itself which activations of a block it keeps, so the choice would be ignored",
)
COMPILED_DROPOUT = Code(
    code="X104",
    title="compile with dropout",
    because="dropout masks are named and drawn in Python, which a block compiled whole cannot call",
)
COMPILED_EXPERTS = Code(
    code="X106",
    title="compile with experts or latent attention",
    because="how many rows an expert gets is known only when tokens have chosen, and a block is compiled whole",
)
COMPILED_SPLIT = Code(
    code="X105",
    title="compile with a split backward",
    because="a compiled block computes input and weight gradients in one go, so its weight gradients cannot wait",
)

PLAN_FIELDS: dict[str, tuple[Any, str]] = {
    "overlap": ((), "running communication beside computation inside a layer"),
}
"""Plan fields of which only one value is built: that value, and what any other would be."""


SPLIT_SCHEDULES = ("zb_h1", "zb_v", "dualpipe_v")
"""Schedules in which weight gradients are an action of their own."""


def capability_faults(setup: Setup, *, running: bool) -> list[Fault]:
    """Fields that ask for what is not built: errors before a run, warnings where a plan is only thought about."""
    plan, faults = setup.plan, []
    for key, (built, what) in PLAN_FIELDS.items():
        if getattr(plan, key) != built:
            hint = f"leave {key} out" if built in (None, ()) else f"{key} = {str(built).lower()}"
            faults.append(NOT_BUILT.fault(f"{what} is not built yet", *setup.said(f"plan.{key}"), hint=hint))
    if setup.model.mtp_layers:
        said = setup.said("model.mtp_layers")
        message = "training layers that predict further tokens is not built yet"
        faults.append(NOT_BUILT.fault(message, *said, hint="mtp_layers = 0: the model without them"))
    faults += compile_faults(setup)
    return faults if running else [replace(fault, severity="warning") for fault in faults]


def compile_faults(setup: Setup) -> list[Fault]:
    """What compiled blocks cannot do together with."""
    plan, model, faults = setup.plan, setup.model, []
    if not plan.compile:
        return []
    if model.experts is not None or model.latent is not None:
        part = (setup.origin("model.experts"), "[experts]" if model.experts is not None else "[latent]")
        message = f"{model.name} cannot be compiled"
        faults.append(COMPILED_EXPERTS.fault(message, *setup.said("plan.compile"), part, hint="compile = false"))
    if plan.recompute == "selective":
        said = setup.said("plan.compile", "plan.recompute")
        hint = "recompute = none or full, or compile = false"
        faults.append(COMPILED_RECOMPUTE.fault("compiled blocks recompute nothing selectively", *said, hint=hint))
    if model.dropout or model.attention_dropout:
        said = setup.said("plan.compile", "model.dropout", "model.attention_dropout")
        faults.append(COMPILED_DROPOUT.fault("compiled blocks cannot drop anything", *said, hint="compile = false"))
    if plan.schedule in SPLIT_SCHEDULES:
        said = setup.said("plan.compile", "plan.schedule")
        message = f"{plan.schedule} puts weight gradients off"
        faults.append(COMPILED_SPLIT.fault(message, *said, hint="schedule = interleaved, or compile = false"))
    return faults
