"""Samples: tokens with their targets, cut from token files by windows or by whole documents, or drawn at random.

Shapes: S positions of a sample. Targets are shifted here, on the whole sequence, before any axis splits it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardsmith.engine.dataset.indexed import TokenFile
from shardsmith.engine.dataset.order import SYNTHETIC, stream, window_count

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

IGNORED = -100
"""Label of a position that has no target."""

PADDING = 0
"""Id that fills a sample behind its last document; attention and loss never meet it, so any id does."""

SYNTHETIC_SAMPLES = 2**30
"""Samples of a synthetic source unless said otherwise: more than any run reads, none of them stored."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sequence: `tokens` [S], `labels` [S] (the next token, or `IGNORED`), `documents` [S].

    Equal numbers in `documents` mean the same document; None: attention does not care where documents end.
    """

    tokens: Ints
    labels: Ints
    documents: Ints | None = None


class Source(Protocol):
    """Numbered samples of one length: all that a batch is made of."""

    @property
    def samples(self) -> int:
        """Number of samples."""

    @property
    def seq_len(self) -> int:
        """Positions of a sample (S)."""

    def sample(self, index: int) -> Sample:
        """The sample of that number."""


def next_tokens(tokens: Ints, documents: Ints | None = None, counted: Flags | None = None) -> Ints:
    """Labels of all `tokens` but the last: the next one, `IGNORED` where it is another document's or not counted."""
    labels = tokens[1:].copy()
    if documents is not None:
        labels[documents[1:] != documents[:-1]] = IGNORED
    if counted is not None:
        labels[~counted[1:]] = IGNORED
    return labels


