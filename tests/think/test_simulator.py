"""The simulator: exact on closed forms, and right about wires, buckets, stragglers and uneven stages."""

from __future__ import annotations

import time
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardsmith.design.simulator.lengths import StageLengths, StepLengths
from shardsmith.design.simulator.simulate import simulate
from shardsmith.errors import Refused
from shardsmith.schedule.ir import Kind
from shardsmith.schedule.orders import build, load, names


def even(stages: int, F: float, I: float, W: float, per_rank: int = 1, **more: float) -> StepLengths:
    one = StageLengths(forward=F / per_rank, input_grad=I / per_rank, weight_grad=W / per_rank, **more)  # type: ignore[arg-type]
    return StepLengths(stages=(one,) * stages)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (3, 2, 2)])
def test_equal_to_every_closed_form(name: str, times: tuple[int, int, int]) -> None:
    schedule, exact = load(name), 0
    v = schedule.DEFAULT_STAGES_PER_RANK
    for pipeline in (1, 2, 4, 5):
        for microbatches in (4, 8, 10, 15):
            if name == "dualpipe_v" and microbatches < 2 * pipeline:
                continue
            F, I, W = map(Fraction, times)
            form = schedule.closed_form(pipeline=pipeline, microbatches=microbatches, stages_per_rank=v, F=F, I=I, W=W)
            if form is None:
                continue
            order = build(name, pipeline=pipeline, microbatches=microbatches)
            found = simulate(order, even(order.stages, *times, per_rank=v))
            assert found.seconds == pytest.approx(float(form.step_time), rel=1e-12)
            assert found.bubble == pytest.approx(form.bubble_of_step, abs=1e-12)
            assert found.timeline.idle_share() == pytest.approx(form.bubble_of_step, abs=1e-12)
            exact += 1
    assert exact or (name in ("zb_v", "dualpipe_v") and times != (1, 1, 1))


def test_world_of_one_is_pure_compute() -> None:
    found = simulate(build("one_f_one_b", pipeline=1, microbatches=7), even(1, 2, 3, 4, transfer=9.0))
    assert (found.seconds, found.bubble) == (7 * 9, 0.0)


def test_transfers_lengthen_the_ends_and_a_steady_1f1b_cannot_hide_them_all() -> None:
    """GPipe pays (P-1) transfers each way; in 1F1B a round trip of one neighbour pair stands between F and B."""
    order = build("gpipe", pipeline=4, microbatches=8)
    assert simulate(order, even(4, 1, 1, 1, transfer=0.25)).seconds == 33 + 6 * 0.25
    order = build("one_f_one_b", pipeline=2, microbatches=8)
    assert simulate(order, even(2, 1, 1, 1, transfer=0.25)).seconds > 27 + 2 * 0.25


def test_messages_of_one_direction_leave_one_after_another() -> None:
    order = build("gpipe", pipeline=2, microbatches=4)
    found = simulate(order, even(2, 1, 1, 1, transfer=2.0))
    sends = [s for s in found.timeline.spans if s.lane == "pipeline" and s.rank == 0]
    assert [s.start for s in sends] == [1, 3, 5, 7]


def test_buckets_hide_a_reduction_under_the_last_backward() -> None:
    order = build("one_f_one_b", pipeline=1, microbatches=2)
    one = simulate(order, even(1, 1, 1, 1, reduce=1.0, buckets=1))
    four = simulate(order, even(1, 1, 1, 1, reduce=1.0, buckets=4))
    assert (one.exposed_reduce, four.exposed_reduce) == (1.0, 0.25)
    each = simulate(order, even(1, 1, 1, 1, reduce=1.0, buckets=1), reduce_each=True)
    assert sum(s.seconds for s in each.timeline.spans if s.lane == "data") == 2.0


def test_streamed_gathers_bound_a_pass_that_is_shorter() -> None:
    order = build("one_f_one_b", pipeline=1, microbatches=1)
    assert simulate(order, even(1, 1, 1, 1, gather=0.5), gather="per_pass").seconds == 3
    assert simulate(order, even(1, 1, 1, 1, gather=2.0), gather="per_pass").seconds == 4


def test_a_straggler_sets_the_pace_and_an_uneven_stage_does_too() -> None:
    order = build("one_f_one_b", pipeline=4, microbatches=32)
    base = simulate(order, even(4, 1, 1, 1)).seconds
    slow = StepLengths(stages=even(4, 1, 1, 1).stages, slow={2: 1.2})
    assert simulate(order, slow).seconds == pytest.approx(32 * 3 * 1.2 + 9, rel=0.02)
    big = StageLengths(forward=1.2, input_grad=1.2, weight_grad=1.2)
    one = StageLengths(forward=1, input_grad=1, weight_grad=1)
    assert simulate(order, StepLengths(stages=(one, one, big, one))).seconds == simulate(order, slow).seconds > base


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([n for n in names() if n != "dualpipe_v"]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.lists(st.floats(0.01, 10), min_size=8, max_size=8),
    st.floats(0, 2),
)
def test_more_bandwidth_is_never_slower(name: str, P: int, m: int, lengths: list[float], transfer: float) -> None:
    order = build(name, pipeline=P, microbatches=m)

    def with_transfer(seconds: float) -> StepLengths:
        return StepLengths(
            stages=tuple(
                StageLengths(
                    forward=lengths[s % 8],
                    input_grad=lengths[(s + 1) % 8],
                    weight_grad=lengths[(s + 3) % 8],
                    transfer=seconds,
                )
                for s in range(order.stages)
            )
        )

    assert (
        simulate(order, with_transfer(transfer / 2)).seconds <= simulate(order, with_transfer(transfer)).seconds + 1e-9
    )


def test_64_ranks_and_512_microbatches_in_two_seconds_of_one_core() -> None:
    start = time.process_time()
    order = build("one_f_one_b", pipeline=64, microbatches=512)
    found = simulate(order, even(64, 1, 1, 1, transfer=0.01), record=False)
    assert found.seconds > 512 * 3
    assert time.process_time() - start < 2.0


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(Refused, match="S401"):
        StepLengths(stages=(StageLengths(forward=-1, input_grad=1, weight_grad=1),))


def test_kinds_add_up() -> None:
    stage = StageLengths(forward=1, input_grad=2, weight_grad=4)
    assert stage.of(Kind.B) == stage.of(Kind.I) + stage.of(Kind.W) == 6


def test_a_gather_goes_before_reductions_that_wait_and_none_overlap() -> None:
    order = build("one_f_one_b", pipeline=1, microbatches=3)
    lengths = even(1, 1, 1, 1, reduce=2.0, buckets=4, gather=0.5)
    found = simulate(order, lengths, gather="per_pass", reduce_each=True)
    assert found.seconds == pytest.approx(9 + 0.5)  # all but the last bucket hide; gathers wait for one bucket at most
    spans = sorted((s for s in found.timeline.spans if s.lane == "data"), key=lambda s: s.start)
    assert all(a.end <= b.start + 1e-12 for a, b in pairwise(spans))
    assert sum(s.seconds for s in spans) == pytest.approx(3 * 2.0 + 6 * 0.5)


def test_what_cannot_run_beside_compute_is_waited_for() -> None:
    order = build("one_f_one_b", pipeline=1, microbatches=2)
    lengths = even(1, 1, 1, 1, reduce=1.0, gather=1.0, alongside=0.5)
    assert simulate(order, lengths, gather="per_pass").seconds == pytest.approx(6 + 4 * 0.5 + 1.0)
    streamed = simulate(order, lengths, reduce_each=True)
    assert streamed.seconds == pytest.approx(3 + 0.5 + 3 + 1.0)
