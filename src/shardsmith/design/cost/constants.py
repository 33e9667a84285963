"""Constants of the cost model: value, prior, bounds, unit and origin, from package data."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from shardsmith.specs.parse import parse_table


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One number of the model. `width` is the log-normal sigma of its prior; 0 says declared, never fitted."""

    value: float
    prior: float
    width: float
    least: float
    most: float
    unit: str
    origin: str


@cache
def constants() -> dict[str, Constant]:
    """All constants by name, as the package ships them."""
    text = (files("shardsmith.design.cost") / "data" / "constants.toml").read_text(encoding="utf-8")
    return {
        name: parse_table(Constant, table, source="constants.toml", section=name)
        for name, table in tomllib.loads(text).items()
    }


def values() -> dict[str, float]:
    """The fitted or declared value of every constant."""
    return {name: constant.value for name, constant in constants().items()}
