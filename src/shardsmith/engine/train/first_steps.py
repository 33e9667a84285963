"""First-steps check: are the ranks fed as the plan says? Cheap, and done before the optimiser has moved anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from shardsmith.engine.dataset.batches import Batches, Microbatch, batch_digest
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.groups import Groups
from shardsmith.errors import Code
from shardsmith.units import counted

CHECKED_STEPS = 2
"""Steps from the start of a process whose batches are compared."""

SAME_SAMPLES = Code(
    code="G501",
    title="data ranks read the same samples",
    because="data ranks share a batch out among them; those that read the same samples learn nothing more",
)
OTHER_BATCH = Code(
    code="G502",
    title="ranks of one data rank have different batches",
    because="tensor, context and pipeline ranks compute parts of one and the same microbatch, not of several",
)


def check_batches(microbatches: Sequence[Microbatch], batches: Batches, groups: Groups, step: int) -> None:
    """Compare what the ranks are about to compute in `step` (from 0); every rank must call this.

    Raises `Refused` on all ranks concerned: G502 where tensor, context or pipeline ranks hold different tokens,
    labels, positions or documents, G501 where data ranks share a sample that the order draws once.
    """
    device = microbatches[0].tokens.device
    digest = torch.tensor([[batch_digest(microbatches)]], dtype=torch.int64, device=device)
    for group, axis in ((groups.tensor, "tensor"), (groups.context, "context"), (groups.forward, "pipeline")):
        _same(group.all_gather(digest, "batch digests")[:, 0].tolist(), group, axis, step)
    mine = torch.tensor([[i for m in microbatches for i in m.samples]], dtype=torch.int64, device=device)
    everyone = groups.data.all_gather(mine, "sample ids").tolist()
    if not batches.repeats(step):
        _disjoint(everyone, groups.data, step)


def _same(digests: list[int], group: Group, axis: str, step: int) -> None:
    if len(set(digests)) == 1:
        return
    usual = max(dict.fromkeys(digests), key=digests.count)
    odd = [rank for rank, digest in zip(group.ranks, digests, strict=True) if digest != usual]
    raise OTHER_BATCH.refuse(
        f"step {step + 1}: the {axis} ranks {_names(group.ranks)} should compute one batch, "
        f"but rank {_names(odd)} holds another",
        *((f"rank {rank}", f"batch {digest:014x}") for rank, digest in zip(group.ranks, digests, strict=True)),
        hint="the batch of a rank must depend on its data coordinate alone",
    )


def _disjoint(samples: list[list[int]], group: Group, step: int) -> None:
    holders = Counter(sample for row in samples for sample in set(row))
    shared = sorted(sample for sample, count in holders.items() if count > 1)
    if not shared:
        return
    ranks = [rank for rank, row in zip(group.ranks, samples, strict=True) if not set(shared).isdisjoint(row)]
    raise SAME_SAMPLES.refuse(
        f"step {step + 1}: the data ranks {_names(ranks)} share {counted(len(shared), 'sample')}, such as {shared[0]}",
        *((f"rank {rank}", f"samples {row[:8]}") for rank, row in zip(group.ranks, samples, strict=True)),
        hint="each data rank takes its own part of the global batch, by its data index",
    )


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
