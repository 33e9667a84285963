"""Numbered samples of one length, from a token file or made up: what batches are cut from. Needs no torch.

Shapes: S positions of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardsmith.engine.dataset.indexed import TokenFile, check_vocabulary
from shardsmith.engine.dataset.order import SYNTHETIC, stream, window_count
from shardsmith.engine.dataset.tokenizer import Tokenizer
from shardsmith.errors import raise_errors

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
