"""Batches of a training run: microbatches of tokens and labels, alike on all ranks that need the same.

Shapes: B sequences of a microbatch, S positions of a sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardsmith.engine.dataset.order import EVALUATION, of_replica, samples_at, shuffled
from shardsmith.engine.dataset.samples import IGNORED as IGNORED
from shardsmith.engine.dataset.samples import PADDING, Sample, Source, positions_in, sizes_and_weights
from shardsmith.engine.dataset.samples import Synthetic as Synthetic
from shardsmith.plan.batch import batching
from shardsmith.plan.setup import Setup

Ints = npt.NDArray[np.int64]

NO_SAMPLE = -1
"""Number of a sequence that only fills a batch: it has no target."""


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
    """int64 [B or 1, S]: place of each token in its document, carried along when the sequence is split"""
    documents: Tensor | None = None
    """int64 [B, S]: equal numbers, in runs, mean the same document; None: a sequence is one document. They stay whole
    when the sequence is split."""

    @property
    def targets(self) -> int:
        """Number of positions that have a target."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> Microbatch:
        """The same microbatch on `device`."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            labels=self.labels.to(device),
            positions=self.positions.to(device),
            documents=None if self.documents is None else self.documents.to(device),
        )


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of a run: what replica `data_index` computes in a step depends on (seed, step) and the plan alone.

    All ranks of a replica get equal batches without talking; nothing is kept between steps, so a resumed
    run continues where the step number says. The stream of samples has no end, so no rank is ever left
    without a batch. Step 0 begins at place `first` of that stream, which is not 0 where a run goes on with another
    global batch.
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

    def global_ids(self, step: int) -> Ints:
        """Samples of a step over all replicas: int64[global_batch]. Epochs advance by themselves."""
        places = np.arange(self.consumed(step), self.consumed(step + 1), dtype=np.int64)
        sizes, weights = sizes_and_weights(self.source)
        return samples_at(places, seed=self.seed, sizes=sizes, weights=weights)

    def sample_ids(self, step: int, data_index: int) -> Ints:
        """Samples of a replica in a step: int64[microbatches, microbatch]."""
        return of_replica(
            self.global_ids(step),
            data_index=data_index,
            data=self.data,
            microbatch=self.microbatch,
            microbatches=self.microbatches,
        )

    def repeats(self, step: int) -> bool:
        """Whether a step draws a sample twice: where epochs meet, or the data are smaller than a batch."""
        return len(np.unique(self.global_ids(step))) < self.global_batch

    def batch(self, step: int, data_index: int) -> list[Microbatch]:
        """The microbatches of a replica in a step (both from 0), in order."""
        return [microbatch_of(self.source, i, ids) for i, ids in enumerate(self.sample_ids(step, data_index))]


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Batches of an evaluation: the same samples every time, each once, on every plan.

    `most` bounds the number of batches (0: all samples). All replicas have equally many batches; the last one
    is filled with sequences without targets.
    """

    source: Source
    seed: int
    data: int
    microbatch: int
    microbatches: int
    most: int = 0

    @property
    def batches(self) -> int:
        """Number of global batches."""
        needed = -(-self.source.samples // (self.data * self.microbatch * self.microbatches))
        return min(needed, self.most) if self.most else needed

    def batch(self, number: int, data_index: int) -> list[Microbatch]:
        """The microbatches of a replica in batch `number` (from 0), in order."""
        size, samples = self.data * self.microbatch * self.microbatches, self.source.samples
        places = np.arange(number * size, (number + 1) * size, dtype=np.int64)
        ids = np.full(size, NO_SAMPLE, dtype=np.int64)
        real = places < samples
        ids[real] = shuffled(places[real], seed=self.seed, epoch=0, samples=samples, purpose=EVALUATION)
        mine = of_replica(
            ids, data_index=data_index, data=self.data, microbatch=self.microbatch, microbatches=self.microbatches
        )
        return [microbatch_of(self.source, i, row) for i, row in enumerate(mine)]


def microbatch_of(source: Source, index: int, ids: Ints) -> Microbatch:
    """The samples `ids` of `source` as microbatch `index`; `NO_SAMPLE` stands for a sequence without targets."""
    rows = [_filler(source.seq_len) if i == NO_SAMPLE else source.sample(i) for i in ids.tolist()]
    documents = None
    positions = np.arange(source.seq_len, dtype=np.int64)[None]
    if any(row.documents is not None for row in rows):
        whole = np.zeros(source.seq_len, dtype=np.int64)
        numbers = np.stack([whole if row.documents is None else row.documents for row in rows])
        documents, positions = torch.from_numpy(numbers), positions_in(numbers)
    return Microbatch(
        index=index,
        samples=tuple(ids.tolist()),
        tokens=torch.from_numpy(np.stack([row.tokens for row in rows])),
        labels=torch.from_numpy(np.stack([row.labels for row in rows])),
        positions=torch.from_numpy(positions),
        documents=documents,
    )


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


def held_out_of(source: Source, *, seed: int, setup: Setup, most: int = 0) -> HeldOut:
    """The evaluation batches of `source`, as large as those of the training of `setup`."""
    cut = batching(setup.plan, setup.workload)
    return HeldOut(
        source=source,
        seed=seed,
        data=setup.plan.data,
        microbatch=cut.microbatch,
        microbatches=cut.microbatches,
        most=most,
    )


def batch_digest(microbatches: Sequence[Microbatch]) -> int:
    """A hash of all that a replica computes on, in [0, 2^56): equal on ranks that hold the same, cheap to compare."""
    digest = hashlib.blake2b(digest_size=7)
    for m in microbatches:
        for tensor in (m.tokens, m.labels, m.positions, m.documents):
            if tensor is not None:
                digest.update(repr(tuple(tensor.shape)).encode())
                digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def _filler(length: int) -> Sample:
    return Sample(
        tokens=np.full(length, PADDING, dtype=np.int64), labels=np.full(length, IGNORED, dtype=np.int64), documents=None
    )
