"""Which keys a rank's queries see, part by part of the sequence, as rectangles that a kernel can compute.

A causal query sees the keys of its own document up to its own place, at most a window of them: places in a row. Where
places are sorted, as those of a part are, that is a run of the part's rows, so two numbers per query say
everything, and a rectangle of queries and keys can be told to be empty, full, causal or in need of a mask without
ever making the mask of the whole. All numbers are numpy's, on the CPU: they must be known before a kernel starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Kind = Literal["full", "causal", "masked"]

TILE = 1024
"""Most queries of a rectangle that needs a mask: it bounds the mask, and leaves out keys that none of them sees."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Queries `rows` of this rank against the keys `keys` of one part, both rows of what a rank holds.

    `kind`: every query sees all keys (full), query i the first i + 1 (causal), or query i of sequence b the keys
    from `first[b, i]` up to but not including `last[b, i]`, counted in the block (masked); that may be none.
    """

    rows: slice
    keys: slice
    kind: Kind
    first: Ints | None = None
    last: Ints | None = None


Blocks = tuple[Block, ...]


def key_blocks(places: Sequence[Sequence[range]], own: int, documents: Ints | None, window: int | None) -> list[Blocks]:
    """For each part, the blocks that rank `own` computes against its keys; each query is in at most one a part.

    `places[r]` are the places in the sequence that rank r holds, in rising order. `documents` [B, places] number the
    document of each place of the whole sequence, in runs (None: a sequence is one document). A query sees at most
    `window` keys. Of the own part every query sees at least itself.
    """
    if documents is None:
        return list(_blocks_of_whole(tuple(tuple(part) for part in places), own, window))
    return _blocks(places, own, _beginnings(documents), window)


@lru_cache(maxsize=64)
def _blocks_of_whole(places: tuple[tuple[range, ...], ...], own: int, window: int | None) -> tuple[Blocks, ...]:
    return tuple(_blocks(places, own, None, window))


def _beginnings(documents: Ints) -> Ints:
    """The first place of each place's document, [B, places]."""
    place = np.broadcast_to(np.arange(documents.shape[1], dtype=np.int64), documents.shape)
    goes_on = np.zeros(documents.shape, dtype=bool)
    goes_on[:, 1:] = documents[:, 1:] == documents[:, :-1]
    return np.maximum.accumulate(np.where(goes_on, 0, place), axis=1)


def _blocks(places: Sequence[Sequence[range]], own: int, begins: Ints | None, window: int | None) -> list[Blocks]:
    at = _flat(places[own])
    first = np.zeros((1, len(at)), dtype=np.int64) if begins is None else begins[:, at]
    if window is not None:
        first = np.maximum(first, at - window + 1)
    found = []
    for part in places:
        keys = _flat(part)
        low, high = np.searchsorted(keys, first), np.broadcast_to(np.searchsorted(keys, at + 1), first.shape)
        found.append(tuple(_rectangles(low, np.maximum(low, high), 0, len(at))))
    return found


def _rectangles(low: Ints, high: Ints, start: int, stop: int) -> Blocks:
    """The blocks of queries [start, stop), of which query i of sequence b sees the keys [low[b, i], high[b, i])."""
    sees = np.flatnonzero((high[:, start:stop] > low[:, start:stop]).any(0))
    if not len(sees):
        return ()
    start, stop = start + int(sees[0]), start + int(sees[-1]) + 1
    lows, highs = low[:, start:stop], high[:, start:stop]
    begin, end = int(lows[highs > lows].min()), int(highs[highs > lows].max())
    block = Block(rows=slice(start, stop), keys=slice(begin, end), kind="full")
    if (lows <= begin).all() and (highs == end).all():
        return (block,)
    if stop - start == end - begin and (lows <= begin).all() and (highs == np.arange(begin + 1, end + 1)).all():
        return (Block(rows=block.rows, keys=block.keys, kind="causal"),)
    if stop - start > TILE:
        tiles = (_rectangles(low, high, at, min(at + TILE, stop)) for at in range(start, stop, TILE))
        return tuple(chain.from_iterable(tiles))
    inside = (np.clip(x, begin, end) - begin for x in (lows, highs))
    return (Block(**vars(block) | {"kind": "masked"} | dict(zip(("first", "last"), inside, strict=True))),)


def _flat(part: Sequence[range]) -> Ints:
    return np.concatenate([np.arange(r.start, r.stop, dtype=np.int64) for r in part])
