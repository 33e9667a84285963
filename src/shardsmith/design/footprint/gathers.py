"""What sharded weights cost while they are whole or on their way: `engine/runtime/units.py` in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import prod

from shardsmith.design.footprint.tape import Piece, Tape
from shardsmith.layout.axes.data import chunk_elements

Shape = tuple[int, ...]


class Unit:
    """Weights of `shapes` that are gathered together over `shards` ranks, `width` bytes an element."""

    def __init__(self, tape: Tape, shapes: Sequence[Shape], shards: int, width: int) -> None:
        self.tape = tape
        self.size = sum(prod(shape) for shape in shapes) * width
        self.part = chunk_elements(shapes, shards) * width
        self.shards = shards
        self.piece: Piece | None = None
        self._arriving: list[Piece] = []

    def start(self) -> None:
        """Begin to gather: this rank's part is packed, and lands with all others' in one flat buffer."""
        if self.piece is not None or self._arriving:
            return
        self._arriving = [self.tape.new(self.part, "gathered")]
        if self.shards > 1:
            self._arriving.append(self.tape.new(self.shards * self.part, "gathered"))

    def wait(self, *, in_place: bool = False) -> None:
        """All weights are whole: in storage of their own, or (`in_place`) in the weights that are there anyway."""
        if self.piece is not None:
            return
        self.start()
        self.piece = self.tape.new(0 if in_place else self.size, "gathered")
        self.tape.free(*self._arriving)
        self._arriving = []

    def free(self) -> None:
        """Only the shards are left."""
        self.tape.free(self.piece)
        self.piece = None


def gather(units: Sequence[Unit], *, in_place: bool = False) -> None:
    """Make all whole, one after another, with the next one always on its way."""
    for unit, following in zip_longest(units, units[1:]):
        unit.start()
        if following is not None:
            following.start()
        unit.wait(in_place=in_place)


class Gate:
    """Where blocks of a stage let their weights be gathered and freed; with no `places`, they are always whole."""

    def __init__(self, places: Mapping[str, Sequence[Unit]], *, streaming: bool) -> None:
        self.places, self.order = places, list(places)
        self.streaming = streaming

    def enter(self, place: str) -> None:
        """Ahead of the forward pass of `place`."""
        if self.streaming:
            self._open(place, +1)

    def leave(self, place: str) -> None:
        """Behind the forward pass of `place`, or behind its backward pass."""
        if self.streaming:
            for unit in self.places[place]:
                unit.free()

    def enter_backward(self, place: str) -> None:
        """Ahead of the backward pass of `place`."""
        if self.streaming:
            self._open(place, -1)

    def open_all(self) -> None:
        """All weights of the stage become whole, unless they stream."""
        if not self.streaming:
            gather(self._units())

    def close_all(self) -> None:
        """The counterpart of `open_all`."""
        if not self.streaming:
            for unit in self._units():
                unit.free()

    def _open(self, place: str, direction: int) -> None:
        for unit in self.places[place]:
            unit.wait()
        following = self.order.index(place) + direction
        if 0 <= following < len(self.order) and (direction > 0 or self.order[following] != "embedding"):
            for unit in self.places[self.order[following]]:
                unit.start()

    def _units(self) -> list[Unit]:
        return list(dict.fromkeys(unit for units in self.places.values() for unit in units))
