"""The whole model in one process: the reference of parity, and what samples text."""

from __future__ import annotations

import torch

from shardsmith.engine.models.decoder import Stage
from shardsmith.engine.models.experts import MoE
from shardsmith.engine.models.initialise import materialise, whole
from shardsmith.plan.stages import Stage as StageSpec
from shardsmith.specs.model import ModelSpec, weights


def whole_model(
    model: ModelSpec, *, seed: int, dtype: torch.dtype, device: torch.device, capacity_factor: float | None = None
) -> Stage:
    """The full model as one stage, with the initial weights that `seed` gives to every layout.

    `capacity_factor` limits the tokens of an expert, as in a Plan.
    """
    spec = StageSpec(index=0, rank=0, layers=tuple(range(model.layers)), embedding=True, head=True)
    with torch.device("meta"):
        module = Stage(model, spec)
    shards = {w.name: whole(w) for w in weights(model)}
    materialise(module, weights(model), shards, seed=seed, dtype=dtype, device=device)
    for block in module.blocks():
        if isinstance(block.mlp, MoE):
            block.mlp.capacity_factor = capacity_factor
    return module