def positions_in(documents: Ints) -> Ints:
    """The place of each token in its document, for documents [..., S] that stand in runs: 0, 1, 2, 0, 1, ..."""
    place = np.broadcast_to(np.arange(documents.shape[-1], dtype=np.int64), documents.shape)
    begins = np.ones(documents.shape, dtype=bool)
    begins[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return place - np.maximum.accumulate(np.where(begins, place, 0), axis=-1)


class Documents:
    """Some documents of a token file (default: all), joined end to end as if the others were not there.

    `borders` [documents + 1] says where each begins, counted in the joined tokens.
    """

    def __init__(self, file: TokenFile, chosen: Ints | None = None) -> None:
        self.file = file
        chosen = np.arange(file.documents, dtype=np.int64) if chosen is None else chosen
        lengths = np.diff(file.boundaries)[chosen]
        chosen, lengths = chosen[lengths > 0], lengths[lengths > 0]
        self.borders: Ints = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        # Neighbours in the file are read at once: runs begin where a chosen document does not follow the one before.
        first = np.flatnonzero(np.diff(chosen, prepend=-2) != 1)
        self._starts, self._runs = file.boundaries[chosen[first]], self.borders[first]

    def __len__(self) -> int:
        return int(self.borders[-1])

    def tokens(self, start: int, stop: int) -> Ints:
        """The joined ids [start, stop); int64."""
        return np.concatenate([self.file.tokens(a, b) for a, b in self._spans(start, stop)])

    def counted(self, start: int, stop: int) -> Flags | None:
        """Which of the joined tokens [start, stop) are targets; None: all."""
        if not self.file.masked:
            return None
        return np.concatenate([self.file.counted(a, b) for a, b in self._spans(start, stop)])

    def numbers(self, start: int, stop: int) -> Ints:
        """The document of each of the joined tokens [start, stop), counted from 0 at the first of them."""
        at: Ints = np.searchsorted(self.borders, np.arange(start, stop), side="right").astype(np.int64)
        numbers: Ints = at - at[0]
        return numbers

    def _spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The ranges of the file that hold the joined tokens [start, stop)."""
        out = []
        run = int(np.searchsorted(self._runs, start, side="right")) - 1
        while start < stop:
            end = int(self._runs[run + 1]) if run + 1 < len(self._runs) else len(self)
            upto = min(stop, end)
            offset = int(self._starts[run] - self._runs[run])
            out.append((start + offset, upto + offset))
            start, run = upto, run + 1
        return out


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows over joined documents: sample i holds the tokens [i S, i S + S], the last one only as a label.

    `masked`: documents inside a window do not see each other, and what a window cuts off goes on as a new one.
    """

    documents: Documents
    seq_len: int
    samples: int
    masked: bool = False

    def sample(self, index: int) -> Sample:
        """See `Source`."""
        assert 0 <= index < self.samples, (index, self.samples)
        place = (index * self.seq_len, (index + 1) * self.seq_len + 1)
        tokens, counted = self.documents.tokens(*place), self.documents.counted(*place)
        if not self.masked:
            return Sample(tokens=tokens[:-1], labels=next_tokens(tokens, counted=counted))
        numbers = self.documents.numbers(*place)
        return Sample(tokens=tokens[:-1], labels=next_tokens(tokens, numbers, counted), documents=numbers[:-1])


class WholeDocuments:
    """Samples that hold documents whole, as many as fit; only what is longer than a sample is cut.

    Documents are packed by best fit, longest first, so little is padding. Padding is a document of its own
    without targets. The same file and length give the same samples.
    """

    def __init__(self, documents: Documents, seq_len: int) -> None:
        self.documents, self.seq_len = documents, seq_len
        whole = np.diff(documents.borders)
        # The last token of a document is nobody's input where it would stand alone behind a cut.
        count = np.maximum(1, -(-(whole - 1) // seq_len))
        owner = np.repeat(np.arange(len(whole)), count)
        nth = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        self._starts: Ints = documents.borders[owner] + nth * seq_len
        self._ends: Ints = documents.borders[owner + 1]
        self._lengths: Ints = np.minimum(seq_len, self._ends - self._starts)
        bins = best_fit(self._lengths, seq_len)
        self._order: Ints = np.argsort(bins, kind="stable")
        self._first: Ints = np.searchsorted(bins[self._order], np.arange(int(bins.max()) + 2))
        self.samples = len(self._first) - 1

    def sample(self, index: int) -> Sample:
        """See `Source`."""
        tokens = np.full(self.seq_len, PADDING, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORED, dtype=np.int64)
        numbers = np.zeros(self.seq_len, dtype=np.int64)
        at = 0
        for number, piece in enumerate(self._order[self._first[index] : self._first[index + 1]].tolist()):
            start, length = int(self._starts[piece]), int(self._lengths[piece])
            # One token more than the piece, where the document goes on, is the label of its last position.
            stop = min(start + length + 1, int(self._ends[piece]))
            read = self.documents.tokens(start, stop)
            targets = next_tokens(read, counted=self.documents.counted(start, stop))
            tokens[at : at + length] = read[:length]
            labels[at : at + len(targets)] = targets
            numbers[at:] = number
            at += length
        numbers[at:] += 1
        return Sample(tokens=tokens, labels=labels, documents=numbers)


def best_fit(lengths: Ints, room: int) -> Ints:
    """The bin of each item, int64: longest item first, each into the fullest bin of size `room` that still holds it.

    Best fit decreasing (Johnson 1974); used for documents by Ding et al. 2024. Bins are numbered as they are opened.
    """
    assert int(lengths.max()) <= room, "an item is larger than a bin"
    out = np.empty(len(lengths), dtype=np.int64)
    bins, spaces = 0, list[int]()
    with_space: dict[int, list[int]] = {}
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        at = bisect_left(spaces, length)
        if at == len(spaces):
            space, chosen, bins = room, bins, bins + 1
        else:
            space = spaces[at]
            chosen = with_space[space].pop()
            if not with_space[space]:
                del spaces[at], with_space[space]
        out[item] = chosen
        left = space - length
        if left:
            if left not in with_space:
                insort(spaces, left)
                with_space[left] = []
            with_space[left].append(chosen)
    return out


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Random tokens in [0, vocab): sample i is a function of (seed, `first` + i).

    Of sample i, a share of the labels drawn evenly from [0, `ignored`) is `IGNORED`, so ranks count different
    numbers of targets. `packed` cuts it into up to 4 documents of random lengths. Each sample keeps a target.
    """

    seed: int
    vocab: int
    seq_len: int
    samples: int = SYNTHETIC_SAMPLES
    first: int = 0
    ignored: float = 0.0
    packed: bool = False

    def __post_init__(self) -> None:
        assert 0.0 <= self.ignored <= 1.0, f"ignored is a share, not {self.ignored}"

    def sample(self, index: int) -> Sample:
        """See `Source`."""
        assert 0 <= index < self.samples, (index, self.samples)
        bits = np.random.Philox(stream(self.seed, SYNTHETIC, self.first + index))
        window = (bits.random_raw(self.seq_len + 1) % np.uint64(self.vocab)).astype(np.int64)
        labels = window[1:].copy()
        share = self.ignored * int(bits.random_raw()) / 2**64
        without = np.argsort(bits.random_raw(self.seq_len), kind="stable")[: int(share * self.seq_len)]
        labels[without] = IGNORED
        if not self.packed:
            return Sample(tokens=window[:-1], labels=labels)
        cuts = (bits.random_raw(3) % np.uint64(self.seq_len)).astype(np.int64)
        numbers = np.searchsorted(np.sort(cuts), np.arange(self.seq_len), side="right").astype(np.int64)
        last = np.flatnonzero(np.diff(numbers))
        labels[last] = IGNORED
        if (labels == IGNORED).all():
            labels[-1] = window[-1]
        return Sample(tokens=window[:-1], labels=labels, documents=numbers)


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Several sources as one: the samples of each are numbered after those of the ones before.

    `weights` are whole numbers that say how often each is drawn, in exactly that proportion
    (`order.samples_at`); None: all samples alike.
    """

    parts: tuple[Source, ...]
    weights: tuple[int, ...] | None = None

    @property
    def samples(self) -> int:
        """Number of samples of all parts."""
        return sum(part.samples for part in self.parts)

    @property
    def seq_len(self) -> int:
        """Positions of a sample (S)."""
        return self.parts[0].seq_len

    def sample(self, index: int) -> Sample:
        """See `Source`."""
        for part in self.parts:
            if index < part.samples:
                return part.sample(index)
            index -= part.samples
        raise IndexError(f"sample {index} beyond the last")


def sizes_and_weights(source: Source) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Number of samples of each part of `source` that is drawn from on its own, and how often it is drawn."""
    if isinstance(source, Blend) and source.weights is not None:
        return tuple(part.samples for part in source.parts), source.weights
    return (source.samples,), (1,)


def cut(documents: Documents, *, packing: str, seq_len: int) -> Source:
    """The samples of `documents` as `[data] packing` cuts them. Raises `Refused` (G301) where there is none."""
    source = str(documents.file.prefix)
    if packing == "whole":
        return WholeDocuments(documents, seq_len)
    samples = window_count(len(documents), seq_len, source=source)
    return Windows(documents=documents, seq_len=seq_len, samples=samples, masked=packing == "masked")


def joined(sources: Sequence[Source]) -> Source:
    """All samples of `sources`, each alike."""
    return sources[0] if len(sources) == 1 else Blend(parts=tuple(sources))
