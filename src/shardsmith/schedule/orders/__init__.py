"""The schedules, one a file: `order`, `placement`, `closed_form`, `faults` and `DEFAULT_STAGES_PER_RANK`.

A new schedule is a new file in this folder; nothing else lists them. Those without a flush stand in `asynchronous`.
"""

from __future__ import annotations

import difflib
import pkgutil
from functools import cache
from importlib import import_module
from typing import Protocol, cast

from shardsmith.errors import Fault, raise_errors
from shardsmith.schedule.closed_form import ClosedForm, Time
from shardsmith.schedule.ir import Order
from shardsmith.schedule.orders import asynchronous
from shardsmith.schedule.rules import UNKNOWN

FILE_PREFIX = "file:"
"""A schedule named `file:PATH` is the grid in that file."""


class Schedule(Protocol):
    """What every file of this folder offers (and a grid file, too)."""

    @property
    def DEFAULT_STAGES_PER_RANK(self) -> int:
        """Stages per rank where nothing else is asked for."""

    def order(self, *, pipeline: int, microbatches: int, stages_per_rank: int) -> Order:
        """The order of all pipeline ranks."""

    def placement(self, *, pipeline: int, stages_per_rank: int) -> tuple[int, ...]:
        """The pipeline rank of each global stage."""

    def closed_form(
        self, *, pipeline: int, microbatches: int, stages_per_rank: int, F: Time, I: Time, W: Time
    ) -> ClosedForm | None:
        """What the step costs by formula, F, I, W per microbatch and rank; None where no formula is exact."""

    def faults(self, *, pipeline: int, microbatches: int, stages_per_rank: int, source: str) -> list[Fault]:
        """What this schedule forbids; `source` says where the values came from."""


@cache
def names() -> tuple[str, ...]:
    """Names of all built-in schedules that can be trained, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg))


@cache
def asynchronous_names() -> tuple[str, ...]:
    """Names of the schedules that never flush: they can be studied and simulated, not trained."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(asynchronous.__path__)))


def load(name: str) -> Schedule:
    """The schedule called `name`, `interleaved:G` in groups of G, or the one in a grid file for `file:PATH`.

    Raises `Refused`: S001 with close matches for an unknown name; F301, F302 or the S codes of the
    legality check for a grid file that cannot be read or is not legal.
    """
    if name in names():
        return _built_in(name)
    if name.startswith(FILE_PREFIX):
        from shardsmith.schedule.grid_file import GridFile

        return GridFile.read(name.removeprefix(FILE_PREFIX))
    if name in asynchronous_names():
        return cast(Schedule, import_module(f"{asynchronous.__name__}.{name}"))
    base, colon, group = name.partition(":")
    if base == "interleaved" and colon and group.isascii() and group.isdigit():
        from shardsmith.schedule.orders.interleaved import Grouped

        return Grouped(group=int(group))
    spelled = name.lower().replace("-", "_").replace("1", "one_")
    close = difflib.get_close_matches(spelled, (*names(), *asynchronous_names()), n=2, cutoff=0.4)
    every = ", ".join((*names(), *asynchronous_names(), "file:PATH"))
    hint = f"did you mean {' or '.join(close)}? (all: {every})" if close else f"one of {every}"
    raise UNKNOWN.refuse(f"no schedule is called {name!r}", hint=hint)


@cache
def _built_in(name: str) -> Schedule:
    return cast(Schedule, import_module(f"{__name__}.{name}"))


def build(
    name: str, *, pipeline: int, microbatches: int, stages_per_rank: int | None = None, source: str = "asked"
) -> Order:
    """The order of schedule `name`; raises `Refused` with everything that the schedule forbids.

    `stages_per_rank` of None takes the schedule's own default.
    """
    schedule = load(name)
    stages = schedule.DEFAULT_STAGES_PER_RANK if stages_per_rank is None else stages_per_rank
    raise_errors(schedule.faults(pipeline=pipeline, microbatches=microbatches, stages_per_rank=stages, source=source))
    return schedule.order(pipeline=pipeline, microbatches=microbatches, stages_per_rank=stages)
