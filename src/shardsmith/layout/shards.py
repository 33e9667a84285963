"""Which part of which tensor every rank holds: the axes composed."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardsmith.layout.axes.data import States, data_rows, shard_ranks, states
from shardsmith.layout.axes.tensor import tensor_shard
from shardsmith.layout.facts import Shard as Shard
from shardsmith.plan.mesh import Coord, mesh_of
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import Stage, stages
from shardsmith.specs.model import ModelSpec, Weight, weights


@dataclass(frozen=True, kw_only=True)
class Held:
    """One tensor of one stage on one rank: the full `weight`, and the `shard` of it that the rank holds."""

    stage: int
    weight: Weight
    shard: Shard


@dataclass(frozen=True, kw_only=True)
class StageStates:
    """What a rank of global `stage` (on `pipeline_rank`) keeps between steps, in bytes."""

    stage: int
    pipeline_rank: int
    states: States


def shard(weight: Weight, plan: Plan, model: ModelSpec, coord: Coord) -> Shard:
    """The part of the full tensor `weight` of `model` that the rank at `coord` holds, if its stage has it."""
    for role, heads in (("q", model.heads), ("k", model.kv_heads), ("v", model.kv_heads)):
        assert weight.role != role or heads % plan.tensor == 0, f"{weight.name} would split heads over tensor ranks"
    return tensor_shard(weight, plan.tensor, coord.tensor, plan.sequence_parallel)


def stage_weights(setup: Setup, stage: Stage) -> tuple[Weight, ...]:
    """The full tensors that `stage` works with, in the order of its forward pass.

    Where the head is tied and stands on another stage than the embedding, `embedding.weight` comes last,
    as this stage's head: the one tensor that two stages hold.
    """
    found = []
    for weight in weights(setup.model):
        if weight.layer is not None:
            here = weight.layer in stage.layers
        else:
            here = stage.embedding if weight.role in ("embedding", "position") else stage.head
        if here:
            found.append(weight)
        elif setup.model.tied and stage.head and weight.role == "embedding":
            tied = weight
    if setup.model.tied and stage.head and not stage.embedding:
        found.append(tied)
    return tuple(found)


def local_shards(setup: Setup, rank: int) -> tuple[Held, ...]:
    """Everything that global `rank` holds, stage by stage in the order of the forward pass."""
    coord = mesh_of(setup.plan).coord(rank)
    own = [stage for stage in stages(setup.plan, setup.model) if stage.rank == coord.pipeline]
    return tuple(held for stage in own for held in stage_shards(setup, stage, coord))


def stage_shards(setup: Setup, stage: Stage, coord: Coord) -> tuple[Held, ...]:
    """What the rank at `coord` holds of `stage`, in the order of its forward pass."""
    found = stage_weights(setup, stage)
    plan, model = setup.plan, setup.model
    return tuple(Held(stage=stage.index, weight=w, shard=shard(w, plan, model, coord)) for w in found)


def stage_states(setup: Setup) -> tuple[StageStates, ...]:
    """Bytes of weights, gradients and AdamW state of each stage, on its fullest rank (the first)."""
    found = []
    for stage in stages(setup.plan, setup.model):
        coord = Coord(pipeline=stage.rank, replicate=0, shard=0, context=0, tensor=0)
        shapes = [held.shard.shape for held in stage_shards(setup, stage, coord)]
        parameters, ranks = sum(prod(shape) for shape in shapes), shard_ranks(setup.plan)
        kept = sum(data_rows(shape[0], ranks, 0)[1] * prod(shape[1:]) for shape in shapes)
        here = states(setup, parameters, kept=kept)
        found.append(StageStates(stage=stage.index, pipeline_rank=stage.rank, states=here))
    return tuple(found)
