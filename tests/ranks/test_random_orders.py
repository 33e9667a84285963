"""Random legal orders on gloo: the interpreter and the real wire bring every message where it belongs."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from random_orders import random_order
from shardsmith.engine.parallel.pipeline import Wire
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.interpreter import Interpreter
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.schedule.ir import Action, Kind, Order
from shardsmith.schedule.lower import Payload, lower

pytestmark = pytest.mark.ranks

WORLDS = {2: 20, 3: 16, 4: 14}
"""Orders for each number of ranks: 50 in all."""


class Named:
    """Work whose messages carry kind, stage and microbatch of what made them."""

    def __init__(self, order: Order) -> None:
        self.order, self.seen = order, 0

    def perform(self, action: Action, incoming: Tensor | None) -> Tensor:
        """Check who made `incoming`, sign what goes on."""
        forward = action.kind is Kind.F
        maker = action.stage + (-1 if forward else 1)
        if action.kind is not Kind.W and 0 <= maker < self.order.stages:
            assert incoming is not None, action
            assert incoming.tolist() == [float(forward), maker, action.microbatch], action
        self.seen += 1
        return torch.tensor([float(forward), action.stage, action.microbatch])

    def reduce(self, stage: int) -> None:
        """Nothing to reduce."""

    def unshard(self, stage: int) -> None:
        """Nothing to gather."""

    def reshard(self, stage: int) -> None:
        """Nothing to free."""

    def before(self, action: Action, *, reduced: bool) -> None:
        """Nothing to prepare."""


def performed(seeds: list[str], world: int) -> list[int]:
    """How many actions this rank has performed of each order."""
    everyone, rank = tuple(range(world)), dist.get_rank()
    groups = {
        payload: Group(
            axis="pipeline", ranks=everyone, index=rank, recorder=Recorder(rank), handle=dist.new_group(list(everyone))
        )
        for payload in Payload
    }
    counts = []
    for seed in seeds:
        order = random_order(Random(seed), pipeline=world, every_rank=True)
        work = Named(order)
        wire = Wire(groups, lambda microbatch: (3,), torch.float32, torch.device("cpu"))
        interpreter = Interpreter(lower(order).ranks[rank], order.stages)
        interpreter.run(work, wire)  # headers prove the shapes
        interpreter.run(work, wire)
        counts.append(work.seen)
    return counts


@pytest.mark.parametrize("world", WORLDS)
def test_random_orders_run_on_gloo(world: int, run_ranks: Callable[..., list[Any]]) -> None:
    seeds = [f"{world} ranks, {n}" for n in range(WORLDS[world])]
    found = run_ranks(world, performed, seeds, world)
    for n, seed in enumerate(seeds):
        order = random_order(Random(seed), pipeline=world, every_rank=True)
        assert [counts[n] for counts in found] == [2 * len(actions) for actions in order.ranks]
