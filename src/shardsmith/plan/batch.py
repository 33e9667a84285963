"""How a global batch is cut: global_batch = data x microbatch x microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardsmith.errors import Code, Fault, Refused
from shardsmith.plan.plan import Plan
from shardsmith.specs.job import Workload

INDIVISIBLE = Code(
    code="B201",
    title="the global batch cannot be cut into equal microbatches",
    because="each data rank computes equal microbatches: global_batch = data x microbatch x microbatches",
)
CLASH = Code(
    code="B202",
    title="global_batch, data, microbatch and microbatches contradict one another",
    because="global_batch = data x microbatch x microbatches; two of the last three fix the third",
)
TOO_SMALL = Code(
    code="B203",
    title="a size or degree below 1",
    because="sizes and degrees are counts of things that must exist",
)

Origin = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class Batching:
    """`microbatch` sequences at a time, `microbatches` times a step, on each data rank."""

    microbatch: int
    microbatches: int


def batching(plan: Plan, workload: Workload) -> Batching:
    """How `plan` cuts the global batch; where neither half is stated, a microbatch is one sequence.

    Raises `Refused` (B201, B202) where global_batch = data x microbatch x microbatches cannot hold.
    """
    faults = batch_faults(plan, workload)
    if faults:
        raise Refused(faults)
    if plan.microbatches is None:
        microbatch = plan.microbatch or 1
        return Batching(microbatch=microbatch, microbatches=workload.global_batch // (plan.data * microbatch))
    return Batching(microbatch=workload.global_batch // (plan.data * plan.microbatches), microbatches=plan.microbatches)


def batch_faults(plan: Plan, workload: Workload, origin: Origin = lambda key: "plan") -> list[Fault]:
    """What is wrong with the batch arithmetic, each with the nearest legal values.

    `origin` tells where a value was written, by its key (`plan.data`, `workload.global_batch`).
    """
    values = [(origin("workload.global_batch"), f"global_batch = {workload.global_batch}")]
    stated = {"data": plan.data, "microbatch": plan.microbatch, "microbatches": plan.microbatches}
    values += [(origin(f"plan.{k}"), f"{k} = {v}") for k, v in stated.items() if v is not None]
    small = [pair for pair in values if int(pair[1].split(" = ")[1]) < 1]
    if small:
        return [TOO_SMALL.fault(f"{pair[1]} is below 1", pair, hint="1 or more") for pair in small]
    if plan.microbatch is not None and plan.microbatches is not None:
        return _clash(plan, workload, tuple(values))
    name, size = ("microbatches", plan.microbatches) if plan.microbatches else ("microbatch", plan.microbatch or 1)
    unit = plan.data * size
    if workload.global_batch % unit == 0:
        return []
    message = (
        f"global_batch = {workload.global_batch} is not a multiple of data x {name} = {plan.data} x {size} = {unit}"
    )
    hint = f"global_batch = {' or '.join(map(str, _neighbours(workload.global_batch, unit)))}"
    if workload.global_batch % plan.data == 0:
        each = workload.global_batch // plan.data
        hint += f"; or {name} = one of {', '.join(map(str, divisors(each)))}, which divide the {each} of a data rank"
    return [INDIVISIBLE.fault(message, *values, hint=hint)]


def _clash(plan: Plan, workload: Workload, values: tuple[tuple[str, str], ...]) -> list[Fault]:
    assert plan.microbatch is not None, "called with both halves stated"
    assert plan.microbatches is not None, "called with both halves stated"
    product = plan.data * plan.microbatch * plan.microbatches
    if product == workload.global_batch:
        return []
    hints = [f"global_batch = {product}"]
    for key, known in (("microbatches", plan.microbatch), ("microbatch", plan.microbatches)):
        third, rest = divmod(workload.global_batch, plan.data * known)
        if rest == 0:
            hints.append(f"{key} = {third}")
    message = (
        f"data x microbatch x microbatches = {plan.data} x {plan.microbatch} x {plan.microbatches} = {product}, "
        f"but global_batch = {workload.global_batch}"
    )
    return [CLASH.fault(message, *values, hint=", or ".join(hints))]


def _neighbours(value: int, unit: int) -> tuple[int, ...]:
    """The nearest positive multiples of `unit` below and above `value`."""
    below = value - value % unit
    return tuple(v for v in (below, below + unit) if v > 0)


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive `number`, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))
