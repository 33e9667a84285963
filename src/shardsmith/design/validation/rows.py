"""Rows of a CSV of measured runs, turned into a Batch; what cannot be scored is skipped with its reason."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.devices import DeviceFacts, attention_share, device_facts
from shardsmith.design.cost.kernels import GENERATIONS
from shardsmith.design.cost.pipeline import stage_layers
from shardsmith.design.cost.schedules import SCHEDULES
from shardsmith.design.cost.subject import model_columns
from shardsmith.design.targets import Elementwise, Target, target_named
from shardsmith.design.validation.architectures import architecture_of, mean_window
from shardsmith.design.validation.machines import machine_of
from shardsmith.errors import Refused
from shardsmith.specs.job import Workload
from shardsmith.specs.library import model_named

Row = Mapping[str, str]

LINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 9.6e-6
"""Seconds a hop inside the fast domain and between nodes, as in the cluster presets."""
SECONDS, GIGABYTES = (1e-6, 1e7), (1e-6, 1e6)
"""What a measured step can take, and a device hold; beyond, a row says something else."""
LARGEST = 1e15
"""No size, degree or rate of a row is larger; what is cannot be multiplied with others."""
AT_LEAST_ONE = (
    *("tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch", "global_batch"),
    *("kv_heads", "head_dim", "ffn_hidden", "vocab", "gpu_peak_tflops_bf16"),
    *("intra_bw_GBs", "inter_bw_Gbps_per_gpu", "gpus_per_node", "nvlink_domain"),
)
"""Columns that may be empty, but not below 1."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A row that is not scored, and why."""

    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Scorable rows: the batch to cost and, in the same order, what was measured (NaN where it was not)."""

    batch: Batch
    rows: tuple[Row, ...]
    seconds: Array
    memory_gb: Array
    skipped: tuple[Skipped, ...]

    @property
    def groups(self) -> list[str]:
        """The correlated block that each row belongs to."""
        return [r.get("group") or source_of(r) for r in self.rows]

    @property
    def sources(self) -> list[str]:
        """The publication that each row comes from."""
        return [source_of(r) for r in self.rows]

    def select(self, which: np.ndarray) -> Runs:
        """The rows that the mask `which` names."""
        keep = np.flatnonzero(which)
        return Runs(
            batch=self.batch.select(keep),
            rows=tuple(self.rows[i] for i in keep),
            seconds=self.seconds[keep],
            memory_gb=self.memory_gb[keep],
            skipped=self.skipped,
        )


def source_of(row: Row) -> str:
    """Prefix of a row's id: the publication."""
    return row["id"].split("-")[0]


def read_runs(path: str | Path, *, moe: bool = False, memory: bool = False) -> Runs:
    """Rows of `path` with a measured time (or, with `memory`, a measured peak), dense or MoE.

    A row that lacks something or contradicts itself is skipped and named; the rest is done.
    """
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    kept: list[dict[str, float]] = []
    measured: list[list[float]] = []
    sound: list[Row] = []
    skipped: list[Skipped] = []
    for row in rows:
        try:
            reason = _unscorable(row, moe=moe, memory=memory)
            values = {} if reason else case(row)
            found = [_number(row, key) for key in ("iter_time_best_s", "peak_mem_gb")]
        except (ValueError, Refused) as error:
            reason = str(error).splitlines()[0]
        if reason:
            skipped.append(Skipped(id=row.get("id", "?"), reason=reason))
        else:
            kept.append(values)
            measured.append(found)
            sound.append(row)
    return Runs(
        batch=as_batch(kept),
        rows=tuple(sound),
        seconds=np.array([seconds for seconds, _ in measured]),
        memory_gb=np.array([held for _, held in measured]),
        skipped=tuple(skipped),
    )


def _unscorable(row: Row, *, moe: bool, memory: bool) -> str:
    if (row.get("arch") == "moe") != moe:
        return "mixture of experts: scored apart" if not moe else "dense: scored apart"
    if row.get("quality") == "C":
        return "quality C: not to be scored on"
    measured = _number(row, "peak_mem_gb" if memory else "iter_time_best_s")
    if math.isnan(measured):
        return "no measured memory" if memory else "no measured step time"
    what, least, most = ("memory", *GIGABYTES) if memory else ("step time", *SECONDS)
    return "" if least <= measured <= most else f"measured {what} = {measured:g}: not from {least:g} to {most:g}"


