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
COMPILED_SPLIT = Code(
    code="X105",
    title="compile with a split backward",
    because="a compiled block computes input and weight gradients in one go, so its weight gradients cannot wait",
)

PLAN_FIELDS: dict[str, tuple[Any, str]] = {
    "expert": (1, "placing experts on different ranks"),
    "expert_tensor": (1, "splitting experts over ranks"),
    "overlap": ((), "running communication beside computation inside a layer"),
    "capacity_factor": (None, "limiting the tokens of an expert"),
}
"""Plan fields of which only one value is built: that value, and what any other would be."""


SPLIT_SCHEDULES = ("zb_h1", "zb_v", "dualpipe_v")
"""Schedules in which weight gradients are an action of their own."""


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
    faults += compile_faults(setup)
    return faults if running else [replace(fault, severity="warning") for fault in faults]


def compile_faults(setup: Setup) -> list[Fault]:
    """What compiled blocks cannot do together with."""
    plan, model, faults = setup.plan, setup.model, []
    if not plan.compile:
        return []
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
