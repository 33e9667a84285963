"""Units of sharded weights: gathered whole just ahead of their use, freed right after it.

A unit is what one layer needs (or the embedding, or the head). `Gate` is the seam in the model: a block
enters and leaves through it, forward and backward, and thereby says when its weights must be whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.packing import Packing, rows_first, shape_rows_first


class Unit:
    """Weights that are whole or sharded together. Their storage is empty while they are sharded.

    `shards[i]` are this rank's rows of `parameters[i]` along its dim `dims[i]`, that dim in front, in the dtype of
    the parameters.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], shards: Sequence[Tensor], group: Group, dims: Sequence[int]
    ) -> None:
        self.parameters, self.shards, self.group, self.dims = list(parameters), list(shards), group, list(dims)
        shapes = [shape_rows_first(tuple(p.shape), dim) for p, dim in zip(parameters, dims, strict=True)]
        self.packing = Packing(shapes=tuple(shapes), ranks=group.size)
        self.bytes = [p.numel() * p.element_size() for p in parameters]
        self.whole = True
        self._arriving: tuple[dist.Work | None, Tensor] | None = None

    def start(self) -> None:
        """Begin to gather, unless the unit is whole or on its way."""
        if self.whole or self._arriving is not None:
            return
        first = self.parameters[0]
        mine = torch.empty(self.packing.chunk, dtype=first.dtype, device=first.device)
        self.packing.pack_shards(self.shards, mine)
        self._arriving = self.group.all_gather_async(mine, "weights")

    def wait(self) -> None:
        """Return with all weights whole."""
        if self.whole:
            return
        self.start()
        assert self._arriving is not None, "the gather was started"
        work, flat = self._arriving
        if work is not None:
            work.wait()
        for parameter, size in zip(self.parameters, self.bytes, strict=True):
            if parameter.untyped_storage().size() != size:
                parameter.untyped_storage().resize_(size)
        # Through `.data`, so that graphs which saved the parameters do not take this for a change of value.
        self.packing.unpack(flat, self._rows())
        self._arriving, self.whole = None, True

    def _rows(self) -> list[Tensor]:
        return [rows_first(p.data, dim) for p, dim in zip(self.parameters, self.dims, strict=True)]

    def free(self) -> None:
        """Keep only the shards."""
        for parameter in self.parameters:
            parameter.untyped_storage().resize_(0)
        self.whole = False


def gather(units: Sequence[Unit]) -> None:
    """Make all `units` whole, one after another, with the next one always on its way: two buffers at most."""
    for unit, following in zip_longest(units, units[1:]):
        unit.start()
        if following is not None:
            following.start()
        unit.wait()


class Gate:
    """Lets blocks of a stage in and out, gathering their units; transparent unless it is `streaming`.

    `places` maps a place in the stage (embedding, a layer's index, head) to the units it needs, in the order
    of the forward pass. While one place computes, the next one's units are on their way.
    """

    def __init__(self, places: Mapping[str, Sequence[Unit]] | None = None, *, streaming: bool = False) -> None:
        self.places = {name: list(units) for name, units in (places or {}).items()}
        self.order = list(self.places)
        self.streaming = streaming

    def enter(self, place: str, x: Tensor) -> Tensor:
        """`x` before the block at `place`: forward gathers its weights, backward frees them."""
        if not self.streaming:
            return x
        out: Tensor = _Enter.apply(x, self, place)
        return out

    def leave(self, place: str, x: Tensor) -> Tensor:
        """`x` after the block at `place`: forward frees its weights, backward gathers them again."""
        if not self.streaming:
            return x
        out: Tensor = _Leave.apply(x, self, place)
        return out

    @contextmanager
    def forward_only(self, place: str) -> Iterator[None]:
        """Around a look-up, whose backward needs no weights."""
        if not self.streaming:
            yield
            return
        self.open(place, +1)
        yield
        self.close(place)

    def open(self, place: str, direction: int) -> None:
        """Make the weights of `place` whole and start on the place after it in `direction` (+1 forward)."""
        for unit in self.places[place]:
            unit.wait()
        following = self.order.index(place) + direction
        # The embedding is never used in backward: gathered ahead, it would be kept until after the optimiser.
        if 0 <= following < len(self.order) and (direction > 0 or self.order[following] != "embedding"):
            for unit in self.places[self.order[following]]:
                unit.start()

    def close(self, place: str) -> None:
        """Free the weights of `place`."""
        for unit in self.places[place]:
            unit.free()

    def open_all(self) -> None:
        """Make all weights of the stage whole."""
        gather(self._units())

    def close_all(self) -> None:
        """Free all weights of the stage."""
        for unit in self._units():
            unit.free()

    def _units(self) -> list[Unit]:
        return list(dict.fromkeys(unit for units in self.places.values() for unit in units))


OPEN_GATE = Gate()
"""The gate of a stage whose weights are always whole."""


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Gate, place: str) -> Tensor:
        ctx.gate, ctx.place = gate, place
        gate.open(place, +1)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.gate.close(ctx.place)
        return grad, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Gate, place: str) -> Tensor:
        ctx.gate, ctx.place = gate, place
        gate.close(place)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.gate.open(ctx.place, -1)
        return grad, None, None