def _number(row: Row, key: str, default: float = math.nan) -> float:
    """What a row says in column `key`, or `default` where it says nothing. ValueError for what is no size."""
    text = (row.get(key) or "").strip()
    value = float(text) if text and text.lower() != "nan" else default
    if value < 0 or value > LARGEST:
        raise ValueError(f"{key} = {value:g} is not from 0 to {LARGEST:g}")
    return value


def _need(row: Row, key: str) -> float:
    value = _number(row, key)
    if math.isnan(value):
        raise ValueError(f"{key} is empty")
    if value < 1:
        raise ValueError(f"{key} = {value:g} is below 1")
    return value


def target_of(row: Row) -> Target:
    """The target whose declared behaviour a row's software has. ValueError for software that has no target."""
    name, notes, precision = (row.get(key, "") for key in ("framework", "notes", "precision"))
    rules: Sequence[tuple[str, Callable[[], bool]]] = (
        ("composer-fsdp-classic", lambda: "Composer" in name and "MP mode PURE" in notes),
        ("composer-fsdp", lambda: "llm-foundry" in name or "Composer" in name or "fms" in name),
        ("internevo-fsdp", lambda: "InternEvo" in name and "fsdp" in row.get("zero_stage_or_fsdp", "")),
        ("internevo", lambda: "InternEvo" in name or "InternLM" in name),
        ("torchtitan-compile", lambda: "torchtitan" in name and "compile" in notes),
        ("torchtitan", lambda: "torchtitan" in name),
        ("megatron-deepspeed", lambda: "DeepSpeed" in name and _number(row, "year", 2023.0) >= 2023),
        ("megatron-deepspeed-classic", lambda: "DeepSpeed" in name),
        ("maxtext", lambda: "MaxText" in name),
        ("paxml", lambda: "Paxml" in name or "JAX" in name),
        ("megatron-bridge-graphs", lambda: "Bridge" in name and _container(notes) >= 26.06 and "mx" in precision),
        ("megatron-bridge", lambda: "Bridge" in name),
        ("megatron-core", lambda: any(k in name for k in ("NeMo", "Bridge", "Core", "MLPerf", "AutoModel"))),
        ("megatron-lm-core", lambda: "Megatron-LM" in name and _number(row, "year", 2022.0) >= 2023),
        ("megatron-lm-3", lambda: "Megatron-LM" in name and _number(row, "year", 2020.0) >= 2022),
        ("megatron-lm-classic", lambda: "Megatron-LM" in name),
    )
    for target, matches in rules:
        if matches():
            return target_named(target)
    raise ValueError(f"framework {name!r} has no target")


def _container(notes: str) -> float:
    found = re.search(r"container (\d+\.\d+)", notes)
    return float(found.group(1)) if found else math.nan


def case(row: Row) -> dict[str, float]:
    """One row as numbers, a key for every field of Batch. ValueError or Refused says what is wrong with it."""
    target, facts = target_of(row), device_facts(row.get("gpu", ""))
    for key in AT_LEAST_ONE:
        if (value := _number(row, key, 1.0)) < 1:
            raise ValueError(f"{key} = {value:g} is below 1")
    return _model(row) | _device(row, facts) | (layout := _layout(row, target)) | _software(row, target, facts, layout)


def _model(row: Row) -> dict[str, float]:
    hidden, heads, seq_len = _need(row, "hidden"), _need(row, "heads"), _need(row, "seq_len")
    known, experts, layers = architecture_of(row), _number(row, "n_experts", 0.0), _need(row, "layers")
    stated = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _number(row, "kv_heads", heads),
        "head_dim": _number(row, "head_dim", hidden / heads),
        "projection": 1.0,
        "window": mean_window(seq_len, known.window, known.window_share),
        "ffn": _number(row, "ffn_hidden", 4.0 * hidden),
        "gated": float(row.get("arch") in ("llama", "moe")),
        "vocab": _number(row, "vocab", 51200.0),
        "seq_len": seq_len,
        "experts": experts,
        "top_k": _number(row, "topk", 0.0),
        "expert_ffn": _number(row, "expert_ffn", 0.0),
        "expert_bias": float(known.expert_bias),
        "shared_ffn": 0.0,
        "moe_layers": layers if experts else 0.0,
    }
    if known.preset:
        whole = model_named(known.preset)
        if (whole.hidden, whole.heads) == (hidden, heads):
            # A row may be of the first layers only.
            model = replace(whole, layers=int(layers))
            stated |= model_columns(model, Workload(seq_len=int(seq_len), global_batch=1))
    return stated


