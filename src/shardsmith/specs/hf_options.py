"""What all readers of Hugging Face configs share: faults of options, values taken as written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from shardsmith.errors import Code, Fault, Refused
from shardsmith.specs.parse import did_you_mean, parse_table

T = TypeVar("T")

OPTION = Code(
    code="M203",
    title="model option that is not built",
    because="the option changes what the model computes, so leaving it out would silently give another model",
)


def parse(cls: type[T], data: Mapping[str, Any], source: str, faults: list[Fault], section: str = "") -> T | None:
    """`cls` from `data`, or None with what is wrong appended to `faults`."""
    try:
        return parse_table(cls, data, source=source, section=section)
    except Refused as refused:
        faults.extend(refused.faults)
        return None


def option_faults(
    data: Mapping[str, Any], options: Mapping[str, tuple[Any, ...]], source: str, prefix: str = ""
) -> list[Fault]:
    """A fault (M203) for each of `options` whose value in `data` is not allowed; the first allowed is the default."""
    faults = []
    for key, allowed in options.items():
        value = data.get(key, allowed[0])
        if value not in allowed:
            words = [json.dumps(a) for a in allowed if a is not None]
            hint = did_you_mean(json.dumps(value), words) if words else f"a model without {prefix}{key}"
            shown = f"{prefix}{key} = {json.dumps(value)}"
            faults.append(OPTION.fault(f"{shown} is not built", (source, shown), hint=hint))
    return faults
