"""What published models have that no column of a CSV of runs says; from a data file with origin."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import sqrt

from shardsmith.specs.parse import parse_table


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Facts of one model, whose rows have `mark` in their name.

    `preset` names the model that it is, where it has parts that no column says: latent attention, shared experts.
    In a `window_share` of the layers a query sees at most `window` keys (0: all before it); `expert_bias` says that
    experts add a bias to their output.
    """

    mark: str
    origin: str
    preset: str = ""
    expert_bias: bool = False
    window: int = 0
    window_share: float = 0.0


PLAIN = Architecture(mark="", origin="nothing beyond the columns")


def architecture_of(row: Mapping[str, str]) -> Architecture:
    """What is known of the model of a row; nothing special where no mark is in its name."""
    name = row.get("model", "")
    return next((known for known in _architectures() if known.mark in name), PLAIN)


def mean_window(seq_len: float, window: float, share: float) -> float:
    """The window that, in every layer, leaves as many scores as one of `window` keys in a `share` of the layers.

    Of S queries with w keys at most, w (2 S - w) / 2 scores are left of a causal half.
    """
    most = min(window or seq_len, seq_len)
    left = (1.0 - share) * seq_len**2 + share * most * (2.0 * seq_len - most)
    return float(seq_len - sqrt(max(seq_len**2 - left, 0.0)))


@cache
def _architectures() -> tuple[Architecture, ...]:
    text = (files("shardsmith.design.validation") / "architectures.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["architectures"]
    return tuple(
        parse_table(Architecture, entry, source="architectures.toml", section="architectures") for entry in entries
    )
