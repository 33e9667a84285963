"""Batches of a training run: microbatches of tokens and labels, alike on all ranks that need the same.

Shapes: B sequences of a microbatch, S positions of a sequence.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardsmith.engine.dataset.indexed import TokenFile, check_vocabulary
from shardsmith.engine.dataset.order import SYNTHETIC, of_replica, samples_of_step, stream, window_count
from shardsmith.engine.dataset.tokenizer import Tokenizer
from shardsmith.errors import raise_errors
from shardsmith.plan.batch import batching
from shardsmith.plan.setup import Setup

Ints = npt.NDArray[np.int64]

IGNORED = -100
"""Label of a position that has no target."""

SYNTHETIC_SAMPLES = 2**30
"""Samples of a synthetic source unless said otherwise: more than any run reads, none of them stored."""


class Source(Protocol):
    """Numbered samples of one length: all that a batch is made of."""

    @property
    def samples(self) -> int:
        """Number of samples."""

    @property
    def seq_len(self) -> int:
        """Positions of a sample (S)."""

    def sample(self, index: int) -> tuple[Ints, Ints]:
        """Tokens [S] and labels [S]: at each position the next token, or `IGNORED`."""


@dataclass(frozen=True, kw_only=True)
class TokenWindows:
    """Windows of a token file: sample i holds the tokens [i S, i S + S], the last one only as a label."""

    file: TokenFile
    seq_len: int
    samples: int

    def sample(self, index: int) -> tuple[Ints, Ints]:
        """Tokens and labels, shifted here on the whole sequence, before any axis splits it."""
        assert 0 <= index < self.samples, (index, self.samples)
        window = self.file.tokens(index * self.seq_len, (index + 1) * self.seq_len + 1)
        return window[:-1], window[1:]


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Random tokens in [0, vocab): sample i is a function of (seed, i).

    Of sample i, a share of the labels drawn evenly from [0, `ignored`) is `IGNORED`, so ranks count different
    numbers of targets. Each sample keeps at least one target.
    """

    seed: int
    vocab: int
    seq_len: int
    samples: int = SYNTHETIC_SAMPLES
    ignored: float = 0.0

    def __post_init__(self) -> None:
        assert 0.0 <= self.ignored <= 1.0, f"ignored is a share, not {self.ignored}"

    def sample(self, index: int) -> tuple[Ints, Ints]:
        """Tokens and labels, shifted here on the whole sequence, before any axis splits it."""
        assert 0 <= index < self.samples, (index, self.samples)
        bits = np.random.Philox(stream(self.seed, SYNTHETIC, index))
        window = (bits.random_raw(self.seq_len + 1) % np.uint64(self.vocab)).astype(np.int64)
        labels = window[1:].copy()
        share = self.ignored * int(bits.random_raw()) / 2**64
        without = np.argsort(bits.random_raw(self.seq_len), kind="stable")[: int(share * self.seq_len)]
        labels[without] = IGNORED
        return window[:-1], labels


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """What one pass of a replica works on; tokens and labels travel together under one `index`.

    `samples` are the numbers of its sequences in the data. On the CPU until the engine moves it.
    """

    index: int
    samples: tuple[int, ...]
    tokens: Tensor
    """int64 [B, S]"""
    labels: Tensor
    """int64 [B, S]: the next token, or -100 where none counts"""
    positions: Tensor
    """int64 [S]: place of each token in its full sequence, carried along when the sequence is split"""


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of a run: what replica `data_index` computes in a step depends on (seed, step) and the plan alone.

    All ranks of a replica get equal batches without talking; nothing is kept between steps, so a resumed
    run continues where the step number says. Step 0 begins at place `first` of the stream of samples, which is
    not 0 where a run goes on with another global batch.
    """

    source: Source
    seed: int
    data: int
    microbatch: int
    microbatches: int
    first: int = 0

    @property
    def global_batch(self) -> int:
        """Sequences of a step over all replicas."""
        return self.data * self.microbatch * self.microbatches

    def consumed(self, step: int) -> int:
        """Place in the stream of samples at which `step` begins: what all steps before it have consumed."""
        return self.first + step * self.global_batch

    def continuing(self, step: int, consumed: int) -> Batches:
        """The same data cut so that `step` begins at place `consumed`, whatever the steps before it took."""
        return replace(self, first=consumed - step * self.global_batch)

    def sample_ids(self, step: int, data_index: int) -> Ints:
        """Samples of a replica in a step: int64[microbatches, microbatch]. The epoch advances by itself."""
        batch = samples_of_step(
            seed=self.seed,
            step=step,
            global_batch=self.global_batch,
            samples=self.source.samples,
            first=self.first,
        )
        return of_replica(
            batch,
            data_index=data_index,
            data=self.data,
            microbatch=self.microbatch,
            microbatches=self.microbatches,
        )

    def batch(self, step: int, data_index: int) -> list[Microbatch]:
        """The microbatches of a replica in a step (both from 0), in order."""
        return [self._microbatch(index, ids) for index, ids in enumerate(self.sample_ids(step, data_index))]

    def _microbatch(self, index: int, ids: Ints) -> Microbatch:
        rows = [self.source.sample(int(i)) for i in ids]
        return Microbatch(
            index=index,
            samples=tuple(int(i) for i in ids),
            tokens=torch.from_numpy(np.stack([tokens for tokens, _ in rows])),
            labels=torch.from_numpy(np.stack([labels for _, labels in rows])),
            positions=torch.arange(self.source.seq_len),
        )


def open_source(
    path: str | Path, *, seed: int, vocab: int, seq_len: int, tokenizer: Tokenizer | None = None
) -> TokenWindows | Synthetic:
    """The samples that a job's `data.path` names: a token file, or `synthetic` random tokens.

    Checked before the run: every id and the tokenizer fit the model's `vocab`, and there is at least one
    sample. Raises `Refused` (G201 to G205, G301).
    """
    if str(path) == "synthetic":
        raise_errors(check_vocabulary(file=None, tokenizer=tokenizer, vocab=vocab))
        return Synthetic(seed=seed, vocab=vocab, seq_len=seq_len)
    file = TokenFile(path)
    raise_errors(check_vocabulary(file=file, tokenizer=tokenizer, vocab=vocab))
    return TokenWindows(file=file, seq_len=seq_len, samples=window_count(len(file), seq_len, source=str(file.prefix)))


def batches_of(source: Source, *, seed: int, setup: Setup) -> Batches:
    """The batches of `source` as the plan and workload of `setup` cut them. Raises `Refused` (B201, B202)."""
    cut = batching(setup.plan, setup.workload)
    return Batches(
        source=source,
        seed=seed,
        data=setup.plan.data,
        microbatch=cut.microbatch,
        microbatches=cut.microbatches,
    )


def batch_digest(microbatch: Microbatch) -> int:
    """A hash of tokens and labels in [0, 2^56): equal on ranks that hold the same microbatch, cheap to compare."""
    digest = hashlib.blake2b(digest_size=7)
    for tensor in (microbatch.tokens, microbatch.labels):
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")
