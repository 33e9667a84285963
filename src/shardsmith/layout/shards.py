"""Which part of which tensor every rank holds: the axes composed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardsmith.layout.axes.data import Spread, States, data_rows, dense_spread, states
from shardsmith.layout.axes.expert import expert_shard, expert_shards, is_routed
from shardsmith.layout.axes.pipeline import has_tied_copies
from shardsmith.layout.axes.tensor import KEY_VALUE, kv_copies, tensor_shard
from shardsmith.layout.facts import Shard as Shard
from shardsmith.plan.mesh import Coord, expert_coord, expert_sizes, mesh_of
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import Stage, stages
from shardsmith.specs.model import ModelSpec, Role, Weight, weights

TIED = "embedding.weight"
"""The tensor that a tied model uses at both ends."""


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
    if is_routed(weight):
        return expert_shard(weight, plan, coord)
    copies = kv_copies(plan, model)
    if weight.role == "q" or weight.role in KEY_VALUE:
        heads, ranks = (model.heads, plan.tensor) if weight.role == "q" else (model.kv_heads, plan.tensor // copies)
        assert heads % ranks == 0, f"{weight.name} would split heads over tensor ranks"
    return tensor_shard(weight, plan.tensor, coord.tensor, plan.sequence_parallel, copies)


def spread_of(found: Shard, plan: Plan, coord: Coord) -> Spread:
    """Over which ranks ZeRO shards `found`, and which replicas hold the same rows: those of the mesh that cuts it."""
    if not found.expert:
        return dense_spread(plan, coord)
    sizes, ranks = expert_sizes(plan), expert_shards(plan)
    index = expert_coord(plan, coord).shard if plan.zero else 0
    return Spread(ranks=ranks, index=index, replicas=sizes.replicate * sizes.shard // ranks)


def data_shard(found: Shard, plan: Plan, coord: Coord) -> Shard:
    """The rows of the local part `found` that the rank at `coord` keeps under ZeRO; at level 0 all of them."""
    spread, dim = spread_of(found, plan, coord), found.zero_dim
    first, rows = data_rows(found.shape[dim], spread.ranks, spread.index)
    offsets, shape = list(found.offsets), list(found.shape)
    offsets[dim], shape[dim] = offsets[dim] + first, rows
    return replace(found, offsets=tuple(offsets), shape=tuple(shape))


def rows_first(found: Shard) -> tuple[int, ...]:
    """The shape of `found` with the dim that ZeRO cuts in front, as its rows are stored and travel."""
    rest = [size for dim, size in enumerate(found.shape) if dim != found.zero_dim]
    return (found.shape[found.zero_dim], *rest)


def stage_weights(setup: Setup, stage: Stage) -> tuple[Weight, ...]:
    """The full tensors that `stage` works with, in the order of its forward pass.

    Where the head is tied and stands on another stage than the embedding, `embedding.weight` comes last,
    as this stage's head: the one tensor that two stages hold.
    """
    own = _weights_by_layer(setup.model)
    first, last = _end_weights(setup.model, stage)
    return (*first, *(weight for layer in stage.layers for weight in own[layer]), *last)


def _end_weights(model: ModelSpec, stage: Stage) -> tuple[list[Weight], list[Weight]]:
    """What belongs to no layer: ahead of the stage's layers, and behind them."""
    every = _weights_by_layer(model)[None]
    first = [weight for weight in every if weight.role in ("embedding", "position")]
    last = [weight for weight in every if weight not in first] if stage.head else []
    if model.tied and stage.head and not stage.embedding:
        last += [weight for weight in first if weight.role == "embedding"]
    return (first if stage.embedding else []), last


@lru_cache(maxsize=32)
def _weights_by_layer(model: ModelSpec) -> Mapping[int | None, Sequence[Weight]]:
    """The model's tensors by their layer, those of the ends under None, in the order of the forward pass."""
    found: dict[int | None, list[Weight]] = {None: []}
    for weight in weights(model):
        found.setdefault(weight.layer, []).append(weight)
    return found


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
    found, known = [], dict[tuple[int, int, bool, bool], States]()
    every = stages(setup.plan, setup.model)
    sizes, tied = dict[Kind, tuple[int, int]](), has_tied_copies(setup, every)
    for stage in every:
        # Layers of a kind have the same shapes, so stages with as many of each hold the same bytes.
        sparse = sum(setup.model.is_sparse(layer) for layer in stage.layers)
        kind = (len(stage.layers), sparse, stage.embedding, stage.head)
        if kind not in known:
            known[kind] = _first_states(setup, stage, sizes, tied=tied)
        found.append(StageStates(stage=stage.index, pipeline_rank=stage.rank, states=known[kind]))
    return tuple(found)


Kind = tuple[Role, tuple[int, ...], bool]
"""Role, shape and bias of a tensor: what decides which part of it a rank holds."""


def _first_states(setup: Setup, stage: Stage, sizes: dict[Kind, tuple[int, int]], *, tied: bool) -> States:
    """States of `stage` on its first rank; `sizes` keeps what is held, before and after ZeRO, of a kind of tensor."""
    coord = Coord(pipeline=stage.rank, replicate=0, shard=0, context=0, tensor=0)
    held = {True: (0, 0), False: (0, 0)}
    # Layers of a kind have the same tensors: one stands for all of them.
    own, like = _weights_by_layer(setup.model), Counter(setup.model.is_sparse(layer) for layer in stage.layers)
    of_kind = {setup.model.is_sparse(layer): own[layer] for layer in stage.layers}
    counted = [(weight, 1) for part in _end_weights(setup.model, stage) for weight in part]
    counted += [(weight, like[sparse]) for sparse, found in of_kind.items() for weight in found]
    for weight, count in counted:
        kind = (weight.role, weight.shape, weight.bias)
        if kind not in sizes:
            local = shard(weight, setup.plan, setup.model, coord)
            sizes[kind] = (local.numel, data_shard(local, setup.plan, coord).numel)
        streams = not (tied and weight.name == TIED)
        whole, kept = held[streams]
        held[streams] = (whole + count * sizes[kind][0], kept + count * sizes[kind][1])
    total = States(weights=0, gradients=0, optimizer=0)
    for streams, (whole, kept) in held.items():
        total += states(setup, whole, 2, kept, streams=streams)
    return total


def rank_states(setup: Setup, rank: int, *, moments: int = 2) -> States:
    """Bytes that global `rank` keeps between steps, exactly; `moments` as in `states` (AdamW: 2)."""
    tied = has_tied_copies(setup, stages(setup.plan, setup.model))
    return _states(setup, local_shards(setup, rank), mesh_of(setup.plan).coord(rank), moments, tied=tied)


def _states(setup: Setup, held: Sequence[Held], coord: Coord, moments: int, *, tied: bool) -> States:
    """States of tensors on one rank; a tensor that two stages of the rank share stands there once.

    `tied` says that the embedding stands on two stages, and that its gradient waits for both.
    """
    by_name = {h.weight.name: h.shard for h in held}
    total = States(weights=0, gradients=0, optimizer=0)
    for streams in (True, False):
        found = [shard for name, shard in by_name.items() if (tied and name == TIED) is not streams]
        kept = sum(data_shard(shard, setup.plan, coord).numel for shard in found)
        total += states(setup, sum(shard.numel for shard in found), moments, kept, streams=streams)
    return total
