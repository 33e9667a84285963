"""Estimate: time, interval, breakdown and memory of one plan, the form in which everyone else reads the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.held import Held, Share, held
from shardsmith.design.cost.interval import interval
from shardsmith.design.cost.layouts import batch_of, layouts_of
from shardsmith.design.cost.step import step
from shardsmith.design.cost.subject import DEFAULT_TARGET, Subject, subject_of
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import Stage, stages
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


PART_WORDS = {
    "compute": "compute",
    "exchange": "exchange inside layers",
    "bubble": "pipeline bubble",
    "imbalance": "uneven stages",
    "pipeline": "messages between stages",
    "data": "gradients and weights over data ranks, exposed",
    "optimizer": "optimiser step",
}
"""What a person reads for each part of a step."""
ITEM_WORDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimiser states",
    "gathered": "gathered weights",
    "activations": "activations",
    "logits": "logits",
    "transient": "work space",
    "reserve": "runtime and allocator",
}
"""What a person reads for each item of memory."""
NO_TIME = 1e9
"""Times its bandwidth, a link takes no time."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the cost model says of one plan. Seconds and bytes; `interval_s` holds 80 % of measured runs of its kind.

    `breakdown` names the parts of the step, which add up to it: `compute` of the mean rank, and apart from it
    `exchange`, what its layers wait for tensor, context, expert and (at ZeRO 3) data ranks. `tflops_per_gpu` counts
    `model_flops` (causal scores, nothing computed twice), `mfu` is its share of the dense peak.
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
    return estimate_plans(s, [setup])[0]


def estimate_plans(s: Subject, setups: Sequence[Setup]) -> tuple[Estimate, ...]:
    """`estimate_plan` of several plans at once, which states in the same dtypes."""
    first = setups[0]
    kinds = precision(first.plan, first.workload)
    b = batch_of(s, layouts_of([setup.plan for setup in setups], s.model, s.workload), kinds)
    parts, memory = step(b, s.constants), _memory(s, setups)
    alone = np.minimum(step(_without_links(b), s.constants).compute, parts.compute)
    low, high = interval(b, s.constants, parts.total)
    tokens = s.workload.global_batch * s.workload.seq_len
    flops = model_flops(s.model, seq_len=s.workload.seq_len, tokens=tokens).total
    found = []
    for at, setup in enumerate(setups):
        seconds = float(parts.total[at])
        achieved = flops / seconds / setup.plan.world
        used = mfu(achieved, s.peak)
        assert used is not None, "a device without a peak has been refused"
        others = (f.name for f in fields(parts) if f.name not in ("total", "compute"))
        named = {"compute": alone, "exchange": parts.compute - alone, **{k: getattr(parts, k) for k in others}}
        one = Estimate(
            step_time_s=seconds,
            interval_s=(float(low[at]), float(high[at])),
            breakdown={name: float(part[at]) for name, part in named.items()},
            memory=memory[at],
            tokens_per_s_per_gpu=tokens / seconds / setup.plan.world,
            tflops_per_gpu=achieved / 1e12,
            mfu=used,
        )
        found.append(one)
    return tuple(found)


def _without_links(b: Batch) -> Batch:
    """The same cases where links take no time: what their layers take less is exchange."""
    return replace(b, level_bandwidth=NO_TIME * b.level_bandwidth, level_latency=0.0 * b.level_latency)


def rank_memory(s: Subject, setup: Setup) -> tuple[RankMemory, ...]:
    """Peak memory of every pipeline rank of a plan, from the layers that really stand on it."""
    return _memory(s, [setup])[0]


def _memory(s: Subject, setups: Sequence[Setup]) -> list[tuple[RankMemory, ...]]:
    """`rank_memory` of several plans, all ranks of all plans in one go."""
    own = [_own_stages(setup) for setup in setups]
    every = [stages for ranks in own for stages in ranks]
    sparse = [sum(s.model.is_sparse(layer) for stage in mine for layer in stage.layers) for mine in every]
    layers = [sum(len(stage.layers) for stage in mine) for mine in every]
    share = Share(
        dense=_array(count - there for count, there in zip(layers, sparse, strict=True)),
        sparse=_array(sparse),
        embedding=_array(any(stage.embedding for stage in mine) for mine in every),
        head=_array(any(stage.head for stage in mine) for mine in every),
        rank=_array(rank for ranks in own for rank in range(len(ranks))),
    )
    kinds = precision(setups[0].plan, setups[0].workload)
    row = np.repeat(np.arange(len(setups)), [len(ranks) for ranks in own])
    p = layouts_of([setup.plan for setup in setups], s.model, s.workload).select(row)
    sizes = held(s, p, batch_of(s, p, kinds), kinds, share)
    columns = {f.name: getattr(sizes, f.name).tolist() for f in fields(Held)}
    found, at = [], 0
    for ranks in own:
        memory = []
        for rank, mine in enumerate(ranks):
            items = {name: column[at] for name, column in columns.items()}
            memory.append(RankMemory(pipeline_rank=rank, stages=tuple(stage.index for stage in mine), items=items))
            at += 1
        found.append(tuple(memory))
    return found


def _own_stages(setup: Setup) -> list[list[Stage]]:
    """The stages of every pipeline rank."""
    found: list[list[Stage]] = [[] for _ in range(setup.plan.pipeline)]
    for stage in stages(setup.plan, setup.model):
        found[stage.rank].append(stage)
    return found


def _array(values: Any) -> Array:
    return np.array([float(value) for value in values])
