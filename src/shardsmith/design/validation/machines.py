"""What the owners of measured machines say about them beside their runs; from a data file with origin."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from shardsmith.specs.parse import parse_table


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts of one machine. `mark` is text that its rows carry in their notes or source.

    `network_share` is the share of the nominal network rate that its path leaves, `matmul_share` the share of
    the 16-bit peak that long products were measured to sustain (0: not measured), `synchronous` says that
    every launch waits for its kernel.
    """

    mark: str
    origin: str
    network_share: float = 1.0
    matmul_share: float = 0.0
    synchronous: bool = False


def machine_of(row: Mapping[str, str]) -> Machine:
    """All that is known of the machine a row was measured on; defaults where nothing is."""
    text = f"{row.get('notes', '')} {row.get('source', '')}"
    known = [machine for machine in _machines() if machine.mark in text]
    return Machine(
        mark=" + ".join(machine.mark for machine in known),
        origin="; ".join(machine.origin for machine in known),
        network_share=min((machine.network_share for machine in known), default=1.0),
        matmul_share=max((machine.matmul_share for machine in known), default=0.0),
        synchronous=any(machine.synchronous for machine in known),
    )


@cache
def _machines() -> tuple[Machine, ...]:
    text = (files("shardsmith.design.validation") / "machines.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["machines"]
    return tuple(parse_table(Machine, entry, source="machines.toml", section="machines") for entry in entries)
