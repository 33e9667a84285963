"""Fixed: plan fields that a search holds, to one value each or to some, and how they are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any


@dataclass(frozen=True)
class OneOf:
    """Values of which a field that is held may have any."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return "|".join(word(value) for value in self.values)


def word(value: Any) -> str:
    """A value as `--fix` takes it: `8`, `true`, `weight_gradient+chunks`, `none` for an overlap of nothing."""
    if isinstance(value, (tuple, list)):
        return "+".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def held_values(fixed: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    """The values that `fixed` allows for a field that it names."""
    value = fixed[key]
    return value.values if isinstance(value, OneOf) else (value,)


def combinations(fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every choice of one value for each field that is held."""
    for values in product(*(held_values(fixed, key) for key in fixed)):
        yield dict(zip(fixed, values, strict=True))


def shown_value(held: Any) -> str:
    """What a field is held to, as `--fix` takes it: one value, or all that it may have."""
    return str(held) if isinstance(held, OneOf) else word(held)
