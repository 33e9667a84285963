"""Ledger M3: the explicit ring sends 2(N-1) chunks of 1/N each, where reduce and broadcast send whole tensors."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shardsmith.engine.runtime.group import Group, ring_all_reduce
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.layout.collectives import ring_bytes

pytestmark = pytest.mark.ranks

SIZES = ((1,), (2,), (7,), (3, 5), (64,), (101, 3))
ITEM = 8
DIVISIBLE = 840
"""Elements that divide by every number of ranks here."""


def group_of_all() -> Group:
    rank, world = dist.get_rank(), dist.get_world_size()
    handle = dist.new_group(list(range(world)), timeout=timedelta(seconds=30)) if world > 1 else None
    recorder = Recorder(rank, counting=True)
    return Group(axis="data", ranks=tuple(range(world)), index=rank, recorder=recorder, handle=handle)


def reduced(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bool, int, int]:
    """Whether ring and backend agree on this rank; how many messages the ring sent, and how many bytes."""
    group = group_of_all()
    generator = torch.Generator().manual_seed(group.index)
    # whole numbers: every order of additions gives the same sum, so equal means equal
    ours = torch.randint(-1000, 1000, shape, generator=generator).to(dtype)
    theirs = ours.clone()
    ring_all_reduce(ours, group)
    sent = [tally for traffic, tally in group.recorder.tallies.items() if traffic.kind == "send"]
    group.all_reduce(theirs, "check")
    return torch.equal(ours, theirs), sum(t.count for t in sent), sum(t.bytes for t in sent)


def all_shapes() -> list[tuple[bool, int, int]]:
    return [reduced(shape, torch.float64) for shape in (*SIZES, (DIVISIBLE,))]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_m3_ring_equals_the_backend_in_two_n_minus_1_hops(run_ranks, world):
    for found in run_ranks(world, all_shapes):
        for shape, (equal, messages, sent) in zip((*SIZES, (DIVISIBLE,)), found, strict=True):
            assert equal, shape
            assert messages == 2 * (world - 1)
            assert sent == 2 * (world - 1) * math.ceil(math.prod(shape) / world) * ITEM


@pytest.mark.parametrize(("world", "factor"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_m3_a_rank_sends_2_n_minus_1_over_n_of_the_data(run_ranks, world, factor):
    payload = DIVISIBLE * ITEM
    for equal, _, sent in run_ranks(world, reduced, (DIVISIBLE,), torch.float64):
        assert equal
        assert sent == factor * payload == ring_bytes("all_reduce", payload, world)


def test_float32_strided_and_empty_tensors(run_ranks):
    def odd_ones():
        group = group_of_all()
        strided = torch.full((6, 4), group.index + 1.0)[::2, ::3]
        ring_all_reduce(strided, group)
        empty = torch.zeros(0)
        ring_all_reduce(empty, group)
        return strided.unique().tolist(), tuple(strided.shape), empty.numel()

    assert run_ranks(3, odd_ones) == [([6.0], (3, 2), 0)] * 3


def naive_all_reduce(x: torch.Tensor, group: Group) -> None:
    """Everyone sends all of its tensor to rank 0, which sums and sends the sum back: what a ring is not."""

    def passed(send: bool, value: torch.Tensor, peer: int) -> None:
        operation = dist.P2POp(dist.isend if send else dist.irecv, value, peer, group.handle)
        if send:
            group.recorder.count("data", "send", "naive", value.nbytes)
        for work in dist.batch_isend_irecv([operation]):
            work.wait()

    if group.index:
        passed(True, x, 0)
        passed(False, x, 0)
        return
    incoming = torch.empty_like(x)
    for peer in range(1, group.size):
        passed(False, incoming, peer)
        x += incoming
    for peer in range(1, group.size):
        passed(True, x, peer)


def test_m3_reduce_and_broadcast_loads_one_rank_with_the_others_data(run_ranks):
    def naive():
        group = group_of_all()
        ours, theirs = torch.full((DIVISIBLE,), group.index + 1.0), torch.full((DIVISIBLE,), group.index + 1.0)
        naive_all_reduce(ours, group)
        ring_all_reduce(theirs, group)
        sent = {traffic.purpose: tally.bytes for traffic, tally in group.recorder.tallies.items()}
        return torch.equal(ours, theirs), sent["naive"], sent["ring reduce"] + sent["ring gather"]

    payload = DIVISIBLE * 4
    found = run_ranks(4, naive)
    assert all(equal for equal, _, _ in found)
    assert [naive for _, naive, _ in found] == [3 * payload, payload, payload, payload]
    assert [ring for _, _, ring in found] == [1.5 * payload] * 4
