"""Device facts of the cost model by name, and attention kernels by generation; from data files with origin."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from shardsmith.errors import Code
from shardsmith.specs.parse import did_you_mean, parse_table

UNKNOWN_DEVICE = Code(
    code="H501",
    title="unknown device",
    because="peaks, bandwidths and measured shares belong to one device; no other stands in for it",
)


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """One accelerator: dense peaks in TFLOP/s, the shares measured in large products, memory in GB/s."""

    name: str
    aliases: tuple[str, ...]
    generation: str
    peak_tflops: float
    peak8_tflops: float
    vector_tflops: float
    matmul_share: float
    matmul8_share: float
    memory_gbs: float
    processors: int
    origin: str


def device_facts(name: str) -> DeviceFacts:
    """The device that `name` or the longest alias at its start means. Raises `Refused` (H201) where none does."""
    wanted = name.strip().lower()
    known = {alias.lower(): d for d in _devices() for alias in (d.name, *d.aliases)}
    matches = [
        alias for alias in known if wanted == alias or wanted.startswith((alias + "-", alias + " ", alias + "_"))
    ]
    if not matches:
        names = [alias for d in _devices() for alias in d.aliases]
        raise UNKNOWN_DEVICE.refuse(f"there is no device {name!r}", hint=did_you_mean(name, names))
    return known[max(matches, key=len)]


@cache
def attention_share(kernel: str, generation: str) -> float:
    """Declared share of the 16-bit peak of a fused kernel on a device generation, long causal sequences."""
    for entry in _table("attention.toml")["kernels"]:
        if entry["kernel"] == kernel:
            return float(entry["share"][generation])
    raise AssertionError(f"no attention kernel {kernel}")


@cache
def _devices() -> tuple[DeviceFacts, ...]:
    entries = _table("devices.toml")["devices"]
    return tuple(parse_table(DeviceFacts, entry, source="devices.toml", section="devices") for entry in entries)


@cache
def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((files("shardsmith.design.cost") / "data" / name).read_text(encoding="utf-8"))
