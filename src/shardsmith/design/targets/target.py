"""What foreign software does, declared: bytes a parameter, recomputation, overlap, buffers, kernels. Nothing fitted.

A target is one TOML file of this package; every figure counts something that can be read in the software's
source (kernels a layer, bytes an element, what is kept for backward), and none is a factor on the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from shardsmith.errors import Code
from shardsmith.plan.plan import Overlap
from shardsmith.specs.parse import did_you_mean, parse_table, read_toml

Attention = Literal["unfused", "flash1", "flash2", "cudnn"]

UNKNOWN_TARGET = Code(
    code="X351",
    title="unknown target",
    because="a target says how a framework behaves; without one nothing can be said about its kernels or overlap",
)


@dataclass(frozen=True, kw_only=True)
class Elementwise:
    """Bytes read and written an element of a layer by memory-bound kernels, in forward and in backward.

    `hidden`: a [tokens, hidden] tensor (norms, residuals, dropout); `ffn`: one [tokens, ffn] tensor
    (activation, of both halves where gated); `qkv`: a [tokens, q + k + v] tensor (rotary, transposes).
    """

    hidden_forward: float
    hidden_backward: float
    ffn_forward: float
    ffn_backward: float
    qkv_forward: float
    qkv_backward: float


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes held on a device, a parameter of the rank or a logit, and whole layers gathered at once at level 3.

    `states_sharded` bytes are divided by the shard group, `weights` and `gradients` are not (below level 3). `fixed`
    bytes stand on every device whatever is trained, where the software's figure counts more than tensors. `gathered`
    bytes a gathered parameter are kept by streams of their own (0: as many as `weights`). `update` bytes, sharded as
    states are, stand only while the optimiser steps, in the place of what backward needed. `spare` bytes a parameter
    of one layer stay for weight gradients that products sum themselves.
    """

    weights: float
    gradients: float
    states_sharded: float
    logits: float
    gathered_layers: float
    gathered: float = 0.0
    update: float = 0.0
    spare: float = 0.0
    fixed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """One framework in one mode of use, with where its figures come from; `overlaps` are policies that it offers,
    `schedules` the orders of a pipeline that it can run (none: it has no pipeline; `file`: any order).

    `float8` says that the matrix products of layers run in float8, from 16-bit tensors that are cast for them.
    """

    name: str
    origin: str
    schedules: tuple[str, ...]
    attention: Attention
    elementwise_gpt: Elementwise
    elementwise_llama: Elementwise
    loss_bytes: float
    launches: float
    accumulate_bytes: float
    accumulate_in_product_bytes: float
    reduce_bytes: float
    gather_bytes: float
    optimizer_bytes: float
    overlap_tensor: float
    overlap_weight_gradient: float = 0.0
    overlap_data: float
    overlap_shard: float
    overlap_pipeline: float
    scatter_gather: bool
    padded_stages: bool
    tied: bool
    selective: Literal["attention", "operators"]
    early_stop: bool = False
    regather: bool = False
    overlap_regather: float = 0.0
    recompute_unstated: float = 0.0
    expert_launches: float = 120.0
    expert_each: float = 0.0
    expert_fused: bool = False
    overlap_expert: float = 0.0
    recompute_gemm_unstated: float = 0.0
    overlaps: tuple[Overlap, ...] = ()
    float8: bool = False
    memory: Memory


FLOAT8 = ":float8"
"""What is put behind a target's name for matrix products in float8."""


def target_names() -> tuple[str, ...]:
    """Names of all targets, sorted."""
    return tuple(sorted(f.name.removesuffix(".toml") for f in _folder().iterdir() if f.name.endswith(".toml")))


@cache
def target_named(name: str) -> Target:
    """The target `name`, or with `:float8` behind it the same with products of layers in float8.

    Raises `Refused` (X351) for a name that no file has.
    """
    base = name.removesuffix(FLOAT8)
    if base not in target_names():
        raise UNKNOWN_TARGET.refuse(f"there is no target {name!r}", hint=did_you_mean(base, target_names()))
    data = {"name": name, "float8": name.endswith(FLOAT8)} | read_toml(_folder() / f"{base}.toml")
    return parse_table(Target, data, source=f"target {name}", section="")


def _folder() -> Path:
    return Path(str(files("shardsmith.design.targets")))
