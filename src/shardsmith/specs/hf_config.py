"""ModelSpecs from the `config.json` of Hugging Face model folders; never touches a network.

Read: model types `llama` (Llama 1, 2, 3 and 3.1, and models that share their layout), `mistral`, `qwen2` (also
Qwen2.5), `qwen3`, `gpt2`, and with experts `mixtral`, `qwen2_moe`, `qwen3_moe`, `deepseek_v2`, `deepseek_v3`.
Keys that a file leaves out take the defaults that transformers documents for the type. Dropout and generation
settings are not part of a ModelSpec: they change neither tensors nor what a trained model computes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from shardsmith.errors import Code, Fault, raise_errors
from shardsmith.specs.hf_options import OPTION, option_faults, parse
from shardsmith.specs.hf_rope import read_scaling, rope_table
from shardsmith.specs.model import Activation, Experts, Latent, ModelSpec
from shardsmith.specs.model_rules import model_faults
from shardsmith.specs.parse import NO_FILE

NOT_JSON = Code(
    code="F112", title="file is not a JSON object", because="a Hugging Face config.json holds one JSON object"
)
HUB_NAME = Code(
    code="M201",
    title="a hub name instead of a local folder",
    because="nothing is fetched while planning or training: compute nodes are often offline, and a look-up there hangs",
)
MODEL_TYPE = Code(
    code="M202",
    title="model type that is not built",
    because="the tensors and the arithmetic of each model type are written out, never guessed",
)
HEAD_SIZE = Code(
    code="M204",
    title="hidden size is no multiple of the query heads",
    because="head size = hidden size / query heads, unless head_dim states it",
)


@dataclass(frozen=True, kw_only=True)
class _Llama:
    """The keys of LlamaConfig that decide shapes or arithmetic, with transformers' defaults."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Mistral(_Llama):
    """The keys of MistralConfig; a window of null is full attention."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096


@dataclass(frozen=True, kw_only=True)
class _Qwen2(_Llama):
    """The keys of Qwen2Config; layers from `max_window_layers` on have the window, where it is used at all."""

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class _Qwen3(_Qwen2):
    """The keys of Qwen3Config, whose head size does not follow from the hidden size."""

    head_dim: int | None = 128


@dataclass(frozen=True, kw_only=True)
class _Gpt2:
    """The keys of GPT2Config that decide shapes or arithmetic, with transformers' defaults."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True


_C = TypeVar("_C", bound=_Llama)

# What each key may say; an absent key always passes, since transformers' default is among these.
_ROTARY_OPTIONS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}
_GPT2_ACTIVATIONS: dict[str, Activation] = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_GPT2_OPTIONS: dict[str, tuple[Any, ...]] = {
    "activation_function": tuple(_GPT2_ACTIVATIONS),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
}
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def from_hf_config(path_or_dict: str | Path | Mapping[str, Any]) -> ModelSpec:
    """The model that a `config.json`, a folder with one, or its content as a mapping describes.

    Raises `Refused` with everything that stands in the way: a missing file (F110), malformed JSON (F112),
    a hub name (M201), a model type (M202) or option (M203) that is not built, wrong values (F102), shapes
    that do not fit (M101 to M105, M204).
    """
    if isinstance(path_or_dict, Mapping):
        data, source = path_or_dict, "config"
        name = str(data.get("_name_or_path") or data.get("model_type") or "model")
    else:
        file = _config_file(path_or_dict)
        data, source, name = _read_json(file), str(file), file.resolve().parent.name
    kind = data.get("model_type")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise MODEL_TYPE.refuse(
            f"model_type = {json.dumps(kind)} is not built",
            (source, f"model_type = {json.dumps(kind)}"),
            hint="model_type = one of " + ", ".join(_READERS),
        )
    spec = reader(data, name, source)
    raise_errors(model_faults(spec, source))
    return spec


