"""Tape: pieces of memory that come and go, what each is for, and the moment when they are most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

TEMPORARY = "temporary"


@dataclass(eq=False, slots=True)
class Piece:
    """`size` bytes for `item` (`layout.record.ITEMS`), held by `holders`; gone when the last lets it go."""

    size: int
    item: str
    holders: int = 1


class Tape:
    """Plays the life of pieces in the order in which an engine makes and frees them; sizes are in bytes."""

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.total = self.peak = 0
        self.at_peak: Mapping[str, int] = {}
        self._label = TEMPORARY
        self._new: list[Piece] | None = None

    def new(self, size: int, item: str | None = None) -> Piece:
        """A piece that begins to live."""
        piece = Piece(size, item or self._label)
        self._add(piece)
        if self._new is not None and piece.item == TEMPORARY:
            self._new.append(piece)
        return piece

    def hold(self, piece: Piece) -> Piece:
        """One more holder of `piece`."""
        piece.holders += 1
        return piece

    def free(self, *pieces: Piece | None) -> None:
        """One holder lets go of each of `pieces` (None: nothing)."""
        for piece in pieces:
            if piece is None:
                continue
            assert piece.holders > 0, "freed once too often"
            piece.holders -= 1
            if piece.holders == 0:
                self.total -= piece.size
                self.live[piece.item] -= piece.size

    def name(self, piece: Piece, item: str) -> None:
        """`piece` is for `item` from now on."""
        self.live[piece.item] -= piece.size
        self.live[item] += piece.size
        piece.item = item

    @contextmanager
    def surviving(self, item: str) -> Iterator[None]:
        """What comes within as a temporary and outlives it is for `item` from then on."""
        self._new = []
        yield
        for piece in self._new:
            if piece.holders and piece.item == TEMPORARY:
                self.name(piece, item)
        self._new = None

    def _add(self, piece: Piece) -> None:
        self.total += piece.size
        self.live[piece.item] += piece.size
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.live)
