"""Layouts: the plans to be priced, as a struct of arrays, and the Batch that they make of a subject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import permutations
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.schedules import DUALPIPE_V, SCHEDULES
from shardsmith.design.cost.subject import Subject
from shardsmith.layout.routing import most_uneven
from shardsmith.plan.batch import batching
from shardsmith.plan.plan import Overlap, Plan
from shardsmith.plan.precision import Precision
from shardsmith.plan.stages import even_layers, placement_of, stages_per_rank
from shardsmith.specs.job import Workload
from shardsmith.specs.model import ModelSpec
from shardsmith.units import DTYPE_BYTES

ORDER_AXES = ("tensor", "context", "data", "pipeline")
ORDERS = tuple("-".join(order) for order in permutations(ORDER_AXES))
"""Placements by index: axes from neighbouring ranks outwards."""
RECOMPUTE = ("none", "selective", "full")
OVERLAPS: tuple[Overlap, ...] = ("half_microbatches", "weight_gradient", "chunks")
"""Overlap policies; a layout holds the sum of 2**index of those it uses."""

HIDDEN_BY = {"half_microbatches": 0.9, "weight_gradient": 0.5, "chunks": 0.7}
"""Share of a layer's tensor communication that each policy can hide, declared: two half microbatches hide all but the
ends; the backward half can go under weight gradients; of chunked collectives the first chunk stays exposed."""
MOST_HIDDEN = max(HIDDEN_BY.values())
"""No policy hides more of a layer's tensor communication."""
PAIRED = 0.8
"""Share of dispatch and combine that hides where forward and backward run in pairs, declared (DualPipe: DeepSeek-AI
2024 reports all-to-alls fully hidden in the steady phase)."""
CONTENTION = 0.15
"""Share by which hidden communication slows the compute beside it, declared: about 20 of 132 multiprocessors copy
(DeepSeek-AI 2024, DeepSeek-V3)."""


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Plans as columns: every field one number a plan. `schedule`, `order` and `recompute` are indices; `weighed`
    says that layers are split by cost; `overlap` is a sum of bits; `chunk` is the loss chunk in tokens (0: none).
    """

    data: Array
    replicate: Array
    tensor: Array
    pipeline: Array
    context: Array
    ulysses: Array
    expert: Array
    expert_tensor: Array
    order: Array
    zero: Array
    per_step: Array
    schedule: Array
    stages_per_rank: Array
    weighed: Array
    microbatch: Array
    microbatches: Array
    sequence_parallel: Array
    replicate_kv: Array
    recompute: Array
    overlap: Array
    chunk: Array

    def __len__(self) -> int:
        return len(self.data)

    def select(self, which: NDArray[np.bool_] | NDArray[np.intp]) -> Self:
        """The plans that `which` (a mask or indices) names, in its order."""
        return type(self)(**{f.name: getattr(self, f.name)[which] for f in fields(self)})

    @property
    def shards(self) -> Array:
        """Ranks over which ZeRO spreads states; 1 at level 0."""
        return np.where(self.zero > 0, self.data / self.replicate * self.context, 1.0)

    @property
    def world(self) -> Array:
        """Ranks of each plan."""
        return self.data * self.tensor * self.pipeline * self.context


COLUMNS = tuple(f.name for f in fields(Layouts))


def layouts_of(plans: Sequence[Plan], model: ModelSpec, workload: Workload) -> Layouts:
    """Plans as columns; their batch arithmetic must hold. A list of layers that is not even counts as weighed."""
    rows = [_row(plan, model.layers, workload) for plan in plans]
    return Layouts(**{name: np.array([row[name] for row in rows], dtype=float) for name in COLUMNS})


def _row(plan: Plan, layers: int, workload: Workload) -> dict[str, float]:
    cut = batching(plan, workload)
    names = ("data", "replicate", "tensor", "pipeline", "context", "ulysses", "expert", "expert_tensor", "zero")
    order = "-".join(axis.strip() for axis in plan.order.replace(",", "-").split("-"))
    # A grid from a file is priced as 1F1B, or interleaved where a rank has several stages.
    plain = "interleaved" if stages_per_rank(plan) > 1 else "one_f_one_b"
    return {name: float(getattr(plan, name)) for name in names} | {
        "order": float(ORDERS.index(order)),
        "per_step": float(plan.zero_gather == "per_step"),
        "schedule": float(SCHEDULES.index(plan.schedule if plan.schedule in SCHEDULES else plain)),
        "stages_per_rank": float(stages_per_rank(plan)),
        "weighed": float(plan.layers is not None and plan.layers != even_layers(layers, len(placement_of(plan)))),
        "microbatch": float(cut.microbatch),
        "microbatches": float(cut.microbatches),
        "sequence_parallel": float(plan.sequence_parallel),
        "replicate_kv": float(plan.replicate_kv),
        "recompute": float(RECOMPUTE.index(plan.recompute)),
        "overlap": float(sum(2 ** OVERLAPS.index(policy) for policy in plan.overlap)),
        "chunk": float(plan.loss_chunk or 0),
    }


def strides(p: Layouts) -> dict[str, Array]:
    """Ranks between neighbours of each axis, by the plan's order."""
    sizes = np.stack([getattr(p, axis) for axis in ORDER_AXES])
    rank = _PLACES[:, p.order.astype(int)]
    found = {}
    for i, axis in enumerate(ORDER_AXES):
        inner = np.ones(len(p))
        for j in range(len(ORDER_AXES)):
            if j != i:
                inner = np.where(rank[j] < rank[i], inner * sizes[j], inner)
        found[f"{axis}_stride"] = inner
    return found


