"""What a serving engine does, declared: what it takes of a device, how it pages, batches, captures and reduces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from shardsmith.design.targets.target import UNKNOWN_TARGET
from shardsmith.specs.cluster import Device
from shardsmith.specs.parse import did_you_mean, parse_table, read_toml


@dataclass(frozen=True, kw_only=True)
class Server:
    """One serving engine as it runs unless told otherwise, with where its figures come from.

    It fills `memory_share` of a device, `reserve_gib` of it with context and buffers. A request's cache comes in blocks
    of `block_tokens` (with latent attention `latent_block_tokens`). A step takes up to `chunk_tokens` of a prompt, and
    logits of `requests` are reserved; the `large_` ones hold on devices of `large_memory_gib` or more whose names do
    not begin with one of `never_large`. A layer has `kernels` while decoding, `expert_kernels` more with experts, in a
    captured graph up to `graph_requests`. Sums over `own_reduce_ranks` ranks of one fast domain, up to
    `own_reduce_bytes`, are one kernel. `hop_tensors` of the hidden size travel between stages; `logit_bytes` a logit of
    the whole vocabulary stand on one rank.
    """

    name: str
    origin: str
    memory_share: float
    reserve_gib: float
    block_tokens: int
    latent_block_tokens: int
    chunk_tokens: int
    requests: int
    large_chunk_tokens: int
    large_requests: int
    large_memory_gib: float
    never_large: tuple[str, ...]
    graph_requests: int
    kernels: float
    expert_kernels: float
    own_reduce_bytes: int
    own_reduce_ranks: tuple[int, ...]
    hop_tensors: float
    copies_kv: bool
    experts_over_data: bool
    narrow_ends: bool
    logit_bytes: float

    def chunk(self, device: Device) -> int:
        """Prompt tokens that go through the model at a time."""
        return self.large_chunk_tokens if self._large(device) else self.chunk_tokens

    def reserved_requests(self, device: Device) -> int:
        """Requests whose logits are reserved, however few decode."""
        return self.large_requests if self._large(device) else self.requests

    def _large(self, device: Device) -> bool:
        enough = (device.memory_gib or 0.0) >= self.large_memory_gib
        return enough and not device.name.upper().startswith(self.never_large)


def server_names() -> tuple[str, ...]:
    """Names of all serving engines, sorted."""
    return tuple(sorted(f.name.removesuffix(".toml") for f in _folder().iterdir() if f.name.endswith(".toml")))


@cache
def server_named(name: str) -> Server:
    """The serving engine `name`. Raises `Refused` (X351) for a name that no file has."""
    if name not in server_names():
        known = server_names()
        raise UNKNOWN_TARGET.refuse(f"there is no serving target {name!r}", hint=did_you_mean(name, known))
    data = {"name": name} | read_toml(_folder() / f"{name}.toml")
    return parse_table(Server, data, source=f"target {name}", section="")


def _folder() -> Path:
    return Path(str(files("shardsmith.design.targets"))) / "serving"
