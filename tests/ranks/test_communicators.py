"""Process groups of several trainers in one process: taken up again, never shared within one set of groups."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardsmith.engine.runtime.environment import detect
from shardsmith.engine.runtime.groups import Groups, make_groups
from shardsmith.engine.runtime.process import start, stop
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.plan.file import parse_plan_line
from shardsmith.plan.mesh import mesh_of

pytestmark = pytest.mark.ranks

LINES = ("data=2,tensor=2", "data=4", "tensor=2,pipeline=2", "data=2,tensor=2")


def groups_of(line: str, timeout_s: float = 20.0) -> Groups:
    mesh = mesh_of(parse_plan_line(line))
    ends = (0, mesh.sizes.pipeline - 1)
    return make_groups(mesh, dist.get_rank(), Recorder(0), ends=ends, kv_copies=1, timeout_s=timeout_s)


def handles(groups: Groups) -> list[int]:
    return [id(group.handle) for group in vars(groups).values() if group.handle is not None]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def sums(groups: Groups) -> list[float]:
    """What each group of this rank sums its ranks' numbers to."""
    return [group.all_reduce(torch.tensor([float(dist.get_rank())]), "test").item() for group in vars(groups).values()]


def one_set_after_another() -> None:
    found = [groups_of(line) for line in LINES]
    for groups in found:
        assert len(set(handles(groups))) == len(handles(groups)), "two roles must not get in each other's way"
        assert sums(groups) == [sum(group.ranks) for group in vars(groups).values()]
    assert handles(found[-1]) == handles(found[0])
    assert not set(handles(groups_of(LINES[0], 21.0))) & set(handles(found[0])), "another timeout"
    before = threads()
    for line in LINES * 3:
        groups_of(line)
    assert threads() == before
    stop()
    start(detect(), timeout_s=20, device="cpu")
    again = groups_of(LINES[0])
    assert sums(again) == [sum(group.ranks) for group in vars(again).values()], "those of the ended world are not used"


def test_later_sets_of_groups_take_up_communicators(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(4, one_set_after_another)
