"""Routing in a dry run: routers choose what a `StatedRouting` says, and all that follows from it is the engine's own.

Choices, counts and the order of rows are the only tensors of a dry run with data. They are small, and everything else
hangs on them: how many rows travel, which are dropped. What other ranks would have sent of them is stated, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shardsmith.engine.dryrun.tracker import Tracker
from shardsmith.engine.models import experts
from shardsmith.engine.models.experts import MoE, Router
from shardsmith.engine.runtime.group import Group
from shardsmith.layout.routing import StatedRouting
from shardsmith.plan.batch import batching
from shardsmith.plan.mesh import mesh_of

Replaced = tuple[Any, str, Callable[..., Any]]

COUNTING: tuple[tuple[Any, str], ...] = ((MoE, "_counts"), (MoE, "_kept"), (experts, "make_route"))
"""Functions of the engine that count choices and sort rows, where indices must have data."""


def routed_as_stated(stated: StatedRouting, rank: int, tracker: Tracker) -> list[Replaced]:
    """What stands in for methods of the engine (owner, name, function) when `rank` routes as `stated`."""
    coord = mesh_of(stated.setup.plan).coord(rank)
    mine = list(stated.places(coord))
    sequences = batching(stated.setup.plan, stated.setup.workload).microbatch
    with unset_fake_temporarily():
        places = torch.tensor(mine)
        chosen = torch.tensor([stated.choices[place] for place in mine]).repeat_interleave(sequences, 0)
        arrivals, everyone = torch.tensor(stated.arrivals(rank)), torch.tensor(stated.choices)

    def choice(router: Router, scores_NE: Tensor) -> Tensor:
        own = plain_choice(router, scores_NE)
        assert own.shape == chosen.shape, "every token that this rank routes has its choices"
        del own
        return chosen.clone()

    def own_places(moe: MoE, *unused: Any) -> Tensor:
        return places.clone()

    def all_to_all(group: Group, x: Tensor, purpose: str) -> Tensor:
        out = plain_all_to_all(group, x, purpose)
        return out.copy_(arrivals) if purpose == "expert_rows" else out

    def all_gather(group: Group, x: Tensor, purpose: str) -> Tensor:
        out = plain_all_gather(group, x, purpose)
        if purpose == "sequence_choices":
            out[..., 0] = torch.arange(len(out))[:, None]
            out[..., 1:] = everyone[:, None]
        return out

    plain_choice, plain_all_to_all, plain_all_gather = Router._choice, Group.all_to_all, Group.all_gather
    stand_ins: list[Replaced] = [
        (Router, "_choice", choice),
        (MoE, "_places", own_places),
        (Group, "all_to_all", all_to_all),
        (Group, "all_gather", all_gather),
    ]
    return stand_ins + [(owner, name, _with_data(getattr(owner, name), tracker)) for owner, name in COUNTING]


def _with_data(method: Callable[..., Any], tracker: Tracker) -> Callable[..., Any]:
    @wraps(method)
    def counting(*args: Any, **kwargs: Any) -> Any:
        with tracker.with_data():
            return method(*args, **kwargs)

    return counting
