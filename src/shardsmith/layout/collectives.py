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

    An axis of degree 1 communicates nothing. Left out are the control messages of a few numbers that do not
    depend on the model: token counts, the loss for the log, the parts of the gradient norm.
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
    return merged(found)
