"""Rotary settings of a Hugging Face `config.json`: read into a RopeScaling or YarnScaling, and written back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from shardsmith.errors import Fault
from shardsmith.specs.hf_options import OPTION, option_faults, parse
from shardsmith.specs.model import ModelSpec, RopeScaling, YarnScaling

ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class _Llama3Rope:
    """The keys of rope type `llama3`; transformers requires all of them."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class _YarnRope:
    """The keys of rope type `yarn`, with transformers' defaults; a `factor` of null follows from the lengths."""

    factor: float | None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def rope_table(data: Mapping[str, Any]) -> Any:
    """What `data` says under `rope_scaling` (older files) or `rope_parameters` (transformers 5); {} for nothing."""
    return data.get("rope_scaling") or data.get("rope_parameters") or {}


def read_scaling(
    data: Mapping[str, Any], context: int, source: str, faults: list[Fault], *, scores: bool = False
) -> RopeScaling | YarnScaling | None:
    """The frequency scaling of a config, None for plain rotary positions or with what is wrong added to `faults`.

    `context` is the config's max_position_embeddings, which YaRN's original length defaults to. `scores`: the type
    multiplies scores by what `mscale_all_dim` says (DeepSeek); other types leave it out.
    """
    rope = rope_table(data)
    where = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
    if not isinstance(rope, Mapping) or any(isinstance(v, Mapping) for v in rope.values()):
        value = f"{where} = {json.dumps(rope)}"
        faults.append(OPTION.fault(f"{where} must be one table for all layers", (source, value)))
        return None
    kind = rope.get("rope_type", rope.get("type", "default"))
    faults.extend(option_faults(rope, {"partial_rotary_factor": (1.0, None)}, source, prefix=where + "."))
    faults.extend(
        option_faults({"rope_type": kind}, {"rope_type": ("default", "llama3", "yarn")}, source, prefix=where + ".")
    )
    if ORIGINAL in data:
        rope = {ORIGINAL: data[ORIGINAL], **rope}
    if kind == "llama3":
        return _llama3(rope, source, where, faults)
    scaling = _yarn(rope, context, source, where, faults) if kind == "yarn" else None
    if scaling is not None and scores and isinstance(rope.get("mscale_all_dim"), int | float):
        return replace(scaling, score_factor=_mscale(scaling.factor, rope["mscale_all_dim"]) ** 2)
    return scaling


def write_scaling(spec: ModelSpec) -> dict[str, Any] | None:
    """The `rope_scaling` of a config.json; None for plain rotary positions. Read by transformers 4 and 5."""
    scaling = spec.rope_scaling
    if scaling is None:
        return None
    out: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor, ORIGINAL: scaling.original_context}
    if isinstance(scaling, RopeScaling):
        return out | {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    out |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if scaling.attention_factor is not None:
        out["attention_factor"] = scaling.attention_factor
    if scaling.score_factor != 1.0:
        out["mscale"] = out["mscale_all_dim"] = (scaling.score_factor**0.5 - 1.0) / (0.1 * math.log(scaling.factor))
    return out if scaling.truncate else out | {"truncate": False}


def _llama3(rope: Mapping[str, Any], source: str, where: str, faults: list[Fault]) -> RopeScaling | None:
    config = parse(_Llama3Rope, _known(_Llama3Rope, rope), source, faults, section=where)
    if config is None:
        return None
    return RopeScaling(
        factor=config.factor,
        low_freq_factor=config.low_freq_factor,
        high_freq_factor=config.high_freq_factor,
        original_context=config.original_max_position_embeddings,
    )


def _yarn(rope: Mapping[str, Any], context: int, source: str, where: str, faults: list[Fault]) -> YarnScaling | None:
    config = parse(_YarnRope, _known(_YarnRope, rope), source, faults, section=where)
    if config is None:
        return None
    original = config.original_max_position_embeddings or context
    factor = context / original if config.factor is None else config.factor
    attention = config.attention_factor
    if attention is None and config.mscale and config.mscale_all_dim:
        attention = _mscale(factor, config.mscale) / _mscale(factor, config.mscale_all_dim)
    return YarnScaling(
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=config.beta_fast or 32.0,
        beta_slow=config.beta_slow or 1.0,
        attention_factor=attention,
        truncate=config.truncate,
    )


def _mscale(factor: float, mscale: float) -> float:
    """The attention factor of DeepSeek's variant of YaRN, before it is divided by that of all dims."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _known(cls: type[Any], table: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in table.items() if k in {f.name for f in fields(cls)}}