def _device(row: Row, d: DeviceFacts) -> dict[str, float]:
    precision = row.get("precision", "").lower()
    fp8 = "fp8" in precision or "fp4" in precision
    if fp8 and not d.peak8_tflops:
        raise ValueError(f"{d.name} has no 8-bit products, but precision = {precision}")
    node = _number(row, "nvlink_domain", _number(row, "gpus_per_node", 8.0))
    intra, inter = _number(row, "intra_bw_GBs", 300.0), _number(row, "inter_bw_Gbps_per_gpu", 200.0)
    machine = machine_of(row)
    generation = "measured" if machine.matmul_share and not fp8 else d.generation
    return {
        "fp8": float(fp8),
        "peak16": (_number(row, "gpu_peak_tflops_bf16", d.peak_tflops)) * 1e12,
        "peak8": d.peak8_tflops * 1e12,
        "vector_peak": d.vector_tflops * 1e12,
        "matmul16": machine.matmul_share or d.matmul_share,
        "matmul8": d.matmul8_share or 1.0,
        "memory_bandwidth": d.memory_gbs * 1e9,
        "processors": float(d.processors),
        "generation": float(GENERATIONS.index(generation if generation in GENERATIONS else "other")),
        "level0_size": node,
        "level0_bandwidth": intra * 1e9,
        "level0_latency": LINK_LATENCY,
        "level1_size": math.inf,
        "level1_latency": NETWORK_LATENCY,
        "level1_bandwidth": inter / 8 * 1e9 * machine.network_share,
    }


def _layout(row: Row, target: Target) -> dict[str, float]:
    gpus, batch = _need(row, "gpus"), _number(row, "global_batch", math.nan)
    tensor, context, pipeline = (_number(row, key, 1.0) for key in ("tp", "cp", "pp"))
    data = _number(row, "dp", gpus / (tensor * context * pipeline))
    if row.get("arch") == "moe":
        data = gpus / (tensor * context * pipeline)
    stated, virtual = _number(row, "micro_batch"), _number(row, "vpp")
    batch = batch if not math.isnan(batch) else stated * data
    if math.isnan(batch):
        raise ValueError("global_batch is empty")
    each = batch / data
    microbatch = stated if not math.isnan(stated) else (1.0 if pipeline > 1 else each)
    microbatch = min(microbatch, each)
    if math.isnan(virtual):
        virtual = 12.0 if pipeline > 1 and "VP=NA" in row.get("notes", "") else 1.0
    zero, shard = sharding(row.get("zero_stage_or_fsdp", ""), data * context)
    recompute = recomputation(row, target)
    sizes = np.array([[_need(row, "layers")], [pipeline], [virtual]])
    fullest, last = stage_layers(sizes[0], sizes[1], sizes[2], target.padded_stages)
    return recompute | {
        "tensor": tensor,
        "context": context,
        "ulysses": 1.0,
        "pipeline": pipeline,
        "stages_per_rank": virtual,
        "fullest": float(fullest[0]),
        "last": float(last[0]),
        "schedule": float(SCHEDULES.index("interleaved" if virtual > 1 else "one_f_one_b")),
        "data": data,
        "shard": shard,
        "zero": zero,
        "expert": _number(row, "ep", 1.0),
        "expert_tensor": tensor,
        "per_step": float(zero == 2.0),
        "halves": 1.0,
        "sequence_parallel": float(row.get("sp", "").lower() == "true"),
        "microbatch": microbatch,
        "microbatches": max(1.0, each / microbatch),
        "tensor_stride": 1.0,
        "context_stride": tensor,
        "data_stride": tensor * context,
        "pipeline_stride": tensor * context * data,
    }


