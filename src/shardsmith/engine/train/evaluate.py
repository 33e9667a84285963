"""Evaluation: the mean loss over held-out samples, by the plan's own ranks, leaving no trace in the training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardsmith.engine.dataset.batches import HeldOut
from shardsmith.engine.train.step import Trainer


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """`loss` is the mean over `tokens` targets, the same numbers on every rank."""

    loss: float
    tokens: int


def evaluate(trainer: Trainer, held_out: HeldOut) -> Evaluated:
    """Forward passes over all batches of `held_out`; every rank must call this, in every plan alike.

    Ranks add sums and counts, so samples and ranks may hold any number of targets. Parameters, optimiser,
    gradients and random state stay as they are.
    """
    for stage in trainer.stages.values():
        stage.eval()
    total, tokens = 0.0, 0
    for number in range(held_out.batches):
        loss, count = trainer.evaluate(trainer.move(held_out.batch(number, trainer.data_index)))
        total, tokens = total + loss, tokens + count
    for stage in trainer.stages.values():
        stage.train()
    mine = torch.tensor([total, float(tokens)], dtype=torch.float64, device=trainer.device)
    total, counted = trainer.groups.world.all_reduce(mine, "evaluation").tolist()
    return Evaluated(loss=total / max(1.0, counted), tokens=int(counted))
