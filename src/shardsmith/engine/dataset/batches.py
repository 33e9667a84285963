"""Batches of a training run: microbatches of tokens and labels, alike on all ranks that need the same.

Shapes: B sequences of a microbatch, S positions of a sequence.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardsmith.engine.dataset.order import of_replica, samples_of_step
from shardsmith.engine.dataset.samples import IGNORED as IGNORED
from shardsmith.engine.dataset.samples import Ints, Source
from shardsmith.engine.dataset.samples import Synthetic as Synthetic
from shardsmith.engine.dataset.samples import TokenWindows as TokenWindows
from shardsmith.engine.dataset.samples import open_source as open_source
from shardsmith.plan.batch import batching
from shardsmith.plan.setup import Setup


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
    run continues where the step number says.
    """

    source: Source
    seed: int
    data: int
    microbatch: int
    microbatches: int

    @property
    def global_batch(self) -> int:
        """Sequences of a step over all replicas."""
        return self.data * self.microbatch * self.microbatches

    def sample_ids(self, step: int, data_index: int) -> Ints:
        """Samples of a replica in a step: int64[microbatches, microbatch]. The epoch advances by itself."""
        batch = samples_of_step(seed=self.seed, step=step, global_batch=self.global_batch, samples=self.source.samples)
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
