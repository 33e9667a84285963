"""The tensor axis at work: fills the seams of a stage and sums the gradients that ranks hold in parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from shardsmith.engine.models.decoder import Stage, Table
from shardsmith.engine.models.experts import MoE
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.linear import Seam
from shardsmith.layout.facts import Shard
from shardsmith.plan.plan import Overlap


def attach(
    stage: Stage,
    shards: Mapping[str, Shard],
    group: Group,
    *,
    sequence_parallel: bool,
    overlap: Collection[Overlap] = (),
) -> None:
    """Fill the seams of `stage`, whose parameters are already this rank's shards.

    Without sequence parallelism blocks enter by `copy` and leave by `reduce`; with it they enter by
    `gather` and leave by `scatter`, and what lies between is split along the sequence. `overlap` says what the
    collectives of blocks are hidden behind; those of the head only behind its weight gradient.
    """
    if group.size == 1:
        return
    seam = Seam(
        group=group,
        enter="gather" if sequence_parallel else "copy",
        leave="scatter" if sequence_parallel else "reduce",
        overlap=frozenset(overlap),
    )
    for block in stage.blocks():
        block.attention.seam = block.mlp.seam = seam
        if isinstance(block.mlp, MoE) and block.mlp.spec.shared_ffn:
            block.mlp.shared.seam = seam
    stage.embedding_seam = Seam(group=group, leave=seam.leave, place="embedding")
    stage.head_seam = Seam(group=group, enter=seam.enter, place="head", overlap=seam.overlap & {"weight_gradient"})
    for name, module in stage.named_modules():
        if isinstance(module, Table) and name != "position":
            module.first, module.split = shards[f"{name}.weight"].offsets[0], True


def sum_partial_gradients(gradients: Sequence[Tensor], group: Group, purpose: str) -> None:
    """Sum, over the ranks of `group`, gradients of parameters that they all hold and each computed a part of.

    `partial_gradients` over all tensor ranks: each saw a part of the sequence, or has heads of its own behind a
    norm that all heads share. `kv_copies` over ranks with the same key/value heads: each has its own query heads.
    One collective a step for all of them (cases A20, A22); replicas stay bitwise equal as all ranks get one result.
    """
    if group.size == 1 or not any(g.numel() for g in gradients):
        return
    flat = torch.cat([g.reshape(-1) for g in gradients])
    group.all_reduce(flat, purpose)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
