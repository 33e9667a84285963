"""Lowering and the rendezvous checker, on built-in orders, on random legal orders and on broken programs."""

from __future__ import annotations

from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardsmith.schedule.check import check
from shardsmith.schedule.ir import Action, Kind, Order, needs
from shardsmith.schedule.lower import Exchange, Payload, Program, Reduce, Step, Transfer, lower
from shardsmith.schedule.orders import build, names
from shardsmith.schedule.rendezvous import rendezvous


@st.composite
def legal_orders(draw: Any) -> Order:
    """Stages on random ranks (also several, also none), whole or split backwards, in any order that can run."""
    pipeline, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    placement = tuple(draw(st.lists(st.integers(0, pipeline - 1), min_size=1, max_size=6)))
    random: Random = draw(st.randoms(use_true_random=False))
    left: set[Action] = set()
    for stage in range(len(placement)):
        for m in range(microbatches):
            kinds = random.choice(["FB", "FIW"])
            left |= {Action(Kind(k), stage, m) for k in kinds}
    done: set[Action] = set()
    ranks: list[list[Action]] = [[] for _ in range(pipeline)]
    while left:
        can_run = [a for a in sorted(left) if all(done & set(one_of) for one_of in needs(a, len(placement)))]
        action = random.choice(can_run)
        left.remove(action)
        done.add(action)
        ranks[placement[action.stage]].append(action)
    return Order(name="random", microbatches=microbatches, placement=placement, ranks=tuple(map(tuple, ranks)))


def exchanges(steps: tuple[Step, ...]) -> list[int]:
    return [i for i, step in enumerate(steps) if isinstance(step, Exchange)]


def deadlocks(program: Program) -> bool:
    """The truth by another road: `entered` and `over` of each batch as a graph, stuck where it has a cycle."""
    ends: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    graph: dict[tuple[str, int, int], set[tuple[str, int, int]]] = {}
    for rank, steps in enumerate(program.ranks):
        before = None
        for i in exchanges(steps):
            batch = steps[i]
            assert isinstance(batch, Exchange)
            graph[("entered", rank, i)] = set() if before is None else {("over", rank, before)}
            graph[("over", rank, i)] = {("entered", rank, i)}
            before = i
            for side, transfers in (("send", batch.sends), ("receive", batch.receives)):
                for t in transfers:
                    ends.setdefault((side, t.source, t.target, t.payload), []).append((rank, i))
    for (side, *channel), batches in ends.items():
        other = ends[("receive" if side == "send" else "send", *channel)]
        for mine, theirs in zip(batches, other, strict=True):
            graph[("over", *mine)].add(("entered", *theirs))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def with_steps(program: Program, rank: int, steps: tuple[Step, ...]) -> Program:
    return replace(program, ranks=(*program.ranks[:rank], steps, *program.ranks[rank + 1 :]))


@given(legal_orders())
@settings(max_examples=150, deadline=None)
def test_random_legal_orders_lower_to_programs_that_meet(order: Order) -> None:
    assert check(order) == []
    program = lower(order)
    assert rendezvous(program) == []
    assert not deadlocks(program)
    for actions, steps in zip(order.ranks, program.ranks, strict=True):
        assert tuple(s for s in steps if isinstance(s, Action)) == actions
        assert not any(isinstance(a, Exchange) and isinstance(b, Exchange) for a, b in pairwise(steps))


@given(legal_orders())
@settings(max_examples=50, deadline=None)
def test_every_hop_between_ranks_is_sent_once_and_every_stage_reduced_once(order: Order) -> None:
    program = lower(order)
    crossing = sum(a != b for a, b in pairwise(order.placement))
    batches = [s for steps in program.ranks for s in steps if isinstance(s, Exchange)]
    sent = [t for batch in batches for t in batch.sends]
    assert len(sent) == len(set(sent)) == 2 * crossing * order.microbatches
    assert sorted(sent) == sorted(t for batch in batches for t in batch.receives)
    reduced = [s.stage for steps in program.ranks for s in steps if isinstance(s, Reduce)]
    assert sorted(reduced) == list(range(order.stages))
    for steps in program.ranks:
        for i, step in enumerate(steps):
            if isinstance(step, Reduce):
                before, after = steps[i - 1], steps[i + 1 :]
                assert isinstance(before, Action)
                assert before.kind in (Kind.B, Kind.W)
                assert before.stage == step.stage
                assert not any(isinstance(s, Action) and s.stage == step.stage and s.kind is not Kind.F for s in after)


