"""Initial weights that depend on (seed, tensor name) alone, never on the layout.

A full tensor is drawn in blocks of rows, each block from its own generator, so a rank draws only the
blocks that its shard touches and every layout holds slices of the same full tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardsmith.engine.runtime.packing import empty_rows_first, rows_first
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
    # Of stacked experts each is a block: all of a block is drawn, whatever part of it is asked for.
    most = 1 if len(weight.shape) == 3 else ROWS_PER_BLOCK
    block = start // most
    while block * most < stop:
        first = block * most
        rows = min(most, weight.shape[0] - first)
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

    Buffers (balancing biases of routers) become 0. The module's parameters must be exactly `weights`: names and
    full shapes are compared first. In memory a parameter has the dim in front whose rows ZeRO shares out. With
    `kept`, parameters have their shapes but no storage, and what is drawn is returned: of each tensor only the part
    that `kept` names, that dim in front.
    """
    drawn = {}
    expected = {w.name: w.shape for w in weights}
    found = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert found == expected, f"module and weights() disagree: {sorted(set(found.items()) ^ set(expected.items()))}"
    for weight in weights:
        shard = shards[weight.name]
        local = empty_rows_first(shard.shape, shard.zero_dim, dtype, device)
        if kept is None:
            made = initial_shard(weight, shard, seed)
            assert tuple(made.shape) == shard.shape, f"{weight.name}: shard is not as planned"
            local.copy_(made)
        else:
            rows = rows_first(initial_shard(weight, kept[weight.name], seed), shard.zero_dim)
            # A copy: what was drawn may be part of a larger tensor.
            drawn[weight.name] = torch.empty(rows.shape, device=device, dtype=dtype).copy_(rows)
            local.untyped_storage().resize_(0)
        owner, _, attribute = weight.name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, nn.Parameter(local))
    for name, buffer in module.named_buffers():
        owner, _, attribute = name.rpartition(".")
        wide = torch.promote_types(dtype, torch.float32)
        setattr(module.get_submodule(owner), attribute, torch.zeros(buffer.shape, device=device, dtype=wide))
    return drawn


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
