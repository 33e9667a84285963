"""Layouts: the plans to be priced, as a struct of arrays, and the Batch that they make of a subject."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import permutations

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

    def select(self, which: NDArray[np.bool_] | NDArray[np.intp]) -> Layouts:
        """The plans that `which` (a mask or indices) names, in its order."""
        rows = np.flatnonzero(which) if which.dtype == np.bool_ else np.asarray(which, dtype=np.intp)
        return View.of(self, rows, {})

    def with_(self, **columns: Array) -> Layouts:
        """The same plans with other `columns`."""
        return View.of(self, None, columns)

    @property
    def shards(self) -> Array:
        """Ranks over which ZeRO spreads states; 1 at level 0."""
        return np.where(self.zero > 0, self.data / self.replicate * self.context, 1.0)

    @property
    def world(self) -> Array:
        """Ranks of each plan."""
        return self.data * self.tensor * self.pipeline * self.context


COLUMNS = tuple(f.name for f in fields(Layouts))


class View(Layouts):
    """Rows of other layouts. A column is gathered when it is first read: most searches read few of them."""

    @classmethod
    def of(cls, base: Layouts, which: NDArray[np.intp] | None, changed: Mapping[str, Array]) -> View:
        """Rows `which` of `base` (None: all), with `changed` columns as given."""
        found = object.__new__(cls)
        vars(found).update(_base=base, _which=which, **changed)
        return found

    def __getattr__(self, name: str) -> Array:
        if name not in _NAMES:
            raise AttributeError(name)
        base, which = vars(self)["_base"], vars(self)["_which"]
        column: Array = getattr(base, name) if which is None else getattr(base, name)[which]
        vars(self)[name] = column
        return column

    def __len__(self) -> int:
        own = vars(self)
        return len(own["data"]) if "data" in own else len(own["_base"] if own["_which"] is None else own["_which"])


_NAMES = frozenset(COLUMNS)


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


class PlanBatch(Batch):
    """The Batch of plans of one subject. A column is computed when it is first read: a bound needs few of them."""

    @classmethod
    def of(cls, s: Subject, p: Layouts, kinds: Precision, changed: Mapping[str, Array]) -> PlanBatch:
        """The Batch of plans `p`, states in the dtypes `kinds`, with `changed` columns as given."""
        found = object.__new__(cls)
        own = vars(found)
        own.update(s.columns, _of=(s, p, kinds))
        del own["kv_heads"]  # of the model; here copies count
        own.update(changed)
        return found

    def __getattr__(self, name: str) -> Array:
        if name.startswith("_"):
            raise AttributeError(name)
        s, p, kinds = vars(self)["_of"]
        if name in _STRIDES:
            vars(self).update(strides(p))
        elif name in _FORMULAS:
            vars(self)[name] = _FORMULAS[name](s, p, kinds)
        elif name in _NAMES:
            vars(self)[name] = getattr(p, name)
        elif name in _SPLIT:
            vars(self)[name] = s.split.column(p, _SPLIT[name])
        elif name in _DEFAULTS:
            vars(self)[name] = _DEFAULTS[name]
        else:
            raise AttributeError(name)
        column: Array = vars(self)[name]
        return column

    def __len__(self) -> int:
        own = vars(self)
        return len(own["_of"][1]) if "_of" in own else len(own["microbatch"])


def batch_of(s: Subject, p: Layouts, kinds: Precision, **changed: Array) -> Batch:
    """The cost model's Batch of plans `p` of one subject, states kept in the dtypes `kinds`; `changed` columns win."""
    return PlanBatch.of(s, p, kinds, changed)


def _kv_heads(s: Subject, p: Layouts, kinds: Precision) -> Array:
    kv = float(s.model.kv_heads)
    return kv * np.where((p.replicate_kv > 0) & (p.tensor > kv), p.tensor / kv, 1.0)


def _operators(s: Subject) -> bool:
    """Whether selective recomputation runs every operator but the products again (else the attention core)."""
    return s.target.selective == "operators"


def _overlap_expert(s: Subject, p: Layouts, kinds: Precision) -> Array:
    return np.where(p.schedule == DUALPIPE_V, max(s.target.overlap_expert, PAIRED), s.target.overlap_expert)


_STRIDES = frozenset(f"{axis}_stride" for axis in ORDER_AXES)
_DEFAULTS: Mapping[str, Array] = {
    f.name: f.default_factory() for f in fields(Batch) if f.default_factory is not MISSING
}
_SPLIT = {"fullest": "fullest", "last": "beside_head"}
_FORMULAS: Mapping[str, Callable[[Subject, Layouts, Precision], Array]] = {
    "kv_heads": _kv_heads,
    "halves": lambda s, p, kinds: np.where(_uses(p, "half_microbatches"), 2.0, 1.0),
    "shard": lambda s, p, kinds: p.shards,
    "recompute_layer": lambda s, p, kinds: (p.recompute == 2.0) * 1.0,
    "recompute_gemm": lambda s, p, kinds: (p.recompute == 1.0) * (0.5 * _operators(s)),
    "recompute_attention": lambda s, p, kinds: (p.recompute == 1.0) * (1.0 - _operators(s)),
    # An all-reduce moves every byte twice; a reduce-scatter once, and the gather then moves the weights.
    "reduce_bytes": lambda s, p, kinds: DTYPE_BYTES[kinds.reduce] * np.where(p.zero > 0, 1.0, 2.0),
    "gather_bytes": lambda s, p, kinds: DTYPE_BYTES[kinds.param] * np.where(p.zero > 0, 1.0, 0.0),
    "overlap_tensor": lambda s, p, kinds: hidden_share(s, p),
    "overlap_expert": _overlap_expert,
    "imbalance": lambda s, p, kinds: received_share(s, p),
}


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
