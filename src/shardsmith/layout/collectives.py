"""What every rank sends in one training step: the axes composed."""

from __future__ import annotations

from shardsmith.layout.axes.data import data_collectives
from shardsmith.layout.axes.pipeline import has_tied_copies, pipeline_collectives, tied_collectives
from shardsmith.layout.axes.tensor import partial_gradients, tensor_collectives
from shardsmith.layout.facts import CollectiveCount as CollectiveCount
from shardsmith.layout.facts import merged
from shardsmith.layout.facts import ring_bytes as ring_bytes
from shardsmith.layout.shards import stage_shards
from shardsmith.plan.mesh import mesh_of
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import stages
from shardsmith.units import DTYPE_BYTES


def collectives(setup: Setup, rank: int) -> tuple[CollectiveCount, ...]:
    """Every collective and message of global `rank` in one training step, of a plan without faults.

    An axis of degree 1 communicates nothing. Left out are the headers that prove, in the first step of a run
    only, that both ends of a message mean the same.
    """
    plan, kinds = setup.plan, precision(setup.plan, setup.workload)
    coord, every = mesh_of(plan).coord(rank), stages(plan, setup.model)
    found, shards = [], []
    tied: dict[str, int] = {}  # in a bucket of its own, as its gradient is complete only when both stages are
    for stage in every:
        if stage.rank != coord.pipeline:
            continue
        held = stage_shards(setup, stage, coord)
        sizes = [(h.weight.name, h.shard.numel * DTYPE_BYTES[kinds.reduce]) for h in held]
        found += tensor_collectives(setup, stage)
        shards += [h.shard for h in held]
        if has_tied_copies(setup, every):
            tied |= {name: size for name, size in sizes if name == "embedding.weight"}
        found += data_collectives(setup, [pair for pair in sizes if pair[0] not in tied])
    found += data_collectives(setup, list(tied.items()))
    found += partial_gradients(setup, shards)
    found += pipeline_collectives(setup, every, coord.pipeline)
    # The copies are summed as they were accumulated, before anything is reduced over data ranks.
    summed = sum(tied.values()) // DTYPE_BYTES[kinds.reduce] * DTYPE_BYTES[kinds.grad]
    found += tied_collectives(setup, every, coord.pipeline, summed)
    found += control_collectives(setup, head=every[-1].rank == coord.pipeline)
    return merged(found)


def control_collectives(setup: Setup, *, head: bool) -> list[CollectiveCount]:
    """The two all-reduces of a few float64 numbers in a step, whatever the model.

    Ranks that hold the `head` count the valid tokens of all data ranks before the loss; in the end all ranks
    of the world sum their parts of squared gradient norm, loss and tokens. Not listed is what the optimiser's
    settings add: one more number to clip by the largest entry.
    """
    wide = DTYPE_BYTES["float64"]
    found = []
    if head and setup.plan.data > 1:
        found.append(CollectiveCount(axis="data", kind="all_reduce", purpose="token_count", count=1, bytes=wide))
    if setup.plan.world > 1:
        found.append(CollectiveCount(axis="data", kind="all_reduce", purpose="step_summary", count=1, bytes=3 * wide))
    return found
