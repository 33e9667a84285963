"""Subject: what is priced beside the plan, and its figures as one-entry columns that broadcast over any plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardsmith.design.cost.batch import Array
from shardsmith.design.cost.constants import values
from shardsmith.design.cost.devices import DeviceFacts, attention_share, device_facts
from shardsmith.design.cost.kernels import GENERATIONS
from shardsmith.design.cost.split import Split
from shardsmith.design.targets import Target, target_named
from shardsmith.errors import Code, Fault, Refused, raise_errors
from shardsmith.layout.routing import imbalance_faults, uneven_faults
from shardsmith.specs.cluster import ClusterSpec
from shardsmith.specs.job import Workload
from shardsmith.specs.model import ModelSpec, weights

if TYPE_CHECKING:
    from shardsmith.plan.setup import Setup

DEFAULT_TARGET = "megatron-core"
"""The software whose kernels and overlap a plan is priced with, unless another is named."""

UNMEASURED = Code(
    code="H502",
    title="the cluster says too little to price a plan",
    because="step time comes from the peak of the devices, the bandwidth of their memory and the links between them",
)
DTYPE = Code(
    code="H503",
    title="no peak for this dtype",
    because="the rate of matrix products depends on the dtype, and no other dtype's peak stands in for it",
)

PREFETCHED = 0.6
"""Share of the gathers and reductions of sharded weights that prefetching hides, where a target declares none: what
FSDP2 is declared to hide in torchtitan."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model, workload and cluster, and the `target` software that would run the plans.

    `imbalance` is how many times the mean of rows the fullest expert rank receives.
    """

    model: ModelSpec
    workload: Workload
    cluster: ClusterSpec
    target: Target
    constants: Mapping[str, float]
    imbalance: float = 1.0

    @cached_property
    def columns(self) -> dict[str, Array]:
        """Fields of a Batch that are the same for every plan, one entry each (levels: one a level)."""
        found = {**model_columns(self.model, self.workload), **_device(self), **_software(self)}
        columns = {name: np.array([value]) for name, value in found.items()}
        levels = self.cluster.levels
        columns["level_size"] = np.array([[float(link.size or np.inf)] for link in levels])
        columns["level_bandwidth"] = np.array([[link.bandwidth_gbs * 1e9] for link in levels])
        columns["level_latency"] = np.array([[link.latency_us * 1e-6] for link in levels])
        return columns

    @property
    def peak(self) -> float:
        """FLOP/s of the device in the dtype of a layer's products."""
        found = self.cluster.device.peak("float8" if self.target.float8 else self.workload.dtype)
        assert found is not None, "a dtype without a peak has been refused"
        return found

    @cached_property
    def split(self) -> Split:
        """Layers by pipeline rank."""
        return Split(model=self.model, seq_len=self.workload.seq_len)

    @cached_property
    def counts(self) -> Counts:
        """Elements of the model's tensors by how a plan splits them."""
        return count_weights(self.model)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Elements of tensors by how a plan splits them, for one dense and one sparse layer and for both ends.

    `cut` is divided over tensor ranks, `key_value` over those with heads of their own, `whole` stands on every
    rank, `routed` is divided over expert x expert_tensor ranks; `vocabulary` is one embedding or head matrix.
    """

    dense_cut: float
    dense_whole: float
    sparse_cut: float
    sparse_whole: float
    key_value: float
    routed: float
    vocabulary: float
    position: float
    final: float


def subject_of(
    setup: Setup,
    target: str = DEFAULT_TARGET,
    constants: Mapping[str, float] | None = None,
    imbalance: float = 1.0,
) -> Subject:
    """The subject of a setup. Raises `Refused` (E107, H501 to H503, X351) where its figures do not suffice."""
    raise_errors(imbalance_faults(setup, imbalance))
    return make_subject(setup.model, setup.workload, setup.cluster, target, constants, imbalance)


def make_subject(
    model: ModelSpec,
    workload: Workload,
    cluster: ClusterSpec,
    target: str = DEFAULT_TARGET,
    constants: Mapping[str, float] | None = None,
    imbalance: float = 1.0,
) -> Subject:
    """A subject with `constants`, or else the shipped ones.

    Raises `Refused` (H501 to H503, X351) where figures are missing, and for an `imbalance` that none can have (E107).
    """
    chosen = target_named(target)
    float8 = float8_faults(cluster) if chosen.float8 else []
    raise_errors([*unpriceable(cluster, workload), *float8, *uneven_faults(model, imbalance)])
    return Subject(
        model=model,
        workload=workload,
        cluster=cluster,
        target=chosen,
        constants=constants or values(),
        imbalance=imbalance,
    )


def unpriceable(cluster: ClusterSpec, workload: Workload) -> list[Fault]:
    """What is missing in `cluster` to price anything computed in the workload's dtype."""
    device, said = cluster.device, (cluster.name, f"device = {cluster.device.name}")
    missing = [
        name
        for name, there in (
            ("device.memory_bandwidth_gbs", device.memory_bandwidth_gbs),
            ("device.memory_gib", device.memory_gib),
            ("levels", cluster.levels),
            ("devices_per_node", cluster.devices_per_node),
        )
        if not there
    ]
    faults = []
    if missing:
        message = f"cluster {cluster.name} does not say {', '.join(missing)}"
        faults.append(
            UNMEASURED.fault(message, said, hint="a preset such as --cluster h100, or a cluster file that says it")
        )
    if device.peak(workload.dtype) is None:
        known = [dtype for dtype in ("bfloat16", "float16", "float32", "float64") if device.peak(dtype)]
        message = f"{device.name} has no known peak in {workload.dtype}"
        hint = f"dtype = {known[0]} (known: {', '.join(sorted(device.peak_tflops))})" if known else ""
        hint = hint or "state device.peak_tflops in a cluster file"
        faults.append(DTYPE.fault(message, said, hint=hint))
    return faults


