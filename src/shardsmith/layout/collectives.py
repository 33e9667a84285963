"""What every rank sends in one training step: the axes composed."""

from __future__ import annotations

from collections.abc import Mapping

from shardsmith.layout.axes.context import context_collectives
from shardsmith.layout.axes.data import (
    UnitUse,
    data_collectives,
    dense_spread,
    weight_collectives,
)
from shardsmith.layout.axes.expert import expert_collectives, load_collectives
from shardsmith.layout.axes.pipeline import has_tied_copies, pipeline_collectives, tied_collectives
from shardsmith.layout.axes.tensor import partial_gradients, tensor_collectives
from shardsmith.layout.facts import CollectiveCount as CollectiveCount
from shardsmith.layout.facts import merged
from shardsmith.layout.facts import ring_bytes as ring_bytes
from shardsmith.layout.routing import StatedRouting
from shardsmith.layout.shards import TIED, Held, data_shard, rows_first, spread_of, stage_shards
from shardsmith.plan.batch import batching
from shardsmith.plan.mesh import mesh_of
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import stages
from shardsmith.units import DTYPE_BYTES


def collectives(setup: Setup, rank: int, routing: StatedRouting | None = None) -> tuple[CollectiveCount, ...]:
    """Every collective and message of global `rank` in one training step, of a plan without faults.

    An axis of degree 1 communicates nothing. Left out are the headers that prove, in the first step of a run
    only, that both ends of a message mean the same. How many rows a capacity drops depends on the `routing`; where
    none is stated, none are dropped.
    """
    plan, kinds = setup.plan, precision(setup.plan, setup.workload)
    coord, every = mesh_of(plan).coord(rank), stages(plan, setup.model)
    passes = batching(plan, setup.workload).microbatches
    found: list[CollectiveCount] = []
    held: dict[str, Held] = {}
    units: list[UnitUse] = []
    tied: dict[str, Held] = {}  # in a bucket of its own, as its gradient is complete only when both stages are
    tied_uses = 0
    for stage in every:
        if stage.rank != coord.pipeline:
            continue
        here = {h.weight.name: h for h in stage_shards(setup, stage, coord)}
        found += tensor_collectives(setup, stage)
        found += expert_collectives(setup, stage, None if routing is None else routing.sent(rank))
        found += context_collectives(setup, stage)
        if has_tied_copies(setup, every) and TIED in here:
            tied[TIED] = here.pop(TIED)
            tied_uses += stage.embedding + 2 * stage.head
        for part in _by_mesh(here):
            spread = spread_of(next(iter(part.values())).shard, plan, coord)
            found += data_collectives(setup, _shapes(part), passes, spread=spread)
            units += _units(setup, part, spread.ranks)
        held |= here
    spread = dense_spread(plan, coord)
    found += data_collectives(setup, _shapes(tied), passes, spread=spread, streams=False)
    shapes = tuple(shape for _, shape in _shapes(tied))
    units += [UnitUse(shapes=shapes, per_microbatch=tied_uses, ranks=spread.ranks)] if tied else []
    found += weight_collectives(setup, units, passes)
    found += partial_gradients(setup, [data_shard(h.shard, plan, coord) for h in (*held.values(), *tied.values())])
    found += pipeline_collectives(setup, every, coord.pipeline)
    # The copies are summed as they were accumulated, before anything is reduced over data ranks.
    summed = sum(h.shard.numel for h in tied.values()) * DTYPE_BYTES[kinds.grad]
    found += tied_collectives(setup, every, coord.pipeline, summed)
    found += control_collectives(setup, head=every[-1].rank == coord.pipeline)
    found += load_collectives(setup)
    return merged(found)


def control_collectives(setup: Setup, *, head: bool) -> list[CollectiveCount]:
    """The two all-reduces of a few float64 numbers in a step, whatever the model.

    Ranks that hold the `head` count the valid tokens of all data ranks before the loss; in the end all ranks of
    the world sum their parts of squared gradient norm, loss and tokens, and whether one was asked to stop. Not
    listed is what the optimiser's settings add: one more number to clip by the largest entry.
    """
    wide = DTYPE_BYTES["float64"]
    found = []
    if head and setup.plan.data > 1:
        found.append(CollectiveCount(axis="data", kind="all_reduce", purpose="token_count", count=1, bytes=wide))
    if setup.plan.world > 1:
        found.append(CollectiveCount(axis="data", kind="all_reduce", purpose="step_summary", count=1, bytes=4 * wide))
    return found


def _shapes(held: Mapping[str, Held]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, rows_first(h.shard)) for name, h in held.items()]


def _by_mesh(held: Mapping[str, Held]) -> list[dict[str, Held]]:
    """Tensors of the dense and of the expert mesh apart: they are sharded, and reduced, over different ranks."""
    parts = [{name: h for name, h in held.items() if h.shard.expert is expert} for expert in (False, True)]
    return [part for part in parts if part]


def _units(setup: Setup, held: Mapping[str, Held], ranks: int) -> list[UnitUse]:
    """The units of one stage: embedding, each layer, head. A tied table of the same stage serves the head, too."""
    by_place: dict[str, list[tuple[int, ...]]] = {}
    for h in held.values():
        outside = "embedding" if h.weight.role in ("embedding", "position") else "head"
        place = outside if h.weight.layer is None else str(h.weight.layer)
        by_place.setdefault(place, []).append(rows_first(h.shard))
    both_ends = setup.model.tied and {"embedding", "head"} <= by_place.keys() and TIED in held
    uses = {"embedding": 3 if both_ends else 1}
    return [
        UnitUse(shapes=tuple(shapes), per_microbatch=uses.get(place, 2), ranks=ranks)
        for place, shapes in by_place.items()
    ]
