"""ModelSpecs from the configs of Hugging Face model types with experts: Mixtral, Qwen-MoE, DeepSeek."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardsmith.specs.hf_options import OPTION
from shardsmith.specs.hf_rotary import ROTARY_OPTIONS, LlamaKeys, Qwen2Keys, no_window, qwen_window, read_rotary
from shardsmith.specs.model import Experts, Latent, ModelSpec


@dataclass(frozen=True, kw_only=True)
class _Mixtral(LlamaKeys):
    """The keys of MixtralConfig."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float | None = 1000000.0
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.001


@dataclass(frozen=True, kw_only=True)
class _QwenMoe(Qwen2Keys):
    """The keys that Qwen2MoeConfig and Qwen3MoeConfig share."""

    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_key_value_heads: int | None = 16
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.001
    mlp_only_layers: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class _Qwen2Moe(_QwenMoe):
    """The keys of Qwen2MoeConfig."""

    intermediate_size: int = 5632
    num_attention_heads: int = 16
    num_experts: int = 60
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    qkv_bias: bool = True


@dataclass(frozen=True, kw_only=True)
class _Qwen3Moe(_QwenMoe):
    """The keys of Qwen3MoeConfig."""

    intermediate_size: int = 6144
    num_key_value_heads: int | None = 4
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768


@dataclass(frozen=True, kw_only=True)
class _Deepseek(LlamaKeys):
    """The keys that DeepseekV2Config and DeepseekV3Config share; V2's defaults."""

    vocab_size: int = 102400
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int = 1407
    first_k_dense_replace: int | None = 0
    routed_scaling_factor: float = 1.0
    n_group: int | None = None
    topk_group: int | None = None
    norm_topk_prob: bool | None = False
    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int | None = 128


@dataclass(frozen=True, kw_only=True)
class _DeepseekV2(_Deepseek):
    """The keys of DeepseekV2Config, and the auxiliary loss of its authors' own files."""

    topk_method: str | None = "greedy"
    aux_loss_alpha: float = 0.001


@dataclass(frozen=True, kw_only=True)
class _DeepseekV3(_Deepseek):
    """The keys of DeepseekV3Config."""

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    num_key_value_heads: int | None = 128
    n_shared_experts: int = 1
    n_routed_experts: int = 256
    routed_scaling_factor: float = 2.5
    n_group: int | None = 8
    topk_group: int | None = 4
    num_experts_per_tok: int | None = 8
    first_k_dense_replace: int | None = 3
    norm_topk_prob: bool | None = True
    max_position_embeddings: int = 4096
    num_nextn_predict_layers: int = 1


_MIXTRAL_OPTIONS = {**ROTARY_OPTIONS, "router_jitter_noise": (0.0,)}
_QWEN_MOE_OPTIONS = {**ROTARY_OPTIONS, "decoder_sparse_step": (1,)}
_DEEPSEEK_OPTIONS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "quantization_config": (None,),
}
_V2_OPTIONS = {
    **_DEEPSEEK_OPTIONS,
    "norm_topk_prob": (False, None),  # transformers' model of this type never normalises
    "scoring_func": ("softmax",),
    "topk_method": ("greedy", "group_limited_greedy"),
}
_V3_OPTIONS = {
    **_DEEPSEEK_OPTIONS,
    "rope_interleave": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}