def float8_faults(cluster: ClusterSpec) -> list[Fault]:
    """A device on which nobody has measured products in float8, or that has none."""
    device, share = cluster.device, facts_of(cluster).matmul8_share
    if device.peak("float8") and share:
        return []
    what = "no products in float8" if not device.peak("float8") else "a peak in float8, but no measured share of it"
    message, hint = f"{device.name} has {what}", "dtype = bfloat16, or a cluster of H100 or later"
    return [DTYPE.fault(message, (cluster.name, f"device = {device.name}"), hint=hint)]


def count_weights(model: ModelSpec) -> Counts:
    """`Counts` of `model`, from its one list of tensors."""
    sums: dict[tuple[str, str], float] = {}
    first_sparse = model.experts.first_dense if model.experts else model.layers
    for weight in weights(model):
        if weight.layer is None:
            kind = {"embedding": "vocabulary", "head": "head", "position": "position"}.get(weight.role, "final")
        elif weight.layer not in (0, first_sparse):
            continue
        elif weight.role.startswith("expert_"):
            kind = "routed"
        elif weight.role in ("k", "v"):
            kind = "key_value"
        else:
            kind = "cut" if _is_cut(weight.role, weight.bias) else "whole"
        place = "ends" if weight.layer is None else "sparse" if model.is_sparse(weight.layer) else "dense"
        sums[place, kind] = sums.get((place, kind), 0.0) + weight.numel
    return Counts(
        dense_cut=sums.get(("dense", "cut"), 0.0),
        dense_whole=sums.get(("dense", "whole"), 0.0),
        sparse_cut=sums.get(("sparse", "cut"), 0.0),
        sparse_whole=sums.get(("sparse", "whole"), 0.0),
        key_value=max(sums.get(("dense", "key_value"), 0.0), sums.get(("sparse", "key_value"), 0.0)),
        routed=sums.get(("sparse", "routed"), 0.0),
        vocabulary=sums["ends", "vocabulary"],
        position=sums.get(("ends", "position"), 0.0),
        final=sums.get(("ends", "final"), 0.0),
    )


def _is_cut(role: str, bias: bool) -> bool:
    """Whether the tensor axis cuts a tensor of a layer (heads or MLP width)."""
    return role in ("q", "kv_up", "gate", "up") or (role in ("o", "down") and not bias)


