"""The Hugging Face `config.json` of a ModelSpec: which model type it is there, and what that type's keys say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardsmith.errors import Code
from shardsmith.specs.hf_rope import write_scaling
from shardsmith.specs.model import Experts, ModelSpec

NO_TYPE = Code(
    code="M205",
    title="no Hugging Face model type computes this model",
    because="a config.json names one model type, and a field that the type cannot say would be read back as another",
)

Requirements = dict[str, tuple[Any, ...]]

_DENSE: Requirements = {"experts": (None,), "latent": (None,), "mtp_layers": (0,)}
"""What no type written here has."""

_ROTARY: Requirements = {
    **_DENSE,
    "norm": ("rmsnorm",),
    "activation": ("swiglu",),
    "positions": ("rope",),
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One model type: the fields it `needs` at one of some values, and what its config says."""

    model_type: str
    architecture: str
    needs: Requirements
    write: Callable[[ModelSpec], dict[str, Any]]

    def clashes(self, spec: ModelSpec) -> list[str]:
        """The fields of `spec` that this type cannot say, as `key = value`."""
        values = {key: _value(spec, key) for key in self.needs}
        return [f"{key} = {value}" for key, value in values.items() if value not in self.needs[key]]


def _value(spec: ModelSpec, key: str) -> Any:
    """The field that `key` names, such as `experts.score`; None where the model has no such part."""
    found: Any = spec
    for name in key.split("."):
        found = None if found is None else getattr(found, name)
    return found


def hf_kind(spec: ModelSpec) -> Kind:
    """The model type that computes what `spec` says. Raises `Refused` (M205) naming what stands in the way."""
    fitting = [kind for kind in _kinds(spec) if not kind.clashes(spec)]
    if fitting:
        return fitting[0]
    nearest = min(_kinds(spec), key=lambda kind: len(kind.clashes(spec)))
    said = [(spec.name, clash) for clash in nearest.clashes(spec)]
    raise NO_TYPE.refuse(
        f"{spec.name} is no {' or '.join(kind.model_type for kind in _kinds(spec))}; nearest is {nearest.model_type}",
        *said,
        hint=", ".join(f"{c.split(' = ')[0]} = {nearest.needs[c.split(' = ')[0]][0]}" for _, c in said),
    )


