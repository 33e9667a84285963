"""torch's optimisers on this rank's parameters, with named rules for weight decay."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardsmith.specs.job import DecayRule, Optimisation
from shardsmith.specs.model import Weight

TABLES = ("embedding", "position", "head")
"""Roles of weights that are looked up or scored row by row; an output head is one, tied or not."""


def make_optimizer(
    parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Weight], settings: Optimisation
) -> torch.optim.Optimizer:
    """AdamW or SGD over `parameters`; weight decay touches those that `settings.weight_decay_on` names."""
    rule = settings.weight_decay_on
    groups = [
        {
            "params": [p for name, p in parameters.items() if decayed(weights[name], rule) is decays],
            "weight_decay": decay,
        }
        for decays, decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    groups = [g for g in groups if g["params"]]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def decayed(weight: Weight, rule: DecayRule) -> bool:
    """Whether weight decay touches `weight`; `matrices` is what the model says of each (`Weight.decay`)."""
    if rule == "all":
        return True
    return weight.decay and not (rule == "linear" and weight.role in TABLES)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Let the next step of `optimizer` use `rate` for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate
