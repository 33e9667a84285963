"""What the Hugging Face model types that grew from Llama have in common: their keys, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from shardsmith.errors import Code, Fault, raise_errors
from shardsmith.specs.hf_options import OPTION, option_faults, parse
from shardsmith.specs.hf_rope import read_scaling, rope_table

HEAD_SIZE = Code(
    code="M204",
    title="hidden size is no multiple of the query heads",
    because="head size = hidden size / query heads, unless head_dim states it",
)


# What each key may say; an absent key always passes, since transformers' default is among these.
ROTARY_OPTIONS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}


@dataclass(frozen=True, kw_only=True)
class LlamaKeys:
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
class MistralKeys(LlamaKeys):
    """The keys of MistralConfig; a window of null is full attention."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096


@dataclass(frozen=True, kw_only=True)
class Qwen2Keys(LlamaKeys):
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
class Qwen3Keys(Qwen2Keys):
    """The keys of Qwen3Config, whose head size does not follow from the hidden size."""

    head_dim: int | None = 128


_C = TypeVar("_C", bound=LlamaKeys)


def read_rotary(
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
            faults.extend(head_size_faults(config.hidden_size, config.num_attention_heads, names, source))
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


def no_window(config: LlamaKeys, source: str) -> tuple[int | None, list[Fault]]:
    """No window: every query sees all keys before it."""
    return None, []


def mistral_window(config: MistralKeys, source: str) -> tuple[int | None, list[Fault]]:
    """The one window of all layers."""
    return config.sliding_window, []


def qwen_window(config: Qwen2Keys, source: str) -> tuple[int | None, list[Fault]]:
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


def head_size_faults(hidden: int, heads: int, keys: tuple[str, str], source: str) -> list[Fault]:
    """A fault (M204) where heads have no whole size."""
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