def to_hf_config(spec: ModelSpec, *, dtype: str = "float32") -> dict[str, Any]:
    """The content of a `config.json` from which `from_hf_config` reads `spec` again, but for its name.

    `dtype` is that of the weights beside it. Raises `Refused` (M205) for a model that no type can say.
    """
    kind = hf_kind(spec)
    return {
        "architectures": [kind.architecture],
        "model_type": kind.model_type,
        **kind.write(spec),
        "vocab_size": spec.vocab,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
        # Tokens are the tokenizer's business; the types' own defaults may lie outside the vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }


def _kinds(spec: ModelSpec) -> tuple[Kind, ...]:
    """Every type, the plainest first, with what each needs of a model of these sizes."""
    same = (spec.attention_bias,)  # types with one switch for the biases of all four projections
    none, whole = (False,), (spec.hidden // spec.heads,)
    plain: Requirements = {**_ROTARY, "qk_norm": none, "window": (None,)}
    llama: Requirements = {**plain, "output_bias": same}
    if spec.hidden % spec.heads:
        llama["hidden"] = (-(-spec.hidden // spec.heads) * spec.heads,)  # LlamaConfig refuses any other
    unbiased: Requirements = {"attention_bias": none, "output_bias": none, "mlp_bias": none}
    if spec.experts is not None:
        return (*_moe_kinds(spec, same), *_deepseek_kinds(spec))
    return (
        Kind(model_type="llama", architecture="LlamaForCausalLM", needs=llama, write=_llama),
        Kind(
            model_type="mistral",
            architecture="MistralForCausalLM",
            needs={**_ROTARY, **unbiased, "qk_norm": none},
            write=lambda spec: _rotary(spec) | {"sliding_window": spec.window},
        ),
        Kind(
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            needs={**_ROTARY, "attention_bias": (True,), "output_bias": none, "mlp_bias": none, "qk_norm": none},
            write=lambda spec: _rotary(spec) | _qwen_window(spec),
        ),
        Kind(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            needs={**_ROTARY, "qk_norm": (True,), "output_bias": same, "mlp_bias": none},
            write=lambda spec: _rotary(spec) | _qwen_window(spec) | {"attention_bias": spec.attention_bias},
        ),
        Kind(
            model_type="gpt2",
            architecture="GPT2LMHeadModel",
            needs={
                **_DENSE,
                "norm": ("layernorm",),
                "activation": ("gelu_tanh", "gelu"),
                "positions": ("learned",),
                "attention_bias": (True,),
                "output_bias": (True,),
                "mlp_bias": (True,),
                "qk_norm": none,
                "window": (None,),
                "kv_heads": (spec.heads,),
                "head_dim": whole,
                "hidden": (spec.heads * spec.head_dim,),
            },
            write=_gpt2,
        ),
    )


_SPARSE: Requirements = {
    "latent": (None,),
    "norm": ("rmsnorm",),
    "activation": ("swiglu",),
    "positions": ("rope",),
    "mlp_bias": (False,),
    "mtp_layers": (0,),
    "experts.score": ("softmax",),
    "experts.scale": (1.0,),
    "experts.groups": (1,),
    "experts.balance": ("aux_loss", "none"),
}
"""What Mixtral's and Qwen's types with experts have in common."""


def _moe_kinds(spec: ModelSpec, same: tuple[Any, ...]) -> tuple[Kind, ...]:
    experts = spec.experts
    assert experts is not None, "only for models with experts"
    none = (False,)
    return (
        Kind(
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            needs={
                **_SPARSE,
                "attention_bias": none,
                "output_bias": none,
                "qk_norm": none,
                "ffn": (experts.ffn,),
                "experts.normalise": (True,),
                "experts.shared_ffn": (0,),
                "experts.first_dense": (0,),
            },
            write=lambda spec: _rotary(spec) | _mixtral_experts(spec) | {"sliding_window": spec.window},
        ),
        Kind(
            model_type="qwen2_moe",
            architecture="Qwen2MoeForCausalLM",
            needs={
                **_SPARSE,
                "output_bias": none,
                "qk_norm": none,
                "head_dim": (spec.hidden // spec.heads,),
                "experts.shared_gate": (True,),
            },
            write=lambda spec: (
                _rotary(spec)
                | _qwen_experts(spec)
                | {"qkv_bias": spec.attention_bias, "shared_expert_intermediate_size": _experts(spec).shared_ffn}
            ),
        ),
        Kind(
            model_type="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            needs={**_SPARSE, "output_bias": same, "qk_norm": (True,), "experts.shared_ffn": (0,)},
            write=lambda spec: _rotary(spec) | _qwen_experts(spec) | {"attention_bias": spec.attention_bias},
        ),
    )


def _deepseek_kinds(spec: ModelSpec) -> tuple[Kind, ...]:
    experts = spec.experts
    assert experts is not None, "only for models with experts"
    none = (False,)
    shared: Requirements = {
        "norm": ("rmsnorm",),
        "activation": ("swiglu",),
        "positions": ("rope",),
        **dict.fromkeys(("attention_bias", "output_bias", "mlp_bias", "qk_norm", "experts.shared_gate"), none),
        "window": (None,),
        "kv_heads": (spec.heads,),
        "latent": (spec.latent,) if spec.latent else ("a table",),
        "experts.shared_ffn": (max(1, experts.shared_ffn // experts.ffn) * experts.ffn,),
    }
    v2: Requirements = {
        "mtp_layers": (0,),
        "experts.score": ("softmax",),
        "experts.normalise": none,
        "experts.balance": ("aux_loss", "none"),
    }
    return (
        Kind(
            model_type="deepseek_v2",
            architecture="DeepseekV2ForCausalLM",
            needs={**shared, **v2},
            write=lambda spec: (
                _rotary(spec)
                | _deepseek(spec)
                | {
                    "topk_method": "group_limited_greedy" if _experts(spec).groups > 1 else "greedy",
                    "aux_loss_alpha": _experts(spec).aux_loss,
                }
            ),
        ),
        Kind(
            model_type="deepseek_v3",
            architecture="DeepseekV3ForCausalLM",
            needs={**shared, "experts.score": ("sigmoid",), "experts.balance": ("bias",)},
            write=lambda spec: (
                _rotary(spec)
                | _deepseek(spec)
                | {"norm_topk_prob": _experts(spec).normalise, "num_nextn_predict_layers": spec.mtp_layers}
            ),
        ),
    )


def _experts(spec: ModelSpec) -> Experts:
    assert spec.experts is not None, "only for models with experts"
    return spec.experts


def _mixtral_experts(spec: ModelSpec) -> dict[str, Any]:
    e = _experts(spec)
    return {"num_local_experts": e.count, "num_experts_per_tok": e.top_k, "router_aux_loss_coef": e.aux_loss}


def _qwen_experts(spec: ModelSpec) -> dict[str, Any]:
    e = _experts(spec)
    return _qwen_window(spec) | {
        "num_experts": e.count,
        "num_experts_per_tok": e.top_k,
        "moe_intermediate_size": e.ffn,
        "norm_topk_prob": e.normalise,
        "router_aux_loss_coef": e.aux_loss,
        "mlp_only_layers": list(range(e.first_dense)),
    }


def _deepseek(spec: ModelSpec) -> dict[str, Any]:
    e, latent = _experts(spec), spec.latent
    assert latent is not None, "only for latent attention"
    return {
        "head_dim": latent.rope,  # what the type calls so: the rotated channels
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope,
        "qk_rope_head_dim": latent.rope,
        "v_head_dim": latent.value,
        "n_routed_experts": e.count,
        "n_shared_experts": e.shared_ffn // e.ffn,
        "num_experts_per_tok": e.top_k,
        "moe_intermediate_size": e.ffn,
        "first_k_dense_replace": e.first_dense,
        "routed_scaling_factor": e.scale,
        "n_group": e.groups,
        "topk_group": e.top_groups,
    }


def _rotary(spec: ModelSpec) -> dict[str, Any]:
    return {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.context,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": write_scaling(spec),
    }


def _llama(spec: ModelSpec) -> dict[str, Any]:
    return _rotary(spec) | {"attention_bias": spec.attention_bias, "mlp_bias": spec.mlp_bias}


def _qwen_window(spec: ModelSpec) -> dict[str, Any]:
    if spec.window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": spec.window, "max_window_layers": 0}


def _gpt2(spec: ModelSpec) -> dict[str, Any]:
    return {
        "n_embd": spec.hidden,
        "n_inner": spec.ffn,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_positions": spec.context,
        "activation_function": "gelu_new" if spec.activation == "gelu_tanh" else "gelu",
        "layer_norm_epsilon": spec.norm_eps,
    }
