"""Demand: what is to be served, on what; and the layouts that a model and a cluster allow, as columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from shardsmith.design.cost.batch import Array
from shardsmith.design.cost.constants import values
from shardsmith.design.cost.devices import DeviceFacts
from shardsmith.design.cost.kernels import GENERATIONS
from shardsmith.design.cost.subject import Counts, count_weights, facts_of
from shardsmith.design.targets import Server, server_named
from shardsmith.errors import Code, Fault, raise_errors
from shardsmith.layout.axes.tensor import model_degrees
from shardsmith.plan.fixed import held_values, shown_value
from shardsmith.plan.plan import Plan
from shardsmith.specs.cluster import ClusterSpec
from shardsmith.specs.model import ModelSpec

DEFAULT_SERVER = "vllm"
"""The serving engine whose behaviour is planned for, unless another is named."""
ServingDtype = Literal["bfloat16", "float8"]

COUNTS = Code(
    code="I101",
    title="nothing to serve",
    because="context, concurrency and latency targets are sizes of a demand that exists",
)
NO_FIGURES = Code(
    code="I102",
    title="the cluster says too little to plan serving",
    because="a roofline needs the peak of the devices in the dtype served, their memory and its bandwidth, and links",
)
POSITIONS = Code(
    code="I103",
    title="context longer than the model's positions",
    because="a model with learned positions has one for each place up to its context, and none beyond",
)
UNHELD = Code(
    code="I104",
    title="no serving layout has what is held",
    because="a layout is its degrees: replicas fill the devices, tensor ranks cut whole heads, stages hold layers",
)
DEGREES = ("data", "tensor", "pipeline", "expert")
"""What a serving layout is made of."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """`concurrency` requests at once, each with up to `context` tokens in the cache (its prompt included).

    Weights are held and multiplied in `dtype`, the cache in `cache_dtype`. Latency targets in seconds, None: none.
    `server` is the engine that would run it. `fixed` holds degrees to one value each, or to some (`OneOf`).
    """

    model: ModelSpec
    cluster: ClusterSpec
    context: int
    concurrency: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    dtype: ServingDtype = "bfloat16"
    cache_dtype: ServingDtype = "bfloat16"
    server: Server = field(default_factory=lambda: server_named(DEFAULT_SERVER))
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def counts(self) -> Counts:
        """Elements of the model's tensors by how a layout splits them."""
        return count_weights(self.model)

    @cached_property
    def facts(self) -> DeviceFacts:
        """Measured shares of the cluster's device."""
        return facts_of(self.cluster)

    @property
    def rate(self) -> float:
        """Sustained FLOP/s of large matrix products in the dtype served."""
        peak, c = self.cluster.device.peak(self.dtype), values()
        assert peak is not None, "a dtype without a peak has been refused"
        if self.dtype == "float8":
            return peak * self.facts.matmul8_share * c["gemm_fp8"]
        generation = self.facts.generation if self.facts.generation in GENERATIONS else "other"
        return peak * self.facts.matmul_share * c[f"gemm_{generation}"]

    @property
    def memory_rate(self) -> float:
        """Sustained bytes/s of device memory."""
        bandwidth = self.cluster.device.memory_bandwidth_gbs
        assert bandwidth is not None, "a device without bandwidth has been refused"
        return bandwidth * 1e9 * values()["memory_share"]


@dataclass(frozen=True, kw_only=True)
class Servings:
    """Layouts as columns: `data` replicas of `pipeline` stages of `tensor` ranks; experts over `expert` ranks.

    `expert` is 1 (every tensor group holds all experts, each cut as an MLP is) or data x tensor (expert parallel:
    whole experts, spread over all replicas of a stage). Tensor ranks are neighbours, then replicas, then stages,
    as in a plan that says nothing else. Link levels as in `cost.collectives.reach`.
    """

    data: Array
    tensor: Array
    pipeline: Array
    expert: Array
    level_size: Array
    level_bandwidth: Array
    level_latency: Array

    def __len__(self) -> int:
        return len(self.data)

    @property
    def world(self) -> Array:
        """Devices of each layout."""
        return self.data * self.tensor * self.pipeline

    def plan(self, at: int) -> Plan:
        """The layout `at` as a Plan; a microbatch and schedule mean nothing here."""
        return Plan(
            data=int(self.data[at]),
            tensor=int(self.tensor[at]),
            pipeline=int(self.pipeline[at]),
            expert=int(self.expert[at]),
        )


