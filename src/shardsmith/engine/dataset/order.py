"""Which sample stands where in which step: a function of (seed, step) alone, whatever the plan.

A sample is a window of seq_len + 1 tokens over all documents joined; windows begin every seq_len
tokens, so each token is a target once. Every epoch visits all samples once, in an order of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardsmith.errors import Code
from shardsmith.units import counted

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

ORDER, SYNTHETIC, HELD_OUT, EVALUATION = 1, 2, 3, 4
"""First part of the key of a random stream: what it is used for."""

_ROUNDS = 8

NO_SAMPLE = Code(
    code="G301",
    title="data shorter than one sample",
    because="a sample is seq_len + 1 consecutive tokens, so that every position has a next token to predict",
)


FINE_WEIGHTS = Code(
    code="G302",
    title="weights too fine",
    because="a blend keeps its weights exactly, in rounds of a table that must stay small",
)

LONGEST_ROUND = 2**20
"""Places after which the pattern of a blend repeats, at most."""


def stream(seed: int, *key: int) -> np.random.SeedSequence:
    """The seed of a random stream of its own for `seed` and `key`, the same on every machine and numpy version."""
    return np.random.SeedSequence(seed % 2**64, spawn_key=key)


def window_count(tokens: int, seq_len: int, *, source: str = "data") -> int:
    """Number of samples in `tokens` tokens: (tokens - 1) // seq_len. Raises `Refused` (G301) where there is none."""
    if tokens <= seq_len:
        raise NO_SAMPLE.refuse(
            f"{counted(tokens, 'token')} do not hold one sample of {seq_len} + 1",
            (source, f"tokens = {tokens}"),
            ("workload", f"seq_len = {seq_len}"),
            hint=f"seq_len = {tokens - 1}" if tokens > 1 else "prepare more text",
        )
    return (tokens - 1) // seq_len


def samples_of_step(*, seed: int, step: int, global_batch: int, samples: int, first: int = 0) -> Ints:
    """The samples of `step` (from 0): int64[global_batch], each in [0, samples).

    Steps follow one another without gap: a batch may end one epoch and begin the next, and one larger
    than the data holds several epochs. Step 0 begins at place `first` of the stream, which is below 0 where
    smaller steps went before.
    """
    start = first + step * global_batch
    assert min(samples, global_batch, step + 1, start + 1) > 0, (samples, global_batch, step, first)
    places = np.arange(start, start + global_batch, dtype=np.int64)
    return samples_at(places, seed=seed, sizes=(samples,), weights=(1,))


def samples_at(places: Ints, *, seed: int, sizes: Sequence[int], weights: Sequence[int]) -> Ints:
    """The samples at `places` (ascending, from 0) of the endless stream: int64 of the same length.

    Part i has `sizes[i]` samples, numbered after those of the parts before it, and takes `weights[i]` of every
    sum(weights) places, evenly spread. Each part goes through epochs of its own.
    """
    pattern = _pattern(tuple(weights))
    rounds, place = np.divmod(places, len(pattern))
    out = np.empty(len(places), dtype=np.int64)
    first = 0
    for part, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        mine = pattern[place] == part
        before = np.cumsum(pattern == part) - 1
        out[mine] = first + _in_epochs(rounds[mine] * weight + before[place[mine]], seed=seed, part=part, samples=size)
        first += size
    return out


def whole_weights(weights: Sequence[float], *, source: str = "data.weights") -> tuple[int, ...]:
    """`weights` as the smallest whole numbers in the same proportion; decimals are taken as they are written.

    Raises `Refused` (G302) where these numbers are too large to be kept to exactly.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * scale) for fraction in exact]
    divisor = math.gcd(*whole)
    found = tuple(number // divisor for number in whole)
    if sum(found) > LONGEST_ROUND:
        shares = [round(weight / sum(weights), 4) for weight in weights]
        raise FINE_WEIGHTS.refuse(
            f"the weights repeat only after {counted(sum(found), 'sample')}, more than {LONGEST_ROUND}",
            (source, f"weights = {list(weights)}"),
            hint=f"weights = {shares}",
        )
    return found


@lru_cache(maxsize=8)
def _pattern(weights: tuple[int, ...]) -> Ints:
    """Which part takes each place of a round: weights[i] times part i, as evenly spread as they go."""
    part = np.repeat(np.arange(len(weights), dtype=np.int64), weights)
    nth = np.concatenate([np.arange(weight) for weight in weights])
    return part[np.argsort((2 * nth + 1) / np.repeat(weights, weights), kind="stable")]


def _in_epochs(places: Ints, *, seed: int, part: int, samples: int) -> Ints:
    """The samples at ascending `places` of one part, each epoch in an order of its own."""
    epochs = places // samples
    out = np.empty(len(places), dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        out[here] = shuffled(places[here] % samples, seed=seed, epoch=epoch, samples=samples, part=part)
    return out


def of_replica(samples: Ints, *, data_index: int, data: int, microbatch: int, microbatches: int) -> Ints:
    """The part of a global batch that replica `data_index` of `data` computes: int64[microbatches, microbatch].

    Microbatch i of all replicas together is a run of data x microbatch samples, so every factorisation
    of the global batch computes the same samples, and replicas share none.
    """
    assert len(samples) == data * microbatch * microbatches, (len(samples), data, microbatch, microbatches)
    assert 0 <= data_index < data, (data_index, data)
    return samples.reshape(microbatches, data, microbatch)[:, data_index]


def shuffled(places: Ints, *, seed: int, epoch: int, samples: int, part: int = 0, purpose: int = ORDER) -> Ints:
    """Where the permutation of (seed, purpose, epoch, part) over [0, samples) sends `places`; int64 of the same length.

    A Feistel network over the next even number of bits permutes without holding the permutation; a result
    beyond the end is permuted again until it lies inside (cycle walking; Black and Rogaway 2002).
    """
    half = max(1, (max(samples - 1, 1).bit_length() + 1) // 2)
    key = (purpose, epoch, part) if part else (purpose, epoch)
    keys = stream(seed, *key).generate_state(_ROUNDS, np.uint64).astype(np.uint64)
    out = _feistel(places.astype(np.uint64), half, keys)
    while (outside := out >= samples).any():
        out[outside] = _feistel(out[outside], half, keys)
    return out.astype(np.int64)


def _feistel(values: Words, half: int, keys: Words) -> Words:
    """One pass over values of 2 x half bits: a permutation of [0, 4^half), whatever the round function does."""
    bits, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & low
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) >> np.uint64(64 - half))
    return (left << bits) | right


def _mixed(values: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every input bit flips each output bit half the time."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
