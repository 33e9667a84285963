"""torch's optimisers on this rank's parameters, with the model's own rule for weight decay."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import Weight


def make_optimizer(
    parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Weight], settings: Optimisation
) -> torch.optim.Optimizer:
    """AdamW or SGD over `parameters`; weight decay touches those whose `Weight.decay` says so."""
    groups = [
        {"params": [p for name, p in parameters.items() if weights[name].decay is decays], "weight_decay": decay}
        for decays, decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    groups = [g for g in groups if g["params"]]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