@given(legal_orders(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_swapped_batches_are_judged_right(order: Order, random: Random) -> None:
    program = lower(order)
    ranks = [rank for rank, steps in enumerate(program.ranks) if len(exchanges(steps)) > 1]
    assume(ranks)
    rank = random.choice(ranks)
    steps = list(program.ranks[rank])
    i, j = random.sample(exchanges(program.ranks[rank]), 2)
    steps[i], steps[j] = steps[j], steps[i]
    broken = with_steps(program, rank, tuple(steps))
    codes = {fault.code for fault in rendezvous(broken)}
    assert ("S020" in codes) == deadlocks(broken)
    if not codes:  # two batches that only receive, from different ranks and ahead of both uses, may change places
        first, second = program.ranks[rank][i], program.ranks[rank][j]
        assert isinstance(first, Exchange)
        assert isinstance(second, Exchange)
        assert not first.sends
        assert not second.sends


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(("pipeline", "microbatches"), [(1, 2), (2, 1), (2, 4), (3, 5), (4, 2), (4, 8)])
def test_built_in_schedules_meet(name: str, pipeline: int, microbatches: int) -> None:
    if name == "dualpipe_v":
        microbatches += 2 * pipeline  # it is refused with fewer than 2P
    assert rendezvous(lower(build(name, pipeline=pipeline, microbatches=microbatches))) == []


def test_sends_before_receives_in_batches_of_their_own_deadlock() -> None:
    program = lower(build("interleaved", pipeline=2, microbatches=2))
    for rank, steps in enumerate(program.ranks):
        apart: list[Step] = []
        for step in steps:
            if isinstance(step, Exchange) and step.sends and step.receives:
                apart += [replace(step, receives=()), replace(step, sends=())]
            else:
                apart.append(step)
        program = with_steps(program, rank, tuple(apart))
    assert deadlocks(program)
    (fault,) = rendezvous(program)
    assert fault.code == "S020"
    assert fault.message.startswith("rank 0, 1:")
    stuck = dict(fault.values)
    assert len(stuck) == 2
    assert all("rank 0 -> rank 1" in text or "rank 1 -> rank 0" in text for text in stuck.values())


def test_two_ends_that_list_messages_in_different_order_disagree() -> None:
    program = lower(build("gpipe", pipeline=2, microbatches=2))
    steps = list(program.ranks[1])
    first, second = exchanges(program.ranks[1])[:2]
    steps[first], steps[second] = steps[second], steps[first]
    faults = rendezvous(with_steps(program, 1, tuple(steps)))
    assert faults[0].code == "S021"
    assert "message 0 of the activations from rank 0 to rank 1 differs" in faults[0].message
    assert [text for _, text in faults[0].values] == [
        "activation of stage 0, microbatch 0, rank 0 -> rank 1",
        "activation of stage 0, microbatch 1, rank 0 -> rank 1",
    ]


def test_a_lost_receive_is_found_from_both_sides() -> None:
    program = lower(build("one_f_one_b", pipeline=2, microbatches=2))
    first = exchanges(program.ranks[1])[0]
    steps = program.ranks[1][:first] + program.ranks[1][first + 1 :]
    assert {f.code for f in rendezvous(with_steps(program, 1, steps))} == {"S020", "S021", "S022"}


def test_a_transfer_on_a_rank_that_is_not_its_end_is_found() -> None:
    program = lower(build("gpipe", pipeline=2, microbatches=1))
    stray = Exchange(sends=(Transfer(Payload.ACTIVATION, 0, 0, 0, 1),), receives=())
    faults = rendezvous(with_steps(program, 1, (*program.ranks[1], stray)))
    assert "rank 1 lists what is not its own" in faults[0].message


def test_one_f_one_b_program_reads_as_expected() -> None:
    forward = Transfer(Payload.ACTIVATION, 0, 0, 0, 1)
    backward = Transfer(Payload.GRADIENT, 1, 0, 1, 0)
    assert lower(build("one_f_one_b", pipeline=2, microbatches=1)).ranks == (
        (
            Action(Kind.F, 0, 0),
            Exchange(sends=(forward,), receives=(backward,)),
            Action(Kind.B, 0, 0),
            Reduce(stage=0),
        ),
        (
            Exchange(sends=(), receives=(forward,)),
            Action(Kind.F, 1, 0),
            Action(Kind.B, 1, 0),
            Reduce(stage=1),
            Exchange(sends=(backward,), receives=()),
        ),
    )
