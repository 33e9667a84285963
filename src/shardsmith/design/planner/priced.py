"""Priced: a check, and what the plan costs where cluster and plan allow it to be said. Imports no arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardsmith.errors import Fault
from shardsmith.layout.check import Checked, as_json
from shardsmith.layout.shards import StageStates
from shardsmith.plan.setup import Setup

if TYPE_CHECKING:
    from shardsmith.design.cost.estimate import Estimate
    from shardsmith.design.planner.result import Neighbour

NOT_STRUCTURAL = ("H402", "H404")
"""Errors with which a plan still has a price: too many ranks for the cluster, too much state for a device."""


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A check, and where cluster and plan allow it what the plan costs, what binds and which neighbours are better.

    `barred` neighbours would be faster but do not fit. `anew`, where asked for, holds the best plan with
    these degrees, and with each degree one step further. `target` is the software that was priced.
    """

    checked: Checked
    faults: tuple[Fault, ...]
    estimate: Estimate | None = None
    better: tuple[Neighbour, ...] = ()
    barred: tuple[Neighbour, ...] = ()
    anew: tuple[Neighbour, ...] = ()
    binds: str = ""
    target: str | None = None

    @property
    def setup(self) -> Setup:
        """What was checked, with layers in numbers."""
        return self.checked.setup

    @property
    def memory(self) -> tuple[StageStates, ...]:
        """The states of each stage."""
        return self.checked.memory

    @property
    def errors(self) -> tuple[Fault, ...]:
        """Faults that forbid the plan."""
        return tuple(f for f in self.faults if f.severity == "error")

    @property
    def warnings(self) -> tuple[Fault, ...]:
        """Faults that the plan may have."""
        return tuple(f for f in self.faults if f.severity == "warning")

    @property
    def remarks(self) -> tuple[str, ...]:
        """On what the price rests that the plan does not have, or which devices it leaves out; why there is none."""
        world, devices = self.setup.plan.world, self.setup.cluster.devices
        if self.estimate is None:
            return () if self.errors else (f"no price: {why_unpriced(self.checked)}",)
        found = []
        if devices is not None and world > devices:
            found.append(f"priced as if there were {world:,} devices, of which the cluster has {devices:,}")
        if devices is not None and world < devices:
            used, share = self.estimate, world / devices
            over = f"MFU {used.mfu * share:.1%}, {used.tokens_per_s_per_gpu * share:,.0f} tokens/s a device"
            found.append(f"MFU and tokens/s count the {world:,} devices in use; over all {devices:,}: {over}")
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values. With a price `memory_gib` counts every item by rank; without one states by stage, and
        `unpriced` says why.
        """
        data = as_json(self.checked)
        data |= {"errors": [f.as_json() for f in self.errors], "warnings": [f.as_json() for f in self.warnings]}
        data |= {"workload": vars(self.setup.workload), "target": self.target, "remarks": list(self.remarks)}
        if self.estimate is None:
            return data | {"unpriced": why_unpriced(self.checked)}
        return data | {
            "memory_gib": [rank.as_json() for rank in self.estimate.memory],
            "step_time_s": self.estimate.step_time_s,
            "interval_s": list(self.estimate.interval_s),
            "mfu": self.estimate.mfu,
            "breakdown": dict(self.estimate.breakdown),
            "better": [neighbour.as_json() for neighbour in self.better],
            "barred": [neighbour.as_json() for neighbour in self.barred],
            "anew": [neighbour.as_json() for neighbour in self.anew],
            "binds": self.binds,
        }


def priceable(checked: Checked) -> bool:
    """Whether the plan is sound and the cluster has figures for its dtype."""
    return not why_unpriced(checked)


def why_unpriced(checked: Checked) -> str:
    """Why a plan has no price; empty where it has one."""
    cluster, dtype = checked.setup.cluster, checked.setup.workload.dtype
    device = cluster.device
    if any(fault.code not in NOT_STRUCTURAL for fault in checked.errors):
        return "the plan has errors"
    if not (cluster.levels and device.memory_bandwidth_gbs and device.memory_gib):
        return f"cluster {cluster.name} says too little about links, or about the memory of a device"
    return "" if device.peak(dtype) else f"{device.name} has no known peak in {dtype}"
