"""Legality of orders: each breach by its code, and the first impossible action by name."""

from __future__ import annotations

import pytest

from shardsmith.schedule.check import check
from shardsmith.schedule.ir import Action, Kind, Order
from shardsmith.schedule.orders import build


def order(*rows: str, placement: tuple[int, ...] | None = None, microbatches: int = 2) -> Order:
    ranks = tuple(tuple(_action(word) for word in row.split()) for row in rows)
    return Order(name="test", microbatches=microbatches, placement=placement or tuple(range(len(rows))), ranks=ranks)


def _action(word: str) -> Action:
    stage, microbatch = word[1:].split(".")
    return Action(Kind(word[0]), int(stage), int(microbatch))


def codes(tested: Order) -> list[str]:
    return [fault.code for fault in check(tested)]


def test_whole_and_split_backwards_may_stand_side_by_side() -> None:
    assert codes(order("F0.0 F0.1 B0.0 I0.1 W0.1", "F1.0 I1.0 W1.0 F1.1 B1.1")) == []


@pytest.mark.parametrize(
    ("rows", "code", "words"),
    [
        (("F0.0 F0.1 B0.0 B0.1 F1.0", "F1.1 B1.1 B1.0"), "S010", "rank 0 runs F1.0, but stage 1 lives on rank 1"),
        (("F0.0 F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1"), "S011", "F0.0: more than once"),
        (("F0.0 F0.1 B0.0 W0.0 B0.1", "F1.0 B1.0 F1.1 B1.1"), "S011", "B0.0: the whole backward stands beside"),
        (("F0.0 F0.1 B0.0", "F1.0 B1.0 F1.1 B1.1"), "S012", "B0.1: not in the order"),
        (("F0.0 F0.1 I0.0 B0.1", "F1.0 B1.0 F1.1 B1.1"), "S012", "W0.0: not in the order"),
        (("F0.0 F0.1 B0.0 B0.2", "F1.0 B1.0 F1.1 B1.1"), "S014", "B0.2: no such stage or microbatch"),
    ],
)
def test_breaches(rows: tuple[str, ...], code: str, words: str) -> None:
    faults = {fault.code: fault for fault in check(order(*rows))}
    assert code in faults
    assert words in faults[code].message
    assert faults[code].because
    assert faults[code].values


def test_a_missing_action_and_who_waits_for_it_are_both_named() -> None:
    faults = check(order("F0.0 B0.0", "F1.0", microbatches=1))
    assert [f.code for f in faults] == ["S012", "S013"]
    assert "B0.0 on rank 0 (position 1) can never run" in faults[1].message
    assert "B1.0 or I1.0, which is nowhere in the order" in faults[1].message


def test_a_cycle_names_who_waits_for_whom() -> None:
    (fault,) = check(order("F0.0 B0.0 F0.1 B0.1", "F1.1 F1.0 B1.0 B1.1"))
    assert fault.code == "S013"
    assert "F1.1 on rank 1 (position 0) can never run" in fault.message
    assert "waits for F0.1, which stands on rank 0 at position 2 behind B0.0 (position 1)" in fault.message
    assert len(fault.values) == 2
    assert "rank 0, position 1: B0.0 waits for B1.0, which stands on rank 1 at position 2" in fault.values[1][1]


def test_backward_before_its_own_forward() -> None:
    (fault,) = check(order("B0.0 F0.0", microbatches=1))
    assert "B0.0 on rank 0 (position 0) can never run: it waits for F0.0" in fault.message


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved"])
def test_any_action_left_out_or_doubled_is_found(name: str) -> None:
    whole = build(name, pipeline=2, microbatches=2)
    for rank, actions in enumerate(whole.ranks):
        for i in range(len(actions)):
            for changed, code in (
                (actions[:i] + actions[i + 1 :], "S012"),
                (actions[:i] + actions[i : i + 1] + actions[i:], "S011"),
            ):
                ranks = (*whole.ranks[:rank], changed, *whole.ranks[rank + 1 :])
                broken = Order(name=name, microbatches=2, placement=whole.placement, ranks=ranks)
                assert code in codes(broken)