def sharding(text: str, most: float) -> tuple[float, float]:
    """ZeRO level and size of the shard group, from what a row calls its sharding; `most` ranks can share."""
    level = 0.0
    if "zero1" in text or "distributed opt" in text:
        level = 1.0
    if "zero2" in text or "SHARD_GRAD" in text:
        level = 2.0
    elif "fsdp" in text or "zero3" in text:
        level = 3.0
    found = re.search(r"shard group (\d+)|fsdp (\d+)", text)
    group = min(most, float(found.group(1) or found.group(2))) if found else most
    return level, max(1.0, group) if level else 1.0


def recomputation(row: Row, target: Target) -> dict[str, float]:
    """What is computed again in backward, as shares of a layer, its products and its attention."""
    text, notes = row.get("recompute", ""), row.get("notes", "")
    whole = 1.0 if text.startswith("full") else 0.0
    unstated = text.startswith("not stated")
    if unstated:
        whole = target.recompute_unstated
    selective = text == "selective"
    if selective and ("every 2nd" in notes or "selective layer" in notes):
        whole, selective = 0.5, False
    operators = selective and target.selective == "operators"
    return {
        "recompute_layer": whole,
        "recompute_gemm": target.recompute_gemm_unstated if unstated else 0.5 * operators,
        "recompute_attention": float(selective and not operators),
    }


def _software(row: Row, t: Target, d: DeviceFacts, layout: Mapping[str, float]) -> dict[str, float]:
    gpt = row.get("arch") == "gpt"
    kernels: Elementwise = t.elementwise_gpt if gpt else t.elementwise_llama
    flash = row.get("flash_attention", "").lower() == "true"
    kernel = "flash2" if t.attention == "unfused" else t.attention
    shown = 0.0 if "overlap disabled" in row.get("notes", "") else 1.0
    split = layout["sequence_parallel"] > 0
    return {
        "flash": float(flash),
        "attention_forward": attention_share(kernel, d.generation),
        "attention_backward": attention_share(kernel, d.generation),
        "loss_bytes": t.loss_bytes,
        "launches": t.launches,
        "early_stop": float(t.early_stop),
        "regather": float(t.regather),
        "overlap_regather": t.overlap_regather * shown,
        "synchronous": float(machine_of(row).synchronous),
        "expert_launches": t.expert_launches,
        "expert_each": t.expert_each,
        "expert_fused": float(t.expert_fused),
        "overlap_expert": t.overlap_expert * shown,
        "accumulate_bytes": t.accumulate_bytes,
        "accumulate_in_product_bytes": t.accumulate_in_product_bytes,
        "reduce_bytes": t.reduce_bytes,
        "gather_bytes": t.gather_bytes if layout["zero"] else 0.0,
        "optimizer_bytes": t.optimizer_bytes,
        "overlap_tensor": t.overlap_tensor * shown * split,
        "overlap_weight_gradient": t.overlap_weight_gradient * shown,
        "overlap_data": t.overlap_data * shown,
        "overlap_shard": t.overlap_shard * shown,
        "overlap_pipeline": t.overlap_pipeline * shown,
        "scatter_gather": float(t.scatter_gather),
        "tied": float(t.tied and gpt),
    } | {name: getattr(kernels, name) for name in Elementwise.__dataclass_fields__}


_FIELDS = list(Batch.__dataclass_fields__)
_LEVELS = [f"level{i}_{what}" for i in range(2) for what in ("size", "bandwidth", "latency")]


def as_batch(cases: Sequence[Mapping[str, float]]) -> Batch:
    """Cases as one struct of arrays; `level<i>_size` and `level<i>_bandwidth` become the leading dim."""
    keys = list(cases[0]) if cases else [key for key in _FIELDS if not key.startswith("level_")] + _LEVELS
    columns = {key: np.array([case[key] for case in cases], dtype=float) for key in keys}
    levels = [int(key[5]) for key in columns if key.startswith("level") and key.endswith("_size")]
    for what in ("size", "bandwidth", "latency"):
        columns[f"level_{what}"] = np.stack([columns.pop(f"level{i}_{what}") for i in levels])
    return Batch(**columns)
