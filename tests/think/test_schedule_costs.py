"""Bubble and microbatches in flight, over arrays: exactly the played order where a closed form holds, never below."""

from itertools import product

import numpy as np
import pytest

from shardsmith.design.cost.schedules import SCHEDULES, as_fast, bubble, in_flight
from shardsmith.schedule import orders
from shardsmith.schedule.ir import Kind
from shardsmith.schedule.play import live, play

STAGES = {"interleaved": (2, 3), "looped_bfs": (2, 3), "zb_v": (2,), "dualpipe_v": (2,)}
TIMES = ((1.0, 1.0, 1.0), (1.0, 1.3, 0.7), (1.0, 2.2, 0.8), (1.0, 0.8, 1.2))
LOOSE = {"interleaved": 0.11, "zb_v": 0.10, "dualpipe_v": 0.03}
"""Share of the step by which the continuation may exceed the played order; others are exact."""


def test_every_schedule_has_a_cost() -> None:
    assert sorted(SCHEDULES) == sorted(orders.names())


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubble_and_live_microbatches_are_those_of_the_order(name: str) -> None:
    schedule = orders.load(name)
    for pipeline, m, v in product((1, 2, 3, 4, 6), (1, 2, 3, 5, 7, 8, 12), STAGES.get(name, (1,))):
        sizes = {"pipeline": pipeline, "microbatches": m, "stages_per_rank": v}
        if schedule.faults(**sizes, source="here"):
            continue
        order = schedule.order(**sizes)
        at = [np.array([float(x)]) for x in (SCHEDULES.index(name), pipeline, m, v)]
        for f, i, w in TIMES:
            lengths = {Kind.F: f / v, Kind.B: (i + w) / v, Kind.I: i / v, Kind.W: w / v}
            busy = m * (f + i + w)
            played = play(order, lengths).step_time - busy
            ours = float(bubble(*at, np.array([f]), np.array([i]), np.array([w]))[0])
            assert played - 1e-9 <= ours <= played + LOOSE.get(name, 1e-9) * (busy + played), (sizes, f, i, w)
            exact = schedule.closed_form(**sizes, F=f, I=i, W=w)
            if exact is not None:
                assert ours == pytest.approx(float(exact.step_time) - busy, abs=1e-9), (sizes, f, i, w)
        for rank in range(pipeline):
            most = max(held.activations + held.deferred for held in live(order.ranks[rank]))
            ours = float(in_flight(*at, np.array([float(rank)]))[0])
            assert most <= ours <= most + pipeline, (sizes, rank)
            if name in ("gpipe", "one_f_one_b", "looped_bfs"):
                assert ours == most


def test_a_schedule_that_is_left_out_takes_as_long_as_its_rival_and_holds_no_less() -> None:
    """`as_fast` names a rival: equal to the last bit, so that leaving the other out changes no ranking."""
    seen = set()
    for index, (p, m, v) in product(range(len(SCHEDULES)), product((1, 2, 3, 4, 8), range(1, 33), (1, 2, 3, 5))):
        rival = as_fast(index, p, m)
        if rival is None:
            continue
        seen.add(SCHEDULES[index])
        own, other = ([np.array([float(x)]) for x in (which, p, m, v)] for which in (index, rival))
        for times in TIMES:
            lengths = [np.array([x]) for x in times]
            assert bubble(*own, *lengths) == bubble(*other, *lengths)
        for rank in range(p):
            assert in_flight(*own, np.array([float(rank)])) >= in_flight(*other, np.array([float(rank)]))
    assert seen == {"gpipe", "looped_bfs"}
