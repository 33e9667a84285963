"""ModelSpec: what a model is, and `weights()`, the one list of all its tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["swiglu", "gelu", "gelu_tanh"]
Positions = Literal["rope", "learned"]
Role = Literal[
    "embedding",
    "position",
    "head",
    "norm",
    "head_norm",
    "latent_norm",
    "q",
    "k",
    "v",
    "o",
    "q_down",
    "kv_down",
    "kv_up",
    "gate",
    "up",
    "down",
    "router",
    "shared_gate",
    "expert_gate",
    "expert_up",
    "expert_down",
]
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

    Queries and keys are each multiplied by `attention_factor`, which is 0.1 ln(factor) + 1 unless stated, where they
    are rotated; scores of all channels by `score_factor` (DeepSeek's variant, together with latent attention).
    """

    kind: Literal["yarn"]
    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    score_factor: float = 1.0

    @property
    def magnitude(self) -> float:
        """What queries and keys are multiplied by."""
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in the place of the MLP, in every layer from `first_dense` on.

    Of `count` routed experts, each a gated MLP of width `ffn`, a token visits `top_k`. Its scores are a softmax
    over all experts or a sigmoid of each; the chosen ones are renormalised to sum 1 if `normalise`, and
    multiplied by `scale`. With `groups` > 1 the experts are chosen inside the best `top_groups` groups
    (DeepSeek-AI 2024). `shared_ffn` is the width of the MLP that every token visits (0: none), and
    `shared_gate` weighs its output by a sigmoid of the token (Qwen2-MoE). Loads are balanced by an auxiliary loss
    (Fedus et al. 2021), by biases on the choice (Wang et al. 2024), or not at all; `z_loss` is the coefficient
    of the router's z-loss (Zoph et al. 2022).
    """

    count: int
    top_k: int
    ffn: int
    first_dense: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    shared_ffn: int = 0
    shared_gate: bool = False
    balance: Literal["aux_loss", "bias", "none"] = "aux_loss"
    aux_loss: float = 0.01
    z_loss: float = 0.0
    bias_rate: float = 0.001

    @property
    def has_aux_loss(self) -> bool:
        """Whether an auxiliary loss is added; beside biases it is the loss of each sequence of DeepSeek-V3."""
        return self.balance != "none" and self.aux_loss > 0


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024): keys and values are made from a latent of `kv_rank` per token.

    Each head has `nope` channels without position and `rope` rotated ones, the rotated key shared by all
    heads; values have `value` channels. `q_rank` is the latent of the queries (None: projected directly).
    """

    kv_rank: int
    nope: int
    rope: int
    value: int
    q_rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer, described without saying how it is split.

    `ffn` is the width of one MLP projection (gate and up each, where gated). `context` is the longest
    sequence that positions are defined for. `vocab` is the logical vocabulary, never padded. A query sees the
    last `window` keys, its own included (None: all before it). `qk_norm` normalises every head of queries and
    keys before they are rotated, all heads with the same gain. `attention_bias` is that of q, k and v,
    `output_bias` that of o. In training `dropout` is the share of elements dropped behind the embedding and behind
    each half of a block, `attention_dropout` that of attention probabilities.
    With `latent` attention `head_dim` is that of queries and keys, nope + rope, and
    there are as many key/value heads as heads. `mtp_layers` more layers predict further tokens (DeepSeek-AI 2024).
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
    dropout: float = 0.0
    attention_dropout: float = 0.0
    experts: Experts | None = None
    latent: Latent | None = None
    mtp_layers: int = 0

    def is_sparse(self, layer: int) -> bool:
        """Whether `layer` has experts in the place of its MLP."""
        return self.experts is not None and layer >= self.experts.first_dense

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


@lru_cache(maxsize=32)
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
    out = list(_norm(at + "norm1", spec, layer))
    out += _latent_attention(at, spec, layer) if spec.latent else _attention(at, spec, layer)
    out.extend(_norm(at + "norm2", spec, layer))
    out += _experts(at, spec, layer) if spec.is_sparse(layer) else _mlp(at + "mlp.", spec.ffn, spec, layer)
    return tuple(out)


def mtp_weights(spec: ModelSpec) -> tuple[Weight, ...]:
    """Tensors of the layers that predict further tokens, which counts of a model usually leave out.

    Each has two norms and a projection [hidden, 2 hidden] ahead of a block, and a norm behind it; embedding and
    head are those of the model.
    """
    out: list[Weight] = []
    for layer in range(spec.layers, spec.layers + spec.mtp_layers):
        at = f"layers.{layer}."
        for name in ("embedding_norm", "hidden_norm"):
            out.extend(_norm(at + name, spec, layer))
        out.extend(_linear(at + "join", "up", spec.hidden, 2 * spec.hidden, False, spec, layer))
        out.extend(layer_weights(spec, layer))
        out.extend(_norm(at + "output_norm", spec, layer))
    return tuple(out)


def routing_biases(spec: ModelSpec) -> int:
    """Number of balancing biases: adjusted from loads, not trained, and so not among `weights()`."""
    if spec.experts is None or spec.experts.balance != "bias":
        return 0
    return spec.experts.count * sum(spec.is_sparse(layer) for layer in range(spec.layers))


