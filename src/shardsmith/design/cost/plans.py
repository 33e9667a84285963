"""A plan as a case of the cost model: what a Batch wants to know, read off a setup and a target."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from shardsmith.design.cost.batch import Batch
from shardsmith.design.cost.devices import DeviceFacts, attention_share, device_facts
from shardsmith.design.cost.kernels import GENERATIONS
from shardsmith.design.targets import Elementwise, Target, target_named
from shardsmith.errors import Code
from shardsmith.plan.batch import batching
from shardsmith.plan.mesh import mesh_of
from shardsmith.plan.plan import Plan
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import stages_per_rank
from shardsmith.specs.cluster import ClusterSpec
from shardsmith.specs.model import ModelSpec
from shardsmith.units import DTYPE_BYTES

DEFAULT_TARGET = "megatron-core"
"""The software whose declared behaviour a plan is priced with where nothing else is asked for."""

HALF = ("bfloat16", "float16")

NOT_PRICED = Code(
    code="H502",
    title="a computation that the cost model has no figures for",
    because="kernels were measured in 16 bits (and 8 where a device has them); other widths would be guesses",
)


def batch_of(setup: Setup, target: Target | None = None) -> Batch:
    """The one case that a legal `setup` is, run by `target` (DEFAULT_TARGET unless given).

    Raises `Refused`: H501 for a device without figures, H502 for a computation in more than 16 bits.
    """
    target = target or target_named(DEFAULT_TARGET)
    facts, dtype = device_facts(setup.cluster.device.name), setup.workload.dtype
    if dtype not in HALF:
        raise NOT_PRICED.refuse(f"{dtype} is not priced", *setup.said("workload.dtype"), hint="dtype = bfloat16")
    values = _model(setup.model) | _workload(setup) | _device(facts, setup.cluster, dtype) | _layout(setup, target)
    values |= _software(setup, target, facts)
    columns = {key: np.array([value], dtype=np.float64) for key, value in values.items()}
    return Batch(**columns, **_links(setup.cluster))


def _model(model: ModelSpec) -> dict[str, float]:
    experts = model.experts
    return {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "ffn": model.ffn,
        "gated": model.gated,
        "vocab": model.vocab,
        "tied": model.tied,
        "experts": experts.count if experts else 0.0,
        "top_k": experts.top_k if experts else 0.0,
        "expert_ffn": experts.ffn if experts else 0.0,
        "moe_layers": sum(model.is_sparse(layer) for layer in range(model.layers)),
    }


def _workload(setup: Setup) -> dict[str, float]:
    cut = batching(setup.plan, setup.workload)
    return {
        "seq_len": setup.workload.seq_len,
        "microbatch": cut.microbatch,
        "microbatches": cut.microbatches,
        "fp8": 0.0,
    }


def _device(facts: DeviceFacts, cluster: ClusterSpec, dtype: str) -> dict[str, float]:
    bandwidth = cluster.device.memory_bandwidth_gbs or facts.memory_gbs
    return {
        "peak16": cluster.device.peak(dtype) or facts.peak_tflops * 1e12,
        "peak8": cluster.device.peak("float8") or facts.peak8_tflops * 1e12,
        "vector_peak": facts.vector_tflops * 1e12,
        "matmul16": facts.matmul_share,
        "matmul8": facts.matmul8_share or 1.0,
        "memory_bandwidth": bandwidth * 1e9,
        "processors": facts.processors,
        "generation": GENERATIONS.index(facts.generation if facts.generation in GENERATIONS else "other"),
    }


def _links(cluster: ClusterSpec) -> dict[str, np.ndarray]:
    """Link levels, innermost first, a leading dim each; the outermost spans everything."""
    sizes = [math.inf if level.size is None else float(level.size) for level in cluster.levels]
    return {
        "level_size": np.array([sizes]).T,
        "level_bandwidth": np.array([[level.bandwidth_gbs * 1e9 for level in cluster.levels]]).T,
        "level_latency": np.array([[level.latency_us * 1e-6 for level in cluster.levels]]).T,
    }


def _layout(setup: Setup, target: Target) -> dict[str, float]:
    plan, strides = setup.plan, mesh_of(setup.plan).strides
    return _recompute(plan, target) | {
        "tensor": plan.tensor,
        "context": plan.context,
        "pipeline": plan.pipeline,
        "stages_per_rank": stages_per_rank(plan),
        "data": plan.data,
        "shard": plan.shard * plan.context if plan.zero else 1.0,
        "expert": plan.expert,
        "sequence_parallel": plan.sequence_parallel,
        "zero": plan.zero,
        "tensor_stride": strides.tensor,
        "context_stride": strides.context,
        "data_stride": strides.shard,
        "pipeline_stride": strides.pipeline,
    }


def _recompute(plan: Plan, target: Target) -> dict[str, float]:
    selective = plan.recompute == "selective"
    return {
        "recompute_layer": plan.recompute == "full",
        "recompute_gemm": 0.5 if selective and target.selective == "operators" else 0.0,
        "recompute_attention": selective and target.selective == "attention",
    }


def _software(setup: Setup, target: Target, facts: DeviceFacts) -> dict[str, float]:
    """Declared behaviour; bytes sent for a parameter follow the plan's dtypes, an all-reduce sends them twice."""
    plan, kinds = setup.plan, precision(setup.plan, setup.workload)
    kernels: Elementwise = target.elementwise_llama if setup.model.gated else target.elementwise_gpt
    kernel = "flash2" if target.attention == "unfused" else target.attention
    reduced = DTYPE_BYTES[kinds.reduce]
    own: Mapping[str, float] = {name: getattr(kernels, name) for name in Elementwise.__dataclass_fields__}
    return dict(own) | {
        "flash": target.attention != "unfused",
        "attention_forward": attention_share(kernel, facts.generation),
        "attention_backward": attention_share(kernel, facts.generation),
        "loss_bytes": target.loss_bytes,
        "launches": target.launches,
        "expert_launches": target.expert_launches,
        "accumulate_bytes": target.accumulate_bytes,
        "accumulate_in_product_bytes": target.accumulate_in_product_bytes,
        "reduce_bytes": reduced if plan.zero else 2.0 * reduced,
        "gather_bytes": DTYPE_BYTES[kinds.param] if plan.zero else 0.0,
        "optimizer_bytes": target.optimizer_bytes,
        "overlap_tensor": target.overlap_tensor if plan.overlap and plan.sequence_parallel else 0.0,
        "overlap_data": target.overlap_data,
        "overlap_shard": target.overlap_shard,
        "overlap_pipeline": target.overlap_pipeline,
        "overlap_expert": target.overlap_expert,
        "scatter_gather": target.scatter_gather,
        "padded_stages": 0.0,
    }
