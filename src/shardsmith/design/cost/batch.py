"""Batch: many workloads on many layouts at once, as plain arrays (a struct of arrays).

One set of formulas serves measured runs and candidate plans: every field holds one number a case, so that
a million candidates are a handful of array operations. Nothing here knows names of models or frameworks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
"""Float64, one entry a case; link figures have one leading dim, the level."""


class Columns:
    """A dataclass whose fields are arrays with one entry a case."""

    def select(self, which: NDArray[np.bool_] | NDArray[np.intp]) -> Self:
        """The cases that `which` (a mask or indices) names, in its order."""
        names = [f.name for f in fields(self)]  # type: ignore[arg-type]
        return type(self)(**{name: getattr(self, name)[which] for name in names})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The cases of all `parts`, one after another."""
        if len(parts) == 1:
            return parts[0]
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True, kw_only=True)
class Batch:
    """`n` cases to be costed: model, workload, device, links, layout, and the declared behaviour of the software.

    Flags are 0 or 1 (shares in between where a layer-wise mix is meant). Degrees, sizes and byte counts are
    plain numbers; rates are FLOP/s and bytes/s, latencies seconds. `*_stride` is the distance, in global
    ranks, between neighbours along an axis: it decides which links a group crosses. `projection` is the size of
    the attention projections over those of plain heads, `window` the keys that a query sees at most, `halves` the
    parts in which a microbatch goes through a layer, `schedule` an index into `schedules.SCHEDULES`; `fullest` counts
    the layers of the fullest pipeline rank, `last` those beside the head. A field that is the same for every case may
    have one entry; those of the layout have all.
    """

    # model
    layers: Array
    hidden: Array
    heads: Array
    kv_heads: Array
    head_dim: Array
    projection: Array
    window: Array
    ffn: Array
    gated: Array
    vocab: Array
    tied: Array
    experts: Array
    top_k: Array
    expert_ffn: Array
    shared_ffn: Array
    moe_layers: Array
    # workload
    seq_len: Array
    microbatch: Array
    microbatches: Array
    halves: Array
    fp8: Array
    # device
    peak16: Array
    peak8: Array
    vector_peak: Array
    matmul16: Array
    matmul8: Array
    memory_bandwidth: Array
    processors: Array
    generation: Array
    # links: (level, n), innermost first; the last level spans everything
    level_size: Array
    level_bandwidth: Array
    level_latency: Array
    # layout
    tensor: Array
    context: Array
    ulysses: Array
    pipeline: Array
    stages_per_rank: Array
    schedule: Array
    fullest: Array
    last: Array
    data: Array
    shard: Array
    expert: Array
    expert_tensor: Array
    sequence_parallel: Array
    zero: Array
    per_step: Array
    tensor_stride: Array
    context_stride: Array
    data_stride: Array
    pipeline_stride: Array
    recompute_layer: Array
    recompute_gemm: Array
    recompute_attention: Array
    # declared behaviour of the software
    flash: Array
    attention_forward: Array
    attention_backward: Array
    hidden_forward: Array
    hidden_backward: Array
    ffn_forward: Array
    ffn_backward: Array
    qkv_forward: Array
    qkv_backward: Array
    loss_bytes: Array
    launches: Array
    expert_launches: Array
    accumulate_bytes: Array
    accumulate_in_product_bytes: Array
    reduce_bytes: Array
    gather_bytes: Array
    optimizer_bytes: Array
    overlap_tensor: Array
    overlap_data: Array
    overlap_shard: Array
    overlap_pipeline: Array
    overlap_expert: Array
    scatter_gather: Array
    overlap_weight_gradient: Array = field(default_factory=lambda: np.zeros(1))
    """Share of backward's tensor collectives that may run under the weight-gradient products."""
    regather: Array = field(default_factory=lambda: np.zeros(1))
    """1 where sequence parallelism keeps parts of a product's input, and gathers them again for its weight gradient."""
    overlap_regather: Array = field(default_factory=lambda: np.zeros(1))
    """Share of that second gather that may run under the products that make input gradients."""
    early_stop: Array = field(default_factory=lambda: np.zeros(1))
    """1 where recomputation ends with the last value that backward needs: without the layer's last product."""
    dropout: Array = field(default_factory=lambda: np.zeros(1))
    """1 where what attention and the MLP add is dropped in part: a mask of a byte an element is kept of each."""
    synchronous: Array = field(default_factory=lambda: np.zeros(1))
    """1 where every launch waits for its kernel (CUDA_LAUNCH_BLOCKING=1): host time adds up instead of hiding."""

    expert_bias: Array = field(default_factory=lambda: np.zeros(1))
    """1 where experts add a bias to their output."""
    expert_fused: Array = field(default_factory=lambda: np.zeros(1))
    """1 where permutation is part of dispatch and combine, and activation, casts and bias of the experts' products."""
    expert_each: Array = field(default_factory=lambda: np.zeros(1))
    """Launches of a layer's forward for each expert on the rank, beside `expert_launches` for all of them."""
    imbalance: Array = field(default_factory=lambda: np.ones(1))
    """Rows of the expert rank that receives most over the mean of all expert ranks; 1 where routing is balanced."""

    def __len__(self) -> int:
        return len(self.microbatch)

    def select(self, which: NDArray[np.bool_] | NDArray[np.intp]) -> Self:
        """The cases that `which` (a mask or indices) names, in its order."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        shared = {name for name, column in columns.items() if column.shape[-1] == 1 < len(self)}
        return type(self)(**{n: column if n in shared else column[..., which] for n, column in columns.items()})

    @property
    def world(self) -> Array:
        """Ranks of each case."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def tokens(self) -> Array:
        """Tokens that go through a layer at once on one rank (sequence parallelism not counted)."""
        return self.rows * self.seq_len / self.context

    @property
    def rows(self) -> Array:
        """Sequences that go through a layer at once: a microbatch, or its half."""
        return self.microbatch / self.halves