def routing_bias_weights(spec: ModelSpec) -> tuple[Weight, ...]:
    """The balancing biases of every layer as tensors: adjusted from loads, kept by checkpoints, never trained."""
    if spec.experts is None or spec.experts.balance != "bias":
        return ()
    return tuple(
        Weight(
            name=f"layers.{layer}.mlp.router.balance",
            shape=(spec.experts.count,),
            role="router",
            bias=True,
            layer=layer,
            decay=False,
            init="zeros",
        )
        for layer in range(spec.layers)
        if spec.is_sparse(layer)
    )


def stored_weights(spec: ModelSpec) -> tuple[Weight, ...]:
    """Everything that a checkpoint of `spec` holds: its weights, and its balancing biases behind them."""
    return weights(spec) + routing_bias_weights(spec)


def active_parameters(spec: ModelSpec) -> int:
    """Parameters that one token meets: of the routed experts only the chosen ones."""
    share = 1.0 if spec.experts is None else spec.experts.top_k / spec.experts.count
    return round(sum(w.numel * (share if w.role.startswith("expert_") else 1.0) for w in weights(spec)))


def _attention(at: str, spec: ModelSpec, layer: int) -> list[Weight]:
    q_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    out: list[Weight] = []
    for role, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
        out.extend(_linear(at + f"attention.{role}", role, width, spec.hidden, spec.attention_bias, spec, layer))
    if spec.qk_norm:
        out.extend(_gain(at + f"attention.{role}_norm", spec.head_dim, "head_norm", layer) for role in ("q", "k"))
    out.extend(_linear(at + "attention.o", "o", spec.hidden, q_width, spec.output_bias, spec, layer))
    return out


def _latent_attention(at: str, spec: ModelSpec, layer: int) -> list[Weight]:
    latent = spec.latent
    assert latent is not None, "only for latent attention"
    at += "attention."
    q_width = spec.heads * (latent.nope + latent.rope)
    out: list[Weight] = []
    if latent.q_rank is None:
        out += _linear(at + "q", "q", q_width, spec.hidden, False, spec, layer)
    else:
        out += _linear(at + "q_down", "q_down", latent.q_rank, spec.hidden, False, spec, layer)
        out.append(_gain(at + "q_norm", latent.q_rank, "latent_norm", layer))
        out += _linear(at + "q", "q", q_width, latent.q_rank, False, spec, layer)
    out += _linear(at + "kv_down", "kv_down", latent.kv_rank + latent.rope, spec.hidden, False, spec, layer)
    out.append(_gain(at + "kv_norm", latent.kv_rank, "latent_norm", layer))
    width = spec.heads * (latent.nope + latent.value)
    out += _linear(at + "kv_up", "kv_up", width, latent.kv_rank, False, spec, layer)
    out += _linear(at + "o", "o", spec.hidden, spec.heads * latent.value, False, spec, layer)
    return out


def _mlp(at: str, width: int, spec: ModelSpec, layer: int) -> list[Weight]:
    out: list[Weight] = []
    for role in ("gate", "up") if spec.gated else ("up",):
        out.extend(_linear(at + role, role, width, spec.hidden, spec.mlp_bias, spec, layer))
    out.extend(_linear(at + "down", "down", spec.hidden, width, spec.mlp_bias, spec, layer))
    return out


def _experts(at: str, spec: ModelSpec, layer: int) -> list[Weight]:
    """Router, routed experts stacked as [E, rows, columns], and the MLP that every token visits."""
    experts = spec.experts
    assert experts is not None, "only for layers with experts"
    at += "mlp."
    out = list(_linear(at + "router", "router", experts.count, spec.hidden, False, spec, layer))
    for role, rows, columns in (
        ("expert_gate", experts.ffn, spec.hidden),
        ("expert_up", experts.ffn, spec.hidden),
        ("expert_down", spec.hidden, experts.ffn),
    ):
        (matrix,) = _linear(at + "experts." + role.removeprefix("expert_"), role, rows, columns, False, spec, layer)
        out.append(replace(matrix, shape=(experts.count, rows, columns)))
    if experts.shared_ffn:
        out += _mlp(at + "shared.", experts.shared_ffn, spec, layer)
    if experts.shared_gate:
        out += _linear(at + "shared_gate", "shared_gate", 1, spec.hidden, False, spec, layer)
    return out


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


def _gain(name: str, width: int, role: Role, layer: int) -> Weight:
    return Weight(name=name + ".weight", shape=(width,), role=role, layer=layer, decay=False, init="ones")


def _linear(
    name: str, role: str, rows: int, columns: int, bias: bool, spec: ModelSpec, layer: int
) -> tuple[Weight, ...]:
    # The projections that write to the residual stream start smaller by sqrt(2 x layers) (GPT-2, Radford et al. 2019).
    std = spec.init_std / (2 * spec.layers) ** 0.5 if role in ("o", "down", "expert_down") else spec.init_std
    matrix = Weight(name=name + ".weight", shape=(rows, columns), role=role, layer=layer, init_std=std)  # type: ignore[arg-type]
    if not bias:
        return (matrix,)
    vector = Weight(name=name + ".bias", shape=(rows,), role=role, bias=True, layer=layer, decay=False, init="zeros")  # type: ignore[arg-type]
    return matrix, vector