def _config_file(path: str | Path) -> Path:
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if file.is_file():
        return file
    # One slash and no suffix of a file: `owner/name`, as model hubs spell it.
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not str(path).endswith((".json", ".toml")):
        raise HUB_NAME.refuse(
            f"there is no local folder {str(path)!r}, and hub names are not looked up",
            hint=f"download beforehand, where there is a network: `hf download {path} --local-dir FOLDER`, "
            "then give FOLDER",
        )
    raise NO_FILE.refuse(
        f"there is no file {str(file)!r}", hint="give a model folder that holds config.json, or the file itself"
    )


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise NOT_JSON.refuse(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise NOT_JSON.refuse(f"{file} holds a {type(data).__name__}, not an object")
    return data


def _rotary(
    data: Mapping[str, Any],
    source: str,
    cls: type[_C],
    options: Mapping[str, tuple[Any, ...]],
    window: Callable[[_C, str], tuple[int | None, list[Fault]]],
    *,
    latent: bool = False,
) -> tuple[_C, dict[str, Any]]:
    """A config of the kinds that grew from Llama, and the fields of ModelSpec that all of them mean the same way."""
    rope = rope_table(data)
    faults = option_faults(data, options, source)
    known = {k: v for k, v in data.items() if k in {f.name for f in fields(cls)}}
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        known["rope_theta"] = rope["rope_theta"]
    config = parse(cls, known, source, faults)
    context = cls.max_position_embeddings if config is None else config.max_position_embeddings
    scaling = read_scaling(data, context, source, faults, scores=latent)
    width = None
    if config is not None:
        width, found = window(config, source)
        faults.extend(found)
        if config.head_dim is None and config.num_attention_heads > 0 and not latent:
            names = ("hidden_size", "num_attention_heads")
            faults.extend(_head_size_faults(config.hidden_size, config.num_attention_heads, names, source))
    raise_errors(faults)
    assert config is not None, "a config that could not be read was reported above"
    heads = config.num_attention_heads
    return config, {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": heads,
        "kv_heads": heads if config.num_key_value_heads is None else config.num_key_value_heads,
        "head_dim": config.hidden_size // max(heads, 1) if config.head_dim is None else config.head_dim,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "context": config.max_position_embeddings,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": 10000.0 if config.rope_theta is None else config.rope_theta,
        "rope_scaling": scaling,
        "window": width,
        "tied": config.tie_word_embeddings,
        "init_std": config.initializer_range,
    }


def _no_window(config: _Llama, source: str) -> tuple[int | None, list[Fault]]:
    return None, []


def _mistral_window(config: _Mistral, source: str) -> tuple[int | None, list[Fault]]:
    return config.sliding_window, []


def _qwen_window(config: _Qwen2, source: str) -> tuple[int | None, list[Fault]]:
    """The window of all layers: a ModelSpec has one for every layer, or none."""
    used = config.sliding_window if config.use_sliding_window else None
    kinds = config.layer_types
    if kinds is None:
        first = config.num_hidden_layers if used is None else config.max_window_layers
        layers = range(config.num_hidden_layers)
        kinds = tuple("sliding_attention" if i >= first else "full_attention" for i in layers)
    if len(set(kinds)) < 2 and set(kinds) <= {"sliding_attention", "full_attention"}:
        return (used if "sliding_attention" in kinds else None), []
    said = [(source, f"{key} = {json.dumps(getattr(config, key))}") for key in ("layer_types", "max_window_layers")]
    message = "a sliding window on some layers only is not built"
    return None, [OPTION.fault(message, *said, hint="use_sliding_window = false, or max_window_layers = 0")]


def _llama(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    config, common = _rotary(data, source, _Llama, _ROTARY_OPTIONS, _no_window)
    bias = config.attention_bias
    return ModelSpec(name=name, **common, attention_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)


def _mistral(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    _, common = _rotary(data, source, _Mistral, _ROTARY_OPTIONS, _mistral_window)
    return ModelSpec(name=name, **common)


def _qwen2(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    _, common = _rotary(data, source, _Qwen2, _ROTARY_OPTIONS, _qwen_window)
    return ModelSpec(name=name, **common, attention_bias=True)


def _qwen3(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    config, common = _rotary(data, source, _Qwen3, _ROTARY_OPTIONS, _qwen_window)
    bias = config.attention_bias
    return ModelSpec(name=name, **common, attention_bias=bias, output_bias=bias, qk_norm=True)


def _gpt2(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    data = {_GPT2_ALIASES.get(k, k): v for k, v in data.items()}
    faults = option_faults(data, _GPT2_OPTIONS, source)
    known = {k: v for k, v in data.items() if k in {f.name for f in fields(_Gpt2)}}
    config = parse(_Gpt2, known, source, faults)
    if config and config.n_head > 0:
        faults.extend(_head_size_faults(config.n_embd, config.n_head, ("n_embd", "n_head"), source))
    raise_errors(faults)
    assert config is not None, "a config that could not be read was reported above"
    return ModelSpec(
        name=name,
        layers=config.n_layer,
        hidden=config.n_embd,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=config.n_embd // max(config.n_head, 1),
        ffn=4 * config.n_embd if config.n_inner is None else config.n_inner,
        vocab=config.vocab_size,
        context=config.n_positions,
        norm="layernorm",
        norm_eps=config.layer_norm_epsilon,
        activation=_GPT2_ACTIVATIONS[config.activation_function],
        positions="learned",
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied=config.tie_word_embeddings,
        init_std=config.initializer_range,
    )


@dataclass(frozen=True, kw_only=True)
class _Mixtral(_Llama):
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
class _QwenMoe(_Qwen2):
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
class _Deepseek(_Llama):
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


_MIXTRAL_OPTIONS = {**_ROTARY_OPTIONS, "router_jitter_noise": (0.0,)}
_QWEN_MOE_OPTIONS = {**_ROTARY_OPTIONS, "decoder_sparse_step": (1,)}
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


def _mixtral(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    config, common = _rotary(data, source, _Mixtral, _MIXTRAL_OPTIONS, lambda c, _: (c.sliding_window, []))
    experts = Experts(
        count=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        ffn=config.intermediate_size,
        aux_loss=config.router_aux_loss_coef,
    )
    return ModelSpec(name=name, **common, experts=experts)


def _qwen2_moe(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    config, common = _rotary(data, source, _Qwen2Moe, _QWEN_MOE_OPTIONS, _qwen_window)
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


def _qwen3_moe(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    if "num_local_experts" in data:  # transformers 5 writes this name
        data = {"num_experts": data["num_local_experts"], **data}
    config, common = _rotary(data, source, _Qwen3Moe, _QWEN_MOE_OPTIONS, _qwen_window)
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


def _deepseek_v2(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    config, common = _rotary(data, source, _DeepseekV2, _V2_OPTIONS, _no_window, latent=True)
    limited = config.topk_method == "group_limited_greedy"
    experts = Experts(
        **_deepseek_experts(config),
        normalise=False,
        groups=(config.n_group or 1) if limited else 1,
        top_groups=(config.topk_group or 1) if limited else 1,
        aux_loss=config.aux_loss_alpha,
    )
    return ModelSpec(name=name, **common | _latent(config), experts=experts)


def _deepseek_v3(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    config, common = _rotary(data, source, _DeepseekV3, _V3_OPTIONS, _no_window, latent=True)
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


def _head_size_faults(hidden: int, heads: int, keys: tuple[str, str], source: str) -> list[Fault]:
    if hidden % heads == 0:
        return []
    width, count = keys
    return [
        HEAD_SIZE.fault(
            f"{heads} query heads do not divide a hidden size of {hidden}",
            (source, f"{width} = {hidden}"),
            (source, f"{count} = {heads}"),
            hint=f"{width} = {-(-hidden // heads) * heads}",
        )
    ]


_READERS: dict[str, Callable[[Mapping[str, Any], str, str], ModelSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
