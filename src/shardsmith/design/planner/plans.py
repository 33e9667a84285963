"""From a row of layouts back to a Plan, and the neighbours of a plan."""

from __future__ import annotations

from typing import Any

from shardsmith.design.cost.layouts import ORDERS, RECOMPUTE, Layouts
from shardsmith.design.cost.schedules import SCHEDULES
from shardsmith.design.cost.subject import Subject
from shardsmith.design.planner.space import policies_of
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import settled
from shardsmith.schedule import orders

WHOLE = (
    *("data", "replicate", "tensor", "pipeline", "context", "ulysses", "expert", "expert_tensor"),
    *("zero", "microbatch", "microbatches"),
)


def plan_of(p: Layouts, row: int, base: Plan) -> Plan:
    """The Plan in row `row`; fields that do not vary are those of `base`."""
    schedule = SCHEDULES[int(p.schedule[row])]
    each = int(p.stages_per_rank[row])
    changes: dict[str, Any] = {name: int(getattr(p, name)[row]) for name in WHOLE}
    return base.with_(
        **changes,
        order=ORDERS[int(p.order[row])],
        zero_gather="per_step" if p.per_step[row] else "per_pass",
        schedule=schedule,
        stages_per_rank=None if each == orders.load(schedule).DEFAULT_STAGES_PER_RANK else each,
        layers="weighed" if p.weighed[row] else None,
        sequence_parallel=bool(p.sequence_parallel[row]),
        replicate_kv=bool(p.replicate_kv[row]),
        recompute=RECOMPUTE[int(p.recompute[row])],
        overlap=policies_of(int(p.overlap[row])),
    )


def setup_of(s: Subject, p: Layouts, row: int, base: Plan) -> Setup:
    """The setup of one row, layers in numbers."""
    setup = Setup(model=s.model, workload=s.workload, cluster=s.cluster, plan=plan_of(p, row, base), source="planner")
    return settled(setup)
