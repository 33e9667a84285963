"""Packing: several tensors, each cut into rows over ranks, in one flat buffer of equal chunks per rank.

A collective moves one buffer, a shard is rows of one tensor: this file translates. Tensor t of n rows
gives rank r the rows [r c, min(n, (r + 1) c)) with c = ceil(n / ranks); in the buffer [ranks x chunk] rank
r's part holds its rows of every tensor one after another, each padded to c rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from shardsmith.layout.axes.data import data_rows

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The layout of tensors of `shapes` over `ranks` ranks."""

    shapes: tuple[Shape, ...]
    ranks: int

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each tensor's padded part on one rank."""
        return tuple(-(-shape[0] // self.ranks) * prod(shape[1:]) for shape in self.shapes)

    @property
    def chunk(self) -> int:
        """Elements of one rank's part of the buffer."""
        return sum(self.sizes)

    def pack(self, tensors: Sequence[Tensor], flat: Tensor) -> None:
        """Write full `tensors` into `flat` [ranks x chunk], cast to its dtype; what is padding becomes 0."""
        by_rank, start = flat.view(self.ranks, self.chunk), 0
        for tensor, size in zip(tensors, self.sizes, strict=True):
            part = by_rank[:, start : start + size]
            start += size
            if tensor.numel() == self.ranks * size:
                part.copy_(tensor.reshape(self.ranks, size))
                continue
            whole = tensor.numel() // size if size else 0
            flat_tensor = tensor.reshape(-1)
            part[:whole].copy_(flat_tensor[: whole * size].view(whole, size))
            part[whole:].zero_()
            part[whole : whole + 1, : tensor.numel() - whole * size].copy_(flat_tensor[whole * size :][None])

    def add(self, position: int, tensor: Tensor, flat: Tensor) -> None:
        """Add one full tensor, by its position, to its place in `flat` [ranks x chunk]."""
        start = sum(self.sizes[:position])
        part = flat.view(self.ranks, self.chunk)[:, start : start + self.sizes[position]]
        if tensor.numel() == part.numel():
            part.add_(tensor.reshape(part.shape))
            return
        alone = flat.new_empty(part.numel())
        Packing(shapes=(self.shapes[position],), ranks=self.ranks).pack([tensor], alone)
        part.add_(alone.view(part.shape))

    def unpack(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write `flat` [ranks x chunk] into full contiguous `tensors`: the inverse of `pack`."""
        by_rank, start = flat.view(self.ranks, self.chunk), 0
        for tensor, size in zip(tensors, self.sizes, strict=True):
            part = by_rank[:, start : start + size]
            start += size
            if tensor.numel() == self.ranks * size:
                tensor.view(self.ranks, size).copy_(part)
                continue
            whole = tensor.numel() // size if size else 0
            flat_tensor = tensor.view(-1)
            flat_tensor[: whole * size].view(whole, size).copy_(part[:whole])
            flat_tensor[whole * size :].copy_(part[whole : whole + 1, : tensor.numel() - whole * size].reshape(-1))

    def pack_shards(self, shards: Sequence[Tensor], flat: Tensor) -> None:
        """Write one rank's rows of every tensor into its part `flat` [chunk]; what is padding becomes 0."""
        for shard, part in zip(shards, flat.split(self.sizes), strict=True):
            part[: shard.numel()].copy_(shard.reshape(-1))
            part[shard.numel() :].zero_()

    def add_shards(self, flat: Tensor, shards: Sequence[Tensor]) -> None:
        """Add one rank's part `flat` [chunk] to its rows of every tensor."""
        for shard, part in zip(shards, flat.split(self.sizes), strict=True):
            shard.add_(part[: shard.numel()].view(shard.shape))

    def write_shards(self, flat: Tensor, shards: Sequence[Tensor]) -> None:
        """Write one rank's part `flat` [chunk] over its rows of every tensor."""
        for shard, part in zip(shards, flat.split(self.sizes), strict=True):
            shard.copy_(part[: shard.numel()].view(shard.shape))


def rows_first(tensor: Tensor, dim: int) -> Tensor:
    """`tensor` with its dim `dim`, whose rows are shared out, in front (a view); its own inverse."""
    return tensor if dim == 0 else tensor.transpose(0, dim)


def shape_rows_first(shape: Shape, dim: int) -> Shape:
    """The shape of `rows_first` of a tensor of `shape`, which need not have storage."""
    turned = list(shape)
    turned[0], turned[dim] = shape[dim], shape[0]
    return tuple(turned)


def empty_rows_first(shape: Shape, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor of `shape` whose rows along `dim` lie one after another in memory."""
    return rows_first(torch.empty(shape_rows_first(shape, dim), dtype=dtype, device=device), dim)


def rows_of(tensor: Tensor, ranks: int, index: int) -> Tensor:
    """Rank `index`'s rows of a full tensor (a view); empty where the rows do not reach that far."""
    first, rows = data_rows(tensor.shape[0], ranks, index)
    return tensor[first : first + rows]


def flat_views(shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """A zeroed flat buffer and views of it in `shapes`, one after another."""
    sizes = [prod(shape) for shape in shapes]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
    return flat, [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
