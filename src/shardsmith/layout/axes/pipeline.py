"""The pipeline axis: layers are cut into stages, and neighbours pass hidden states and their gradients."""

from __future__ import annotations

from itertools import pairwise

from shardsmith.layout.facts import CollectiveCount, CommKind
from shardsmith.plan.batch import batching
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import Stage
from shardsmith.units import DTYPE_BYTES


def message_bytes(setup: Setup) -> int:
    """Bytes of one message: hidden states [microbatch, part of seq_len, hidden].

    The sequence is cut over context ranks, and under sequence parallelism over tensor ranks, too.
    """
    plan, work = setup.plan, setup.workload
    parts = plan.context * (plan.tensor if plan.sequence_parallel else 1)
    rows = batching(plan, work).microbatch * work.seq_len // parts
    return rows * setup.model.hidden * DTYPE_BYTES[work.dtype]


def pipeline_collectives(setup: Setup, stages: tuple[Stage, ...], rank: int) -> list[CollectiveCount]:
    """The messages of pipeline rank `rank` in one step: one a microbatch, direction and border to another rank."""
    found: list[CollectiveCount] = []
    count, size = batching(setup.plan, setup.workload).microbatches, message_bytes(setup)

    def calls(kind: CommKind, purpose: str) -> CollectiveCount:
        return CollectiveCount(axis="pipeline", kind=kind, purpose=purpose, count=count, bytes=count * size)

    for before, after in pairwise(stages):
        if before.rank == after.rank:
            continue
        if before.rank == rank:
            found += [calls("send", "activation"), calls("receive", "gradient")]
        if after.rank == rank:
            found += [calls("receive", "activation"), calls("send", "gradient")]
    return found


def has_tied_copies(setup: Setup, stages: tuple[Stage, ...]) -> bool:
    """Whether the embedding matrix stands twice, on the first stage and as the head of the last."""
    return setup.model.tied and len(stages) > 1


def tied_collectives(setup: Setup, stages: tuple[Stage, ...], rank: int, size: int) -> list[CollectiveCount]:
    """The sum of a tied embedding's two gradients of `size` bytes, once a step, where two ranks hold them."""
    ends = {stages[0].rank, stages[-1].rank}
    if not has_tied_copies(setup, stages) or len(ends) == 1 or rank not in ends:
        return []
    return [CollectiveCount(axis="pipeline", kind="all_reduce", purpose="tied_embedding", count=1, bytes=size)]
