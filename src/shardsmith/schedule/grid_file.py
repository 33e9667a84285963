"""A schedule that is the grid in a file: `file:PATH`."""

from __future__ import annotations

from dataclasses import dataclass

from shardsmith.errors import Fault, raise_errors
from shardsmith.schedule.closed_form import ClosedForm, Time
from shardsmith.schedule.grid import Grid, read
from shardsmith.schedule.ir import Order
from shardsmith.schedule.rules import FILE_CLASH


@dataclass(frozen=True, kw_only=True)
class GridFile:
    """A legal grid, offered like any file of `orders/`: it has one size, its own."""

    grid: Grid

    @staticmethod
    def read(path: str) -> GridFile:
        """The schedule in file `path`; raises `Refused` where the grid is unreadable or not legal."""
        grid = read(path)
        raise_errors(grid.faults())
        return GridFile(grid=grid)

    @property
    def DEFAULT_STAGES_PER_RANK(self) -> int:
        """Stages of the rank that holds most of them."""
        placement = self.grid.order.placement
        return max(placement.count(rank) for rank in placement)

    def faults(self, *, pipeline: int, microbatches: int, stages_per_rank: int, source: str) -> list[Fault]:
        """Every size that was asked for and is not the file's (S006)."""
        order = self.grid.order
        asked = {"pipeline": pipeline, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
        drawn = (order.pipeline, order.microbatches, self.DEFAULT_STAGES_PER_RANK)
        return [
            FILE_CLASH.fault(
                f"{key} = {value}, but the grid has {there}",
                (source, f"{key} = {value}"),
                (self.grid.source, f"{key} = {there}"),
                hint=f"{key} = {there}",
            )
            for (key, value), there in zip(asked.items(), drawn, strict=True)
            if value != there
        ]

    def placement(self, *, pipeline: int, stages_per_rank: int) -> tuple[int, ...]:
        """The rank whose row holds each stage."""
        return self.grid.order.placement

    def order(self, *, pipeline: int, microbatches: int, stages_per_rank: int) -> Order:
        """The order that the rows give."""
        return self.grid.order

    def closed_form(
        self, *, pipeline: int, microbatches: int, stages_per_rank: int, F: Time, I: Time, W: Time
    ) -> ClosedForm | None:
        """None: a drawn grid has no formula."""
        return None
