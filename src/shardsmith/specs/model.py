"""ModelSpec: what a model is, and `weights()`, the one list of all its tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["swiglu", "gelu", "gelu_tanh"]
Positions = Literal["rope", "learned"]
Role = Literal["embedding", "position", "head", "norm", "head_norm", "q", "k", "v", "o", "gate", "up", "down"]
Init = Literal["normal", "ones", "zeros"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3 frequency scaling (Llama 3 report, Dubey et al. 2024): low frequencies are divided by `factor`."""

    kind: Literal["llama3"] = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): channels that turn fewer than `beta_slow` times over `original_context` positions are
    slowed by `factor`, those that turn more than `beta_fast` times kept, those between blended; `truncate` widens
    that band to whole channels.

    Queries and keys are each multiplied by `attention_factor`, which is 0.1 ln(factor) + 1 unless stated.
    """

    kind: Literal["yarn"]
    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """What queries and keys are multiplied by."""
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer, described without saying how it is split.

    `ffn` is the width of one MLP projection (gate and up each, where gated). `context` is the longest
    sequence that positions are defined for. `vocab` is the logical vocabulary, never padded. A query sees the
    last `window` keys, its own included (None: all before it). `qk_norm` normalises every head of queries and
    keys before they are rotated, all heads with the same gain. `attention_bias` is that of q, k and v,
    `output_bias` that of o.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    activation: Activation = "swiglu"
    positions: Positions = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | YarnScaling | None = None
    window: int | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    init_std: float = 0.02

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside the up projection (SwiGLU)."""
        return self.activation == "swiglu"

    def with_(self, **changes: object) -> ModelSpec:
        """A copy with `changes` applied."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One full (unsharded) tensor of a model.

    `role` says what it does and thereby how an axis may split it; `layer` is None outside the blocks.
    `decay` says whether weight decay touches it: matrices yes, norms and biases no (GPT-2 practice).
    `init_std` is the standard deviation of its normal initialisation, from the FULL shape.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    bias: bool = False
    layer: int | None = None
    decay: bool = True
    init: Init = "normal"
    init_std: float = 0.0

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count


def weights(spec: ModelSpec) -> tuple[Weight, ...]:
    """All tensors of `spec` in the order of the forward pass; a tied head is not listed a second time."""
    out = [_matrix("embedding", "embedding", (spec.vocab, spec.hidden), spec)]
    if spec.positions == "learned":
        out.append(_matrix("position", "position", (spec.context, spec.hidden), spec))
    for layer in range(spec.layers):
        out.extend(layer_weights(spec, layer))
    out.extend(_norm("final_norm", spec))
    if not spec.tied:
        out.append(_matrix("head", "head", (spec.vocab, spec.hidden), spec))
    return tuple(out)


def layer_weights(spec: ModelSpec, layer: int) -> tuple[Weight, ...]:
    """Tensors of one transformer block, named by the block's global index."""
    at = f"layers.{layer}."
    q_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    out = list(_norm(at + "norm1", spec, layer))
    for role, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
        out.extend(_linear(at + f"attention.{role}", role, width, spec.hidden, spec.attention_bias, spec, layer))
    if spec.qk_norm:
        out.extend(_head_norm(at + f"attention.{role}_norm", spec, layer) for role in ("q", "k"))
    out.extend(_linear(at + "attention.o", "o", spec.hidden, q_width, spec.output_bias, spec, layer))
    out.extend(_norm(at + "norm2", spec, layer))
    for role in ("gate", "up") if spec.gated else ("up",):
        out.extend(_linear(at + f"mlp.{role}", role, spec.ffn, spec.hidden, spec.mlp_bias, spec, layer))
    out.extend(_linear(at + "mlp.down", "down", spec.hidden, spec.ffn, spec.mlp_bias, spec, layer))
    return tuple(out)


def parameter_count(spec: ModelSpec) -> int:
    """Number of parameters, a tied head counted once."""
    return sum(w.numel for w in weights(spec))


def _matrix(name: str, role: Role, shape: tuple[int, ...], spec: ModelSpec) -> Weight:
    return Weight(name=name + ".weight", shape=shape, role=role, init_std=spec.init_std)


def _norm(name: str, spec: ModelSpec, layer: int | None = None) -> tuple[Weight, ...]:
    shape = (spec.hidden,)
    gain = Weight(name=name + ".weight", shape=shape, role="norm", layer=layer, decay=False, init="ones")
    if spec.norm == "rmsnorm":
        return (gain,)
    shift = Weight(name=name + ".bias", shape=shape, role="norm", bias=True, layer=layer, decay=False, init="zeros")
    return gain, shift


def _head_norm(name: str, spec: ModelSpec, layer: int) -> Weight:
    shape = (spec.head_dim,)
    return Weight(name=name + ".weight", shape=shape, role="head_norm", layer=layer, decay=False, init="ones")


def _linear(
    name: str, role: str, rows: int, columns: int, bias: bool, spec: ModelSpec, layer: int
) -> tuple[Weight, ...]:
    # The projections that write to the residual stream start smaller by sqrt(2 x layers) (GPT-2, Radford et al. 2019).
    std = spec.init_std / (2 * spec.layers) ** 0.5 if role in ("o", "down") else spec.init_std
    matrix = Weight(name=name + ".weight", shape=(rows, columns), role=role, layer=layer, init_std=std)  # type: ignore[arg-type]
    if not bias:
        return (matrix,)
    vector = Weight(name=name + ".bias", shape=(rows,), role=role, bias=True, layer=layer, decay=False, init="zeros")  # type: ignore[arg-type]
    return matrix, vector
