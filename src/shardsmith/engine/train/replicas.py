"""Replica check: ranks that should hold the same parameters are compared by checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from shardsmith.engine.runtime.group import Group
from shardsmith.errors import Code
from shardsmith.units import counted

REPLICAS_DIFFER = Code(
    code="D301",
    title="replicas hold different parameters",
    because="data-parallel replicas start equal and stay equal; a difference would be averaged into every gradient",
)


def check_replicas(parameters: Mapping[str, Tensor], group: Group, what: str) -> None:
    """Compare `parameters` bit by bit over the ranks of `group`, which must hold the same (`what` names them).

    Every rank learns of a difference and raises `Refused` (D301) naming the first tensor and the odd ranks.
    """
    if group.size == 1 or not parameters:
        return
    device = next(iter(parameters.values())).device
    mine = torch.tensor([[_checksum(p) for p in parameters.values()]], dtype=torch.int64, device=device)
    everyone = group.all_gather(mine, "replica checksums")
    differs = (everyone != everyone[0]).any(0)
    if not bool(differs.any()):
        return
    at = int(differs.nonzero()[0])
    name = list(parameters)[at]
    found = [int(c) for c in everyone[:, at]]
    odd = _minority(found, group.ranks)
    raise REPLICAS_DIFFER.refuse(
        f"{what} differ: {name} on rank {', '.join(map(str, odd))} is not what the other ranks hold "
        f"({int(differs.sum())} of {counted(len(parameters), 'tensor')} differ)",
        *((f"rank {rank}", f"checksum {c & 0xFFFFFFFF:08x}") for rank, c in zip(group.ranks, found, strict=True)),
        hint="start all ranks from the same seed or checkpoint; if they began equal, suspect those ranks' hardware",
    )


def _checksum(x: Tensor) -> int:
    data = x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes() if x.numel() else b""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _minority(values: list[int], ranks: tuple[int, ...]) -> list[int]:
    """The ranks whose value is not the most frequent one (the first rank's, where there is a tie)."""
    usual = max(dict.fromkeys(values), key=values.count)
    return [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
