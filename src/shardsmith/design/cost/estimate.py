"""Estimate: time, interval, breakdown and memory of one plan, the form in which everyone else reads the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from shardsmith.design.cost.batch import Array
from shardsmith.design.cost.held import Held, Share, held
from shardsmith.design.cost.interval import interval
from shardsmith.design.cost.layouts import Layouts, batch_of, layouts_of
from shardsmith.design.cost.step import step
from shardsmith.design.cost.subject import DEFAULT_TARGET, Subject, subject_of
from shardsmith.plan.plan import Plan
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import stages
from shardsmith.specs.flops import mfu, model_flops
from shardsmith.units import GIB


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Peak bytes of a pipeline rank, by item (`weights`, `gradients`, `optimizer`, `gathered`, `activations`,
    `logits`, `transient`, `reserve`), and the global stages that stand on it.
    """

    pipeline_rank: int
    stages: tuple[int, ...]
    items: Mapping[str, float]

    @property
    def total(self) -> float:
        """Bytes of all items."""
        return sum(self.items.values())

    def as_json(self) -> dict[str, Any]:
        """The rank as plain JSON values, sizes in GiB."""
        sizes = {name: size / GIB for name, size in self.items.items()}
        return {"pipeline_rank": self.pipeline_rank, "stages": list(self.stages), **sizes, "total": self.total / GIB}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the cost model says of one plan. Seconds and bytes; `interval_s` holds 80 % of measured runs of its kind.

    `breakdown` names the parts of the step, which add up to it. `tflops_per_gpu` counts `model_flops` (causal
    scores, nothing computed twice), `mfu` is its share of the dense peak.
    """

    step_time_s: float
    interval_s: tuple[float, float]
    breakdown: Mapping[str, float]
    memory: tuple[RankMemory, ...]
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return max(rank.total for rank in self.memory)


def estimate(
    setup: Setup,
    target: str = DEFAULT_TARGET,
    constants: Mapping[str, float] | None = None,
    imbalance: float = 1.0,
) -> Estimate:
    """What a legal plan costs, by `constants` or else the shipped ones.

    The fullest expert rank receives `imbalance` times the mean. Raises `Refused` (H501 to H503, X351) where cluster or
    target do not say enough, and for an imbalance that the plan cannot have (E107).
    """
    return estimate_plan(subject_of(setup, target, constants, imbalance), setup)


def estimate_plan(s: Subject, setup: Setup) -> Estimate:
    """`estimate` with the subject at hand; model, workload and cluster of `setup` are the subject's."""
    kinds = precision(setup.plan, setup.workload)
    p = layouts_of([setup.plan], setup.model, setup.workload)
    b = batch_of(s, p, kinds)
    parts = step(b, s.constants)
    low, high = interval(b, s.constants, parts.total)
    seconds = float(parts.total[0])
    tokens = setup.workload.global_batch * setup.workload.seq_len
    flops = model_flops(s.model, seq_len=setup.workload.seq_len, tokens=tokens).total / seconds / setup.plan.world
    used = mfu(flops, s.cluster.device.peak(setup.workload.dtype))
    assert used is not None, "a device without a peak has been refused"
    return Estimate(
        step_time_s=seconds,
        interval_s=(float(low[0]), float(high[0])),
        breakdown={f.name: float(getattr(parts, f.name)[0]) for f in fields(parts) if f.name != "total"},
        memory=rank_memory(s, setup),
        tokens_per_s_per_gpu=tokens / seconds / setup.plan.world,
        tflops_per_gpu=flops / 1e12,
        mfu=used,
    )


def rank_memory(s: Subject, setup: Setup) -> tuple[RankMemory, ...]:
    """Peak memory of every pipeline rank of a plan, from the layers that really stand on it."""
    kinds, plan = precision(setup.plan, setup.workload), setup.plan
    where = stages(plan, setup.model)
    ranks = range(plan.pipeline)
    own = [[stage for stage in where if stage.rank == rank] for rank in ranks]
    sparse = [sum(setup.model.is_sparse(layer) for stage in mine for layer in stage.layers) for mine in own]
    layers = [sum(len(stage.layers) for stage in mine) for mine in own]
    share = Share(
        dense=_array(count - there for count, there in zip(layers, sparse, strict=True)),
        sparse=_array(sparse),
        embedding=_array(any(stage.embedding for stage in mine) for mine in own),
        head=_array(any(stage.head for stage in mine) for mine in own),
        rank=_array(ranks),
    )
    p = _repeated(plan, setup, len(own))
    found = held(s, p, batch_of(s, p, kinds), kinds, share)
    names = [f.name for f in fields(Held)]
    return tuple(
        RankMemory(
            pipeline_rank=rank,
            stages=tuple(stage.index for stage in own[rank]),
            items={name: float(getattr(found, name)[rank]) for name in names},
        )
        for rank in ranks
    )


def _array(values: Any) -> Array:
    return np.array([float(value) for value in values])


def _repeated(plan: Plan, setup: Setup, count: int) -> Layouts:
    return layouts_of([plan], setup.model, setup.workload).select(np.zeros(count, dtype=np.intp))
