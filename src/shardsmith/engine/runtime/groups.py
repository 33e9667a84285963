"""The process groups of a mesh, as this rank sees them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

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

    Within one set of groups each has a communicator of its own; a later set takes up those of an earlier one.

    `ends` are the pipeline ranks of the first and the last stage, which share a tied embedding; `kv_copies`
    tensor ranks in a row share their key/value heads, `ulysses` context ranks in a row exchange heads for sequence.
    `experts` is the plan of a model that has any.
    """
    communicators = _Communicators(timeout_s)

    def along(axis: LaneKind, all_ranks: tuple[tuple[int, ...], ...]) -> Group:
        mine: Group | None = None
        for ranks in all_ranks:
            assert list(ranks) == sorted(ranks), f"torch numbers the ranks of a group upwards, not as {ranks}"
            handle = communicators.over(ranks) if len(ranks) > 1 else None
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


class _Communicators:
    """The torch process groups of one set of groups, all different.

    Each has threads and connections of its own, which stay where a process trains under many plans in turn; so
    what an earlier set had is used again. All ranks of the world ask in the same order.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.asked: Counter[tuple[int, ...]] = Counter()

    def over(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """One over `ranks` that this set does not have yet; where this rank is not among them, what torch gives."""
        world = dist.group.WORLD
        assert world is not None, "several ranks have a process group"
        made = _MADE.setdefault(world, {})
        key = (ranks, self.timeout_s, self.asked[ranks])
        self.asked[ranks] += 1
        if key not in made:
            made[key] = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout_s))
        return made[key]


_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], float, int], dist.ProcessGroup]]
_MADE = WeakKeyDictionary()
"""Process groups by the world that they are part of, which may end and start anew; by ranks, timeout, number of use."""
