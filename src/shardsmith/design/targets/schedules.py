"""Schedules that a plan uses beside those that the software has for which it is priced."""

from __future__ import annotations

from shardsmith.design.targets.target import FLOAT8, Target
from shardsmith.errors import Code, Fault
from shardsmith.plan.setup import Setup

WITHOUT_SCHEDULE = Code(
    code="X352",
    title="a schedule that the software does not have",
    because="the plan is priced as if the software could run it; as it stands it offers other orders only",
    severity="warning",
)


def software_faults(setup: Setup, target: Target) -> list[Fault]:
    """A pipeline whose schedule the software of `target` does not have (X352), with those that it has."""
    plan = setup.plan
    if plan.pipeline == 1 or plan.schedule.partition(":")[0] in target.schedules:
        return []
    name, has = target.name.removesuffix(FLOAT8), target.schedules
    said = (setup.said("plan.schedule")[0], (f"target {name}", f"schedules = {', '.join(has) or 'none'}"))
    if not has:
        hint = "pipeline = 1: shardsmith plan --fix pipeline=1"
        return [
            WITHOUT_SCHEDULE.fault(
                f"{name} has no pipeline, the plan has {plan.pipeline} ranks of one", *said, hint=hint
            )
        ]
    message = f"schedule = {plan.schedule} is none that {name} has"
    hint = (
        f"shardsmith plan --fix 'schedule={'|'.join(has)}' searches those alone; or --target shardsmith, which has all"
    )
    return [WITHOUT_SCHEDULE.fault(message, *said, hint=hint)]