_PLACES = np.array([[order.split("-").index(axis) for order in ORDERS] for axis in ORDER_AXES])
"""Place of each axis (rows as ORDER_AXES) in each order, 0 innermost."""


def batch_of(s: Subject, p: Layouts, kinds: Precision) -> Batch:
    """The cost model's Batch of plans `p` of one subject, states kept in the dtypes `kinds`."""
    t, columns, split = s.target, dict(s.columns), s.split.table(p)
    copies = np.where((p.replicate_kv > 0) & (p.tensor > s.model.kv_heads), p.tensor / s.model.kv_heads, 1.0)
    sharded = p.zero > 0
    reduce, param = float(DTYPE_BYTES[kinds.reduce]), float(DTYPE_BYTES[kinds.param])
    again = p.recompute
    operators = t.selective == "operators"
    return Batch(
        **columns | {"kv_heads": s.model.kv_heads * copies},
        microbatch=p.microbatch,
        microbatches=p.microbatches,
        halves=np.where(_uses(p, "half_microbatches"), 2.0, 1.0),
        tensor=p.tensor,
        context=p.context,
        ulysses=p.ulysses,
        pipeline=p.pipeline,
        stages_per_rank=p.stages_per_rank,
        schedule=p.schedule,
        fullest=split["fullest"],
        last=split["beside_head"],
        data=p.data,
        shard=p.shards,
        expert=p.expert,
        expert_tensor=p.expert_tensor,
        sequence_parallel=p.sequence_parallel,
        zero=p.zero,
        per_step=p.per_step,
        **strides(p),
        recompute_layer=(again == 2.0) * 1.0,
        recompute_gemm=(again == 1.0) * 0.5 * operators,
        recompute_attention=(again == 1.0) * (1.0 - operators),
        # An all-reduce moves every byte twice; a reduce-scatter once, and the gather then moves the weights.
        reduce_bytes=np.where(sharded, reduce, 2.0 * reduce),
        gather_bytes=np.where(sharded, param, 0.0),
        overlap_tensor=hidden_share(s, p),
        imbalance=received_share(s, p),
        overlap_expert=np.where(p.schedule == DUALPIPE_V, max(t.overlap_expert, PAIRED), t.overlap_expert),
    )


def received_share(s: Subject, p: Layouts) -> Array:
    """Rows of the fullest expert rank over the mean: as stated, but no more than all rows, or each row once."""
    return np.minimum(np.minimum(s.imbalance, most_uneven(s.model.experts, np.inf)), p.expert)


def _uses(p: Layouts, policy: str) -> NDArray[np.bool_]:
    return np.mod(np.floor_divide(p.overlap, 2.0 ** OVERLAPS.index(policy)), 2.0) > 0


def hidden_share(s: Subject, p: Layouts) -> Array:
    """Share of a layer's tensor communication that leaves the critical path, contention taken off.

    Chunks need the gathers and scatters of sequence parallelism; a target that declares what it hides by them is
    taken at its word, since its kernels were measured with it.
    """
    hidden = np.zeros(len(p))
    for policy, share in HIDDEN_BY.items():
        here = _uses(p, policy)
        if policy == "chunks":
            here &= p.sequence_parallel > 0
        declared = s.target.overlap_tensor if policy == "chunks" else 0.0
        hidden = np.where(here, np.maximum(hidden, declared or share * (1.0 - CONTENTION)), hidden)
    return hidden
