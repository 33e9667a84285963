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
from typing import Any

from shardsmith.errors import Code, raise_errors
from shardsmith.specs.hf_moe import (
    read_deepseek_v2,
    read_deepseek_v3,
    read_mixtral,
    read_qwen2_moe,
    read_qwen3_moe,
)
from shardsmith.specs.hf_options import option_faults, parse
from shardsmith.specs.hf_rotary import (
    ROTARY_OPTIONS,
    LlamaKeys,
    MistralKeys,
    Qwen2Keys,
    Qwen3Keys,
    head_size_faults,
    mistral_window,
    no_window,
    qwen_window,
    read_rotary,
)
from shardsmith.specs.model import Activation, ModelSpec
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


# What each key may say; an absent key always passes, since transformers' default is among these.
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


def _llama(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    config, common = read_rotary(data, source, LlamaKeys, ROTARY_OPTIONS, no_window)
    bias = config.attention_bias
    return ModelSpec(name=name, **common, attention_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)


def _mistral(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    _, common = read_rotary(data, source, MistralKeys, ROTARY_OPTIONS, mistral_window)
    return ModelSpec(name=name, **common)


def _qwen2(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    _, common = read_rotary(data, source, Qwen2Keys, ROTARY_OPTIONS, qwen_window)
    return ModelSpec(name=name, **common, attention_bias=True)


def _qwen3(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    config, common = read_rotary(data, source, Qwen3Keys, ROTARY_OPTIONS, qwen_window)
    bias = config.attention_bias
    return ModelSpec(name=name, **common, attention_bias=bias, output_bias=bias, qk_norm=True)


def _gpt2(data: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    data = {_GPT2_ALIASES.get(k, k): v for k, v in data.items()}
    faults = option_faults(data, _GPT2_OPTIONS, source)
    known = {k: v for k, v in data.items() if k in {f.name for f in fields(_Gpt2)}}
    config = parse(_Gpt2, known, source, faults)
    if config and config.n_head > 0:
        faults.extend(head_size_faults(config.n_embd, config.n_head, ("n_embd", "n_head"), source))
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


_READERS: dict[str, Callable[[Mapping[str, Any], str, str], ModelSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "mixtral": read_mixtral,
    "qwen2_moe": read_qwen2_moe,
    "qwen3_moe": read_qwen3_moe,
    "deepseek_v2": read_deepseek_v2,
    "deepseek_v3": read_deepseek_v3,
}
