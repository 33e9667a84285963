"""Nearby: a batch a little smaller or larger that would train faster, as more data ranks divide it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardsmith.design.planner.bounded import Bounded
from shardsmith.design.planner.question import Question
from shardsmith.design.planner.refusal import space_asked, subject_asked
from shardsmith.design.planner.result import Nearby
from shardsmith.plan.batch import divisors

WORTH = 1.03
"""Times the sequences a second from which another batch is worth a word."""
NEAR = 0.1
"""Share of the batch by which another one may differ."""
TRIED = 3
"""Batches that are tried."""
QUICK = 200_000
"""Plans weighed by a search from which on others like it take too long to run beside it."""


def better_batch(q: Question, step_time_s: float, weighed: int) -> Nearby | None:
    """The nearest batch, of those that a number of ranks divides and this batch does not, that trains faster.

    None where there is none, or where the search itself `weighed` so many plans that others would take long.
    """
    batch = q.workload.global_batch
    if weighed > QUICK:
        return None
    for other in list(_candidates(q))[:TRIED]:
        asked = replace(q, workload=replace(q.workload, global_batch=other))
        space = space_asked(asked, subject_asked(asked))
        found = Bounded(space=space, limit=q.limit).run(step_time_s * other / batch / WORTH)
        if found.plans:
            return Nearby(global_batch=other, faster=step_time_s / float(found.best.min()) * other / batch)
    return None


def _candidates(q: Question) -> Iterator[int]:
    """Batches near this one that some number of data ranks divides, and this one does not, the nearest first."""
    batch, world = q.workload.global_batch, q.cluster.devices or 1
    several = [ranks for ranks in divisors(world) if batch % ranks]
    near = {size for ranks in several for size in (batch // ranks * ranks, (batch // ranks + 1) * ranks)}
    # A batch that fewer numbers of ranks divide than another one no further away comes after it.
    order = sorted(near, key=lambda size: (abs(size - batch), -sum(size % ranks == 0 for ranks in several)))
    return (size for size in order if size and abs(size - batch) <= NEAR * batch)
