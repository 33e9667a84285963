"""Changes: a proposed plan with a value for every field that has to be typed, and in words what of it is new."""

from __future__ import annotations

from shardsmith.errors import Refused
from shardsmith.plan.batch import batching
from shardsmith.plan.diff import diff
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup, shown
from shardsmith.plan.stages import placement_of, stages_per_rank


def typed(setup: Setup, plan: Plan) -> Plan:
    """`plan`, derived from that of `setup`, with a value for each field that the latter states and it leaves open.

    An open field cannot be laid over one that is stated: `--set` has no word for it. Layers that were stated stay
    where they still name the same stages, else they are weighed; of microbatch and microbatches those are stated that
    were, or what is needed.
    """
    own = setup.plan
    if own.stages_per_rank is not None and plan.stages_per_rank is None:
        plan = plan.with_(stages_per_rank=stages_per_rank(plan))
    if own.layers is not None and plan.layers is None:
        plan = plan.with_(layers=own.layers if placement_of(plan) == placement_of(own) else "weighed")
    try:
        cut = batching(plan, setup.workload)
    except Refused:
        return plan
    if own.microbatch is None and own.microbatches is None:
        return plan.with_(microbatch=cut.microbatch if cut.microbatch > 1 else None, microbatches=None)
    return plan.with_(
        microbatch=None if own.microbatch is None else cut.microbatch,
        microbatches=None if own.microbatches is None else cut.microbatches,
    )


def changes(setup: Setup, plan: Plan, without: str = "") -> list[str]:
    """`tensor = 8`, `data = 1`: every field that makes `plan` of that of `setup`, save the one called `without`."""
    moved = diff(setup.plan, plan)
    return [f"{change.field} = {shown(change.after)}" for change in moved if change.field != without]
