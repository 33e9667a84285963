"""Team: all ranks of a run as they save and load together, on CPU and beside the communication of training.

A decision is taken by rank 0 alone and told to the others, so that no two ranks act on different views of a
file system; an error on one rank is an error on all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from shardsmith.engine.checkpoint.record import NOT_WRITTEN
from shardsmith.engine.runtime import progress
from shardsmith.errors import Code, Refused

T = TypeVar("T")

NOT_ALL = Code(
    code="R302",
    title="not every rank takes part in a checkpoint",
    because="each rank holds a part of the state, so all of them save together, at the same step",
)


@dataclass(frozen=True, kw_only=True)
class Team:
    """The `world` ranks of a run, of which this is `rank`; `group` is their gloo group (None: one process alone)."""

    rank: int = 0
    world: int = 1
    timeout_s: float = 300.0
    group: dist.ProcessGroup | None = None

    def meet(self, what: str) -> None:
        """Return when all ranks are here for `what`. Raises `Refused` (R302) naming who is not, within the timeout."""
        if self.group is None:
            return
        progress.joining(what, group="checkpoint", ranks=range(self.world))
        try:
            dist.monitored_barrier(self.group, timedelta(seconds=self.timeout_s), wait_all_ranks=True)
        except RuntimeError as error:
            raise NOT_ALL.refuse(
                f"not every rank came to {what} within {self.timeout_s:g} s: {str(error).splitlines()[0]}",
                (f"rank {self.rank}", what),
                hint="let every rank call it, never one of them alone",
            ) from error
        asked: list[Any] = [None] * self.world
        dist.all_gather_object(asked, what, group=self.group)
        if len(set(asked)) > 1:
            said = tuple((f"rank {rank}", one) for rank, one in enumerate(asked))
            raise NOT_ALL.refuse("ranks came to different checkpoints", *said)

    def agree(self, decide: Callable[[], T]) -> T:
        """What `decide` returns on rank 0, on every rank; `Refused` and OSError too are raised on all of them."""
        said: list[Any] = [None]
        if self.rank == 0:
            said = [_attempt(decide)]
        if self.group is not None:
            dist.broadcast_object_list(said, src=0, group=self.group)
        (answer,) = said
        if isinstance(answer, Refused):
            raise answer
        found: T = answer[0]
        return found


def make_team(timeout_s: float) -> Team:
    """The team of all ranks; every rank of the world must call this."""
    if not dist.is_initialized():
        return Team(timeout_s=timeout_s)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return Team(rank=dist.get_rank(), world=dist.get_world_size(), timeout_s=timeout_s, group=group)


def _attempt(decide: Callable[[], T]) -> tuple[T] | Refused:
    try:
        return (decide(),)
    except Refused as refused:
        return refused
    except OSError as error:
        where = "" if error.filename is None else f" ({os.fspath(error.filename)!r})"
        return NOT_WRITTEN.refuse(f"rank 0 cannot work on the checkpoints: {error.strerror}{where}")
