"""Constants of the cost model: value, prior, bounds, unit and origin, from package data."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import tomli_w

from shardsmith.errors import Code, raise_errors
from shardsmith.specs.parse import did_you_mean, parse_table, read_toml

UNKNOWN_CONSTANT = Code(
    code="F711", title="unknown constant", because="a name that nothing reads would change no prediction"
)
IMPOSSIBLE_CONSTANT = Code(
    code="F712",
    title="a constant outside its bounds",
    because="outside them no machine can be: a link faster than its wires, a product faster than its peak",
)


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One number of the model. `width` is the log-normal sigma of its prior; 0 says declared, never fitted.

    `machine` is the log-normal sigma by which a declared constant differs between machines: what a refit to one
    machine's run may do to it (a fitted one moves by its `width`).
    """

    value: float
    prior: float
    width: float
    least: float
    most: float
    unit: str
    origin: str
    machine: float = 0.0

    @property
    def spread(self) -> float:
        """Log-normal sigma from one machine to the next; 0 for what is the same everywhere."""
        return self.width or self.machine


@cache
def constants() -> dict[str, Constant]:
    """All constants by name, as the package ships them."""
    text = (files("shardsmith.design.cost") / "data" / "constants.toml").read_text(encoding="utf-8")
    return {
        name: parse_table(Constant, table, source="constants.toml", section=name)
        for name, table in tomllib.loads(text).items()
    }


def values(path: str | Path | None = None) -> dict[str, float]:
    """The value of every constant: as shipped, or with those over it that a file states (`write_values`).

    Raises `Refused` for a file that cannot be read, for a name that is no constant (F711) and for a value
    outside its physical bounds (F712).
    """
    shipped = {name: constant.value for name, constant in constants().items()}
    if path is None:
        return shipped
    stated = read_toml(path).get("constants", {})
    faults = [
        UNKNOWN_CONSTANT.fault(f"there is no constant {name!r}", (str(path), name), hint=did_you_mean(name, shipped))
        for name in stated
        if name not in shipped
    ]
    for name in stated.keys() & shipped.keys():
        bounds, value = constants()[name], stated[name]
        if not (isinstance(value, (int, float)) and bounds.least <= value <= bounds.most):
            message = f"{name} must be a number from {bounds.least:g} to {bounds.most:g} {bounds.unit}"
            faults.append(IMPOSSIBLE_CONSTANT.fault(message, (str(path), f"{name} = {value!r}")))
    raise_errors(faults)
    return shipped | {name: float(value) for name, value in stated.items()}


def write_values(path: str | Path, changed: Mapping[str, float], origin: str) -> None:
    """Write `changed` constants and their `origin` as TOML that `values` reads; the rest stays as shipped."""
    text = tomli_w.dumps({"origin": origin, "constants": dict(changed)})
    Path(path).write_text(text, encoding="utf-8")