def read_mixtral(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """Mixtral: every layer has experts."""
    config, common = read_rotary(data, source, _Mixtral, _MIXTRAL_OPTIONS, lambda c, _: (c.sliding_window, []))
    experts = Experts(
        count=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        ffn=config.intermediate_size,
        aux_loss=config.router_aux_loss_coef,
    )
    return ModelSpec(name=name, **common, experts=experts)


def read_qwen2_moe(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """Qwen2-MoE: a shared expert with a gate of its own."""
    config, common = read_rotary(data, source, _Qwen2Moe, _QWEN_MOE_OPTIONS, qwen_window)
    experts = Experts(
        count=config.num_experts,
        top_k=config.num_experts_per_tok,
        ffn=config.moe_intermediate_size,
        first_dense=_first_dense(config, source),
        normalise=config.norm_topk_prob,
        shared_ffn=config.shared_expert_intermediate_size,
        shared_gate=True,
        aux_loss=config.router_aux_loss_coef,
    )
    return ModelSpec(name=name, **common, attention_bias=config.qkv_bias, experts=experts)


def read_qwen3_moe(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """Qwen3-MoE: normalised heads, no shared expert."""
    if "num_local_experts" in data:  # transformers 5 writes this name
        data = {"num_experts": data["num_local_experts"], **data}
    config, common = read_rotary(data, source, _Qwen3Moe, _QWEN_MOE_OPTIONS, qwen_window)
    experts = Experts(
        count=config.num_experts,
        top_k=config.num_experts_per_tok,
        ffn=config.moe_intermediate_size,
        first_dense=_first_dense(config, source),
        normalise=config.norm_topk_prob,
        aux_loss=config.router_aux_loss_coef,
    )
    bias = config.attention_bias
    return ModelSpec(name=name, **common, attention_bias=bias, output_bias=bias, qk_norm=True, experts=experts)


def _first_dense(config: _QwenMoe, source: str) -> int:
    """How many layers stand ahead of those with experts; a ModelSpec has no dense layers between them."""
    dense = config.mlp_only_layers or ()
    if tuple(dense) == tuple(range(len(dense))):
        return len(dense)
    raise OPTION.refuse(
        "dense layers between layers with experts are not built",
        (source, f"mlp_only_layers = {list(dense)}"),
        hint="mlp_only_layers = [], or the first layers",
    )


def read_deepseek_v2(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """DeepSeek-V2: latent attention, softmax scores, groups where `topk_method` says so."""
    config, common = read_rotary(data, source, _DeepseekV2, _V2_OPTIONS, no_window, latent=True)
    limited = config.topk_method == "group_limited_greedy"
    experts = Experts(
        **_deepseek_experts(config),
        normalise=False,
        groups=(config.n_group or 1) if limited else 1,
        top_groups=(config.topk_group or 1) if limited else 1,
        aux_loss=config.aux_loss_alpha,
    )
    return ModelSpec(name=name, **common | _latent(config), experts=experts)


def read_deepseek_v3(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """DeepSeek-V3: latent attention, sigmoid scores, balanced by biases."""
    config, common = read_rotary(data, source, _DeepseekV3, _V3_OPTIONS, no_window, latent=True)
    experts = Experts(
        **_deepseek_experts(config),
        score="sigmoid",
        normalise=bool(config.norm_topk_prob),
        groups=config.n_group or 1,
        top_groups=config.topk_group or 1,
        balance="bias",
        aux_loss=0.0001,  # as its authors trained it (DeepSeek-AI 2024); the file does not say
    )
    more = common | _latent(config) | {"mtp_layers": config.num_nextn_predict_layers}
    return ModelSpec(name=name, **more, experts=experts)


def _deepseek_experts(config: _Deepseek) -> dict[str, Any]:
    return {
        "count": config.n_routed_experts,
        "top_k": config.num_experts_per_tok or 1,
        "ffn": config.moe_intermediate_size,
        "first_dense": config.first_k_dense_replace or 0,
        "scale": config.routed_scaling_factor,
        "shared_ffn": config.n_shared_experts * config.moe_intermediate_size,
    }


def _latent(config: _Deepseek) -> dict[str, Any]:
    latent = Latent(
        kv_rank=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim or config.qk_nope_head_dim,
        q_rank=config.q_lora_rank,
    )
    heads = config.num_attention_heads
    return {"latent": latent, "head_dim": latent.nope + latent.rope, "kv_heads": heads}
