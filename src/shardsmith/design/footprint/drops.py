"""Dropout in bytes: `engine/runtime/noise.py`, whose masks are made from words of 8 bytes, so many at a time."""

from __future__ import annotations

from shardsmith.design.footprint.sizes import INDEX
from shardsmith.design.footprint.tape import Piece, Tape
from shardsmith.layout.dropout import mask_rows


def mask(tape: Tape, rows: int, width: int) -> Piece:
    """Which of `rows` x `width` elements stay, a byte each; words come and go."""
    kept = tape.new(rows * width)
    words = min(rows, mask_rows(width)) * width * INDEX
    tape.free(*[tape.new(words) for _ in range(2)])
    return kept


def dropped(tape: Tape, rows: int, width: int, size: int) -> tuple[Piece, Piece]:
    """What is left of `size` bytes of `rows` x `width` elements, and the mask, which is kept."""
    keys = tape.new(rows * INDEX)
    kept = mask(tape, rows, width)
    scaled = tape.new(size)
    out = tape.new(size)
    tape.free(scaled, keys)
    return out, kept


def dropped_backward(tape: Tape, kept: Piece, grad: Piece, size: int) -> Piece:
    """The gradient of `size` bytes ahead of the dropout; takes over one hold of `grad`, and the mask."""
    left = tape.new(size)
    tape.free(kept, grad)
    scaled = tape.new(size)
    tape.free(left)
    return scaled
