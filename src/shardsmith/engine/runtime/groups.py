"""The process groups of a mesh, as this rank sees them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.plan.mesh import DATA, Mesh, expert_groups
from shardsmith.plan.plan import Plan
from shardsmith.timeline import LaneKind


@dataclass(frozen=True, kw_only=True)
class Groups:
    """One group an axis; the pipeline has one communicator a direction; `tied` joins the two ends of it.

    `data` is replicate x shard; `alone` is this rank by itself, on the data axis.
    `kv_copy` are the tensor ranks that hold the same key/value heads as this one. `context` is ring x ulysses.
    Weights are whole over context ranks: `gradient` is data x context, of which `shard` is the part over which ZeRO
    shards, shard x context. On the expert mesh `dispatch` are the ranks that hold the experts of one replica,
    `expert_data` those that hold the same part of the same experts, of which `expert_shard` are those of one replica.
    `sequence` are the ranks that hold parts of the same sequences.
    """

    world: Group
    tensor: Group
    kv_copy: Group
    context: Group
    ring: Group
    ulysses: Group
    data: Group
    gradient: Group
    replicate: Group
    shard: Group
    alone: Group
    forward: Group
    backward: Group
    tied: Group
    dispatch: Group
    expert_data: Group
    expert_shard: Group
    sequence: Group


def make_groups(
    mesh: Mesh,
    rank: int,
    recorder: Recorder,
    *,
    ends: tuple[int, int],
    kv_copies: int,
    experts: Plan | None = None,
    ulysses: int = 1,
    timeout_s: float,
) -> Groups:
    """Build all groups; every rank of the world must call this with the same mesh, and returns when all have.

    `ends` are the pipeline ranks of the first and the last stage, which share a tied embedding; `kv_copies`
    tensor ranks in a row share their key/value heads, `ulysses` context ranks in a row exchange heads for sequence.
    `experts` is the plan of a model that has any.
    """

    def along(axis: LaneKind, all_ranks: tuple[tuple[int, ...], ...]) -> Group:
        mine: Group | None = None
        for ranks in all_ranks:
            assert list(ranks) == sorted(ranks), f"torch numbers the ranks of a group upwards, not as {ranks}"
            handle = None
            if len(ranks) > 1:
                handle = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
            if rank in ranks:
                mine = Group(axis=axis, ranks=ranks, index=ranks.index(rank), recorder=recorder, handle=handle)
        return mine or Group(axis=axis, ranks=(rank,), index=0, recorder=recorder)

    def expert_ranks(*axes: str) -> tuple[tuple[int, ...], ...]:
        return () if experts is None else expert_groups(experts, *axes)

    pipelines, tensors = mesh.groups("pipeline"), mesh.groups("tensor")
    copies = [ranks[at : at + kv_copies] for ranks in tensors for at in range(0, len(ranks), kv_copies)]
    contexts = mesh.groups("context")
    exchanging = [ranks[at : at + ulysses] for ranks in contexts for at in range(0, len(ranks), ulysses)]
    rings = [ranks[at::ulysses] for ranks in contexts for at in range(ulysses)]
    pairs = tuple(tuple(dict.fromkeys(ranks[end] for end in ends)) for ranks in pipelines)
    groups = Groups(
        world=along("data", (tuple(range(mesh.world)),)),
        tensor=along("tensor", tensors),
        kv_copy=along("tensor", tuple(copies)),
        context=along("context", contexts),
        ring=along("context", tuple(rings)),
        ulysses=along("context", tuple(exchanging)),
        data=along("data", mesh.groups(*DATA)),
        gradient=along("data", mesh.groups(*DATA, "context")),
        replicate=along("data", mesh.groups("replicate")),
        shard=along("data", mesh.groups("shard", "context")),
        alone=along("data", ()),
        forward=along("pipeline", pipelines),
        backward=along("pipeline", pipelines),
        tied=along("pipeline", pairs),
        dispatch=along("expert", expert_ranks("expert", "tensor")),
        expert_data=along("data", expert_ranks("replicate", "shard")),
        expert_shard=along("data", expert_ranks("shard")),
        sequence=along("expert", mesh.groups("context", "tensor") if experts else ()),
    )
    if mesh.world > 1:
        dist.barrier()  # nobody fails, or ends, while others still connect
    return groups
