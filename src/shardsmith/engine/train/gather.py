"""Bring what ranks hold together on rank 0: full tensors from shards, timelines from spans."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardsmith.engine.train.step import Trainer
from shardsmith.specs.model import stored_weights
from shardsmith.timeline import Timeline


def full_parameters(trainer: Trainer) -> dict[str, Tensor] | None:
    """All full tensors on rank 0's CPU, None elsewhere; every rank must call this.

    Meant for models that one host can hold: everything passes through rank 0.
    """
    mine = {
        name: (held.offsets, held.placed(held.parameter.detach()).cpu())
        for name, held in trainer.held().items()
        if trainer.owns(name)
    }
    if trainer.owns_biases:
        mine |= {name: ((0,), bias.cpu()) for name, bias in trainer.biases().items()}
    parts = gather_objects(mine)
    if parts is None:
        return None
    full = {}
    for weight in stored_weights(trainer.setup.model):
        dtype = next(part[weight.name][1].dtype for part in parts if weight.name in part)
        tensor = torch.empty(weight.shape, dtype=dtype)
        filled = 0
        for part in parts:
            if weight.name in part:
                offsets, local = part[weight.name]
                tensor[tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))] = local
                filled += local.numel()
        assert filled == weight.numel, f"{weight.name}: ranks own {filled} of {weight.numel} elements"
        full[weight.name] = tensor
    return full


def measured_timeline(trainer: Trainer, notes: tuple[str, ...]) -> Timeline | None:
    """The spans of all ranks since the recorder was cleared, on rank 0; every rank must call this."""
    parts = gather_objects(trainer.recorder.spans)
    if parts is None:
        return None
    spans = sorted((span for part in parts for span in part), key=lambda s: (s.rank, s.start))
    return Timeline(origin="measured", spans=tuple(spans), notes=notes)


def gather_objects(mine: Any) -> list[Any] | None:
    """`mine` of every rank, by rank, on rank 0; None elsewhere."""
    if not dist.is_initialized():
        return [mine]
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, parts, dst=0)
    return parts
