"""The expert axis at work: tells every mixture of experts where its experts are, and balances their loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardsmith.engine.models.decoder import Stage
from shardsmith.engine.models.experts import MoE
from shardsmith.engine.runtime.dispatch import Placement
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.groups import Groups
from shardsmith.engine.runtime.routing import RoutingLog
from shardsmith.plan.plan import Plan
from shardsmith.specs.model import ModelSpec


def mixtures(stage: Stage) -> dict[int, MoE]:
    """The mixtures of experts of `stage`, by layer."""
    return {block.mlp.layer: block.mlp for block in stage.blocks() if isinstance(block.mlp, MoE)}


def attach(stage: Stage, plan: Plan, groups: Groups) -> None:
    """Place the experts of `stage`, whose parameters are already this rank's shards."""
    for moe in mixtures(stage).values():
        moe.placement = Placement(group=groups.dispatch, parts=plan.expert_tensor)
        moe.sequence = groups.sequence if groups.sequence.size > 1 else None
        moe.capacity_factor = plan.capacity_factor


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Routing of one step over all ranks: `loads` [layers with experts, experts] are choices of each expert.

    `aux_loss` and `z_loss` are means over layers and sequences, before their coefficients; the first is 1 where loads
    are even. `dropped` is the share of choices that found no room.
    """

    loads: Tensor
    aux_loss: float
    z_loss: float
    dropped: float

    @property
    def largest(self) -> float:
        """The load of the fullest expert of any layer, as a multiple of the mean of its layer."""
        return float((self.loads.amax(1) / self.loads.mean(1)).max())

    @property
    def smallest(self) -> float:
        """The load of the emptiest expert of any layer, as a multiple of the mean of its layer."""
        return float((self.loads.amin(1) / self.loads.mean(1)).min())


def gather_loads(log: RoutingLog, model: ModelSpec, sequences: int, world: Group, device: torch.device) -> Loads:
    """What all routers of a step of `sequences` sequences did, by one collective that every rank must join."""
    assert model.experts is not None, "only for models with experts"
    layers = [layer for layer in range(model.layers) if model.is_sparse(layer)]
    blank = torch.zeros(model.experts.count, dtype=torch.int64, device=device)
    rows = [log.layer_loads(layer) for layer in layers]
    losses = [log.losses[key] for key in sorted(log.losses)]
    sums = torch.stack(losses).sum(0) if losses else torch.zeros(3, dtype=torch.float64, device=device)
    mine = torch.cat([*(blank if row is None else row for row in rows), sums])
    total = world.all_reduce(mine, "expert_loads").cpu()
    loads = total[:-3].view(len(layers), -1)
    aux, z = (total[-3:-1] / (len(layers) * sequences)).tolist()
    return Loads(loads=loads, aux_loss=aux, z_loss=z, dropped=float(total[-1] / loads.sum().clamp(min=1.0)))


@torch.no_grad()
def balance(stages: Iterable[Stage], loads: Loads, model: ModelSpec) -> None:
    """Move each balancing bias by `bias_rate`: up for experts with less than the mean load, down for those with more.

    So the choice is balanced without a loss (Wang et al. 2024).
    """
    experts = model.experts
    assert experts is not None, "only for models with experts"
    first = next(layer for layer in range(model.layers) if model.is_sparse(layer))
    for stage in stages:
        for layer, moe in mixtures(stage).items():
            row = loads.loads[layer - first]
            step = (row.mean() - row).sign() * experts.bias_rate
            moe.router.balance.add_(step.to(moe.router.balance))


def biases(stages: Iterable[Stage]) -> Mapping[str, Tensor]:
    """The balancing biases of this rank's `stages`, by their global name."""
    return {name: buffer for stage in stages for name, buffer in stage.named_buffers() if name.endswith(".balance")}
