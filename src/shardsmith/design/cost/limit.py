"""Limit: whether what a rank holds at its peak fits on its device."""

from __future__ import annotations

from collections.abc import Sequence

from shardsmith.design.cost.estimate import RankMemory
from shardsmith.errors import Code, Fault
from shardsmith.plan.setup import Setup
from shardsmith.units import GIB, MIB

TOTAL = Code(
    code="H405",
    title="a rank's peak exceeds its device's memory",
    because="weights, states, activations in flight, logits, buffers and the runtime's own share have to fit together",
)


def total_faults(setup: Setup, memory: Sequence[RankMemory], hint: str) -> list[Fault]:
    """A peak above the device's memory (H405), with what it is made of; none where the device states no memory."""
    limit = device_bytes(setup)
    fullest = max(memory, key=lambda rank: rank.total)
    if not limit or fullest.total <= limit:
        return []
    items = ", ".join(f"{name} {size / GIB:.1f}" for name, size in fullest.items.items() if size > 0.005 * limit)
    message = (
        f"pipeline rank {fullest.pipeline_rank} holds {fullest.total / GIB:.1f} GiB at its peak ({items}), "
        f"{too_many(fullest.total, limit)} more than {setup.cluster.device.name} has"
    )
    said = setup.said("plan.tensor", "plan.pipeline", "plan.zero", "plan.recompute", "plan.microbatch")
    device = (setup.cluster.name, f"memory_gib = {limit / GIB:g}")
    return [TOTAL.fault(message, *said, device, hint=hint)]


def device_bytes(setup: Setup) -> float:
    """Bytes of memory that the plan's device has; 0 where it states none."""
    return (setup.cluster.device.memory_gib or 0.0) * GIB


def too_many(size: float, limit: float) -> str:
    """By how much a size exceeds the limit, in GiB, or in MiB where that would read 0.0; both in bytes."""
    return f"{(size - limit) / GIB:.1f} GiB" if size - limit >= 0.05 * GIB else f"{(size - limit) / MIB:.0f} MiB"
