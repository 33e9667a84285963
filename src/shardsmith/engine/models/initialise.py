"""Initial weights that depend on (seed, tensor name) alone, never on the layout.

A full tensor is drawn in blocks of rows, each block from its own generator, so a rank draws only the
blocks that its shard touches and every layout holds slices of the same full tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardsmith.layout.facts import Shard
from shardsmith.specs.model import Weight

ROWS_PER_BLOCK = 256


def full_rows(weight: Weight, seed: int, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of the full initial tensor, float32 on the CPU (standard deviation from the full shape)."""
    assert 0 <= start <= stop <= weight.shape[0], f"{weight.name} has no rows {start} to {stop}"
    shape = (stop - start, *weight.shape[1:])
    if weight.init != "normal":
        return torch.full(shape, 1.0 if weight.init == "ones" else 0.0)
    out = torch.empty(shape)
    block = start // ROWS_PER_BLOCK
    while block * ROWS_PER_BLOCK < stop:
        first = block * ROWS_PER_BLOCK
        rows = min(ROWS_PER_BLOCK, weight.shape[0] - first)
        drawn = torch.randn((rows, *weight.shape[1:]), generator=_generator(seed, weight.name, block))
        low, high = max(start, first), min(stop, first + rows)
        out[low - start : high - start] = drawn[low - first : high - first] * weight.init_std
        block += 1
    return out


def initial_shard(weight: Weight, shard: Shard, seed: int) -> Tensor:
    """This rank's part of the full initial tensor, float32 on the CPU."""
    rows = full_rows(weight, seed, shard.offsets[0], shard.offsets[0] + shard.shape[0])
    for dim in range(1, len(weight.shape)):
        rows = rows.narrow(dim, shard.offsets[dim], shard.shape[dim])
    return rows.contiguous()


def whole(weight: Weight) -> Shard:
    """The shard of a rank that holds all of `weight`."""
    return Shard(offsets=(0,) * len(weight.shape), shape=weight.shape)


def materialise(
    module: nn.Module,
    weights: tuple[Weight, ...],
    shards: Mapping[str, Shard],
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    kept: Mapping[str, Shard] | None = None,
) -> dict[str, Tensor]:
    """Replace every parameter of `module` (built full size on meta) by this rank's initial shard.

    The module's parameters must be exactly `weights`: names and full shapes are compared first, the
    shapes of the shards that were made afterwards. With `kept`, parameters have their shapes but no
    storage, and what is drawn is returned: of each tensor only the part that `kept` names.
    """
    drawn = {}
    expected = {w.name: w.shape for w in weights}
    found = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert found == expected, f"module and weights() disagree: {sorted(set(found.items()) ^ set(expected.items()))}"
    for weight in weights:
        if kept is None:
            local = initial_shard(weight, shards[weight.name], seed).to(device=device, dtype=dtype)
        else:
            drawn[weight.name] = initial_shard(weight, kept[weight.name], seed).to(device=device, dtype=dtype)
            local = torch.empty(shards[weight.name].shape, device=device, dtype=dtype)
            local.untyped_storage().resize_(0)
        assert tuple(local.shape) == shards[weight.name].shape, f"{weight.name}: shard is not as planned"
        owner, _, attribute = weight.name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, nn.Parameter(local))
    return drawn


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
