"""Products that go by chunks along the sequence, in bytes: `engine/runtime/overlapped.py`."""

from __future__ import annotations

from shardsmith.design.footprint.sizes import Sizes
from shardsmith.design.footprint.tape import Piece, Tape


def entered(tape: Tape, s: Sizes, outs: list[int]) -> list[Piece]:
    """Products of an input that arrives in chunks; `outs` are their sizes."""
    made = [tape.new(size) for size in outs]
    arriving = tape.new(s.gathered)
    for parts in zip(*(s.chunks(size) for size in outs), strict=True):
        for part in parts:
            tape.free(tape.new(part))
    tape.free(arriving)
    return made


def left(tape: Tape, s: Sizes, given: int) -> Piece:
    """A product of `given` bytes, each chunk of it on its way while the next one is computed."""
    sent = _sent(tape, s, s.chunks(given) if s.scattered else [])
    out = tape.new(s.hidden)
    tape.free(*sent)
    return out


def left_backward(tape: Tape, s: Sizes, given: int) -> tuple[Piece, Piece]:
    """The gradient of such a product, gathered; and that of its input of `given` bytes."""
    whole, grad = tape.new(s.gathered), tape.new(given)
    arriving = tape.new(s.gathered)
    for part in s.chunks(given):
        tape.free(tape.new(part))
    tape.free(arriving)
    return whole, grad


def entered_backward(tape: Tape, s: Sizes, grads: list[int]) -> list[Piece]:
    """What is sent of the input gradient of products whose outputs have gradients of sizes `grads`."""
    joined = tape.new(sum(grads))
    sent = _sent(tape, s, s.chunks(sum(grads)) if s.scattered else [])
    tape.free(joined)
    return sent


def _sent(tape: Tape, s: Sizes, copies: list[int]) -> list[Piece]:
    """Chunks of sums on their way; where ranks keep parts, chunks are copied first, and arrive beside what is sent."""
    sent = []
    for at, size in enumerate(s.chunks(s.gathered)):
        copy = tape.new(copies[at]) if copies else None
        sent.append(tape.new(size))
        tape.free(copy)
        if s.scattered:
            sent.append(tape.new(s.chunks(s.hidden)[at]))
    return sent