def demand_faults(demand: Demand) -> list[Fault]:
    """What is wrong with a demand before any layout is looked at (I101 to I103)."""
    sizes = {"--context": demand.context, "--concurrency": demand.concurrency}
    faults = [
        COUNTS.fault(f"{option} = {value}", (option, str(value)), hint=f"{option} 1 or more")
        for option, value in sizes.items()
        if value < 1
    ]
    for option, target in (("--ttft-ms", demand.ttft_s), ("--tpot-ms", demand.tpot_s)):
        if target is not None and not target > 0:
            faults.append(
                COUNTS.fault(f"{option} is not above 0", (option, f"{target * 1e3:g}"), hint="a time above 0")
            )
    device = demand.cluster.device
    missing = [
        name
        for name, there in (
            (f"device.peak_tflops.{demand.dtype}", device.peak(demand.dtype)),
            ("device.memory_gib", device.memory_gib),
            ("device.memory_bandwidth_gbs", device.memory_bandwidth_gbs),
            ("devices_per_node", demand.cluster.devices_per_node),
            ("levels", demand.cluster.levels),
        )
        if not there
    ]
    if missing:
        message = f"cluster {demand.cluster.name} does not say {', '.join(missing)}"
        faults.append(NO_FIGURES.fault(message, (demand.cluster.name, device.name), hint="a preset such as h100"))
    if demand.model.positions == "learned" and demand.context > demand.model.context:
        message = f"{demand.model.name} has positions up to {demand.model.context}, not {demand.context}"
        said = (("--context", str(demand.context)), (demand.model.name, f"context = {demand.model.context}"))
        faults.append(POSITIONS.fault(message, *said, hint=f"--context {demand.model.context}"))
    for key in [key for key in demand.fixed if key not in DEGREES]:
        held = ("--fix", f"{key} = {shown_value(demand.fixed[key])}")
        message = f"serving layouts have no {key} that varies"
        faults.append(UNHELD.fault(message, held, hint="one of " + ", ".join(DEGREES)))
    return faults


def servings(demand: Demand) -> Servings:
    """Every layout of a demand that the model allows on the cluster: replicas fill the devices.

    Tensor degrees cut whole heads (key/value heads may be copied, where the engine does), stages hold at least one
    layer, expert parallel spreads equal numbers of whole experts. Raises `Refused` for a demand that is none, and
    where none of them has the degrees that are held (I104).
    """
    raise_errors(demand_faults(demand))
    model, devices = demand.model, demand.cluster.devices
    assert devices is not None, "a cluster without devices has been refused"
    rows: list[tuple[int, int, int, int]] = []
    for tensor in model_degrees(model, replicate_kv=demand.server.copies_kv):
        for pipeline in range(1, min(model.layers, devices // tensor) + 1):
            data = devices // (tensor * pipeline)
            rows.append((data, tensor, pipeline, 1))
            if model.experts is not None:
                most = data if demand.server.experts_over_data else 1
                while most and (model.experts.count % (most * tensor) or most * tensor == 1):
                    most -= 1
                rows += [(most, tensor, pipeline, most * tensor)] if most else []
    columns = np.array(_with_held(demand, rows), dtype=np.float64).T
    levels = demand.cluster.levels
    return Servings(
        data=columns[0],
        tensor=columns[1],
        pipeline=columns[2],
        expert=columns[3],
        level_size=np.array([[float(link.size or np.inf)] for link in levels]),
        level_bandwidth=np.array([[link.bandwidth_gbs * 1e9] for link in levels]),
        level_latency=np.array([[link.latency_us * 1e-6] for link in levels]),
    )


def _with_held(demand: Demand, rows: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """The layouts, as (data, tensor, pipeline, expert), that have the degrees that are held."""
    fixed = demand.fixed
    held = [row for row in rows if all(row[DEGREES.index(key)] in held_values(fixed, key) for key in fixed)]
    if held:
        return held
    for key in fixed:
        there = sorted({row[DEGREES.index(key)] for row in rows})
        if not set(there) & set(held_values(fixed, key)):
            message = f"no layout on {demand.cluster.devices} devices has {key} = {shown_value(fixed[key])}"
            hint = f"{key} = " + " or ".join(map(str, there))
            raise UNHELD.refuse(message, ("--fix", f"{key} = {shown_value(fixed[key])}"), hint=hint)
    said = [("--fix", f"{key} = {shown_value(value)}") for key, value in fixed.items()]
    raise UNHELD.refuse("no layout has all degrees that are held", *said, hint="fix fewer fields")