def model_columns(m: ModelSpec, work: Workload) -> dict[str, float]:
    """Fields of a Batch that the model and its sequences decide."""
    e, sparse = m.experts, sum(m.is_sparse(layer) for layer in range(m.layers))
    counts = count_weights(m)
    # With latent attention queries and keys are wider than values; the mean of both has the same FLOPs of scores.
    head_dim = m.head_dim if m.latent is None else (m.head_dim + m.latent.value) / 2.0
    plain = m.hidden * (2.0 * m.heads + 2.0 * m.kv_heads) * head_dim
    held = counts.dense_cut + counts.dense_whole or counts.sparse_cut + counts.sparse_whole
    mlp = m.ffn if counts.dense_cut else (e.shared_ffn if e else 0)
    attention = held + counts.key_value - m.hidden * mlp * (2.0 + m.gated)
    return {
        "layers": float(m.layers),
        "hidden": float(m.hidden),
        "heads": float(m.heads),
        "kv_heads": float(m.kv_heads),
        "head_dim": head_dim,
        "projection": attention / plain if m.latent else 1.0,
        "window": float(min(m.window or work.seq_len, work.seq_len)),
        "ffn": float(m.ffn),
        "gated": float(m.gated),
        "vocab": float(m.vocab),
        "tied": float(m.tied),
        "experts": float(e.count) if e else 0.0,
        "top_k": float(e.top_k) if e else 0.0,
        "expert_ffn": float(e.ffn) if e else 0.0,
        "shared_ffn": float(e.shared_ffn) if e else 0.0,
        "moe_layers": float(sparse),
        "seq_len": float(work.seq_len),
    }


def _device(s: Subject) -> dict[str, float]:
    d, facts = s.cluster.device, facts_of(s.cluster)
    peak = d.peak(s.workload.dtype)
    assert peak is not None, "a dtype without a peak has been refused"
    assert d.memory_bandwidth_gbs is not None, "a device without bandwidth has been refused"
    return {
        "fp8": float(s.target.float8),
        "peak16": peak,
        "peak8": (d.peak("float8") or 0.0),
        "vector_peak": facts.vector_tflops * 1e12,
        "matmul16": facts.matmul_share,
        "matmul8": facts.matmul8_share or 1.0,
        "memory_bandwidth": d.memory_bandwidth_gbs * 1e9,
        "processors": float(facts.processors),
        "generation": float(GENERATIONS.index(facts.generation if facts.generation in GENERATIONS else "other")),
    }


def facts_of(cluster: ClusterSpec) -> DeviceFacts:
    """Shares and widths of the cluster's device; a device that no file lists gets the declared common ones.

    Its peaks and bandwidths are its own in either case: they stand in the cluster.
    """
    try:
        return device_facts(cluster.device.name)
    except Refused:
        pass
    peak = max(cluster.device.peak_tflops.values(), default=0.0)
    return DeviceFacts(
        name=cluster.device.name,
        aliases=(),
        generation="other",
        peak_tflops=peak,
        peak8_tflops=0.0,
        vector_tflops=peak / 16.0,
        matmul_share=0.8,
        matmul8_share=0.0,
        memory_gbs=cluster.device.memory_bandwidth_gbs or 0.0,
        processors=108,
        origin="declared: shares and widths of a common accelerator, for a device that no file lists",
    )


def _software(s: Subject) -> dict[str, float]:
    t, facts = s.target, facts_of(s.cluster)
    kernels = t.elementwise_llama if s.model.gated else t.elementwise_gpt
    kernel = "flash2" if t.attention == "unfused" else t.attention
    generation = facts.generation if facts.generation != "other" else "ampere"
    share = attention_share(kernel, generation)
    return {
        # The engine's own attention drops probabilities by masks with names, which no fused kernel takes.
        "flash": float(t.attention != "unfused" and not (t.name == "shardsmith" and s.model.attention_dropout)),
        "dropout": float(s.model.dropout > 0),
        "attention_forward": share,
        "attention_backward": share,
        "loss_bytes": t.loss_bytes,
        "launches": t.launches,
        "expert_launches": t.expert_launches,
        "expert_each": t.expert_each,
        "expert_fused": float(t.expert_fused),
        "accumulate_bytes": t.accumulate_bytes,
        "accumulate_in_product_bytes": t.accumulate_in_product_bytes,
        "optimizer_bytes": t.optimizer_bytes,
        "overlap_data": t.overlap_data,
        "overlap_shard": t.overlap_shard or PREFETCHED,
        "overlap_pipeline": t.overlap_pipeline,
        "overlap_weight_gradient": t.overlap_weight_gradient,
        "early_stop": float(t.early_stop),
        "regather": float(t.regather),
        "overlap_regather": t.overlap_regather,
        "scatter_gather": float(t.scatter_gather),
    } | {name: getattr(kernels, name) for name in type(kernels).__dataclass_fields__}
