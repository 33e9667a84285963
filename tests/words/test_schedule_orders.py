"""Orders, closed forms, bubbles and peaks."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from shardsmith.errors import Refused
from shardsmith.schedule import orders
from shardsmith.schedule.check import check
from shardsmith.schedule.ir import Action, Kind, Order
from shardsmith.schedule.play import Live, peak_live, play
from shardsmith.schedule.study import Study, parse_times, study

EVEN = "F=1,B=1"


def of(name: str, pipeline: int, microbatches: int, stages: int | None = None, times: str | None = None) -> Study:
    return study(name, pipeline=pipeline, microbatches=microbatches, stages_per_rank=stages, times=times)


def test_names_are_the_files_of_the_folder() -> None:
    assert {"gpipe", "one_f_one_b", "interleaved"} <= set(orders.names())


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("pipeline", [1, 2, 3, 5])
def test_one_stage_schedules_are_legal_and_as_long_as_their_formula(name: str, pipeline: int) -> None:
    for microbatches in range(1, 12):
        for times in (EVEN, "F=1,I=1,W=1", "F=3,I=2,W=0.5"):
            found = of(name, pipeline, microbatches, times=times)
            assert check(found.order) == []
            assert found.closed_form is not None
            assert found.step_time == found.closed_form.step_time
            assert found.bubble_of_step == pytest.approx(found.closed_form.bubble_of_step, abs=1e-12)
            assert found.bubble_over_ideal == pytest.approx(found.closed_form.bubble_over_ideal, abs=1e-12)


@pytest.mark.parametrize("pipeline", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_interleaved_is_legal_for_any_microbatches_and_exact_for_multiples(pipeline: int, stages: int) -> None:
    for microbatches in range(1, 13):
        for times in (EVEN, "F=1,I=1,W=1"):
            found = of("interleaved", pipeline, microbatches, stages, times)
            assert check(found.order) == []
            assert (found.closed_form is None) == (microbatches % pipeline != 0)
            if found.closed_form is not None:
                assert found.step_time == found.closed_form.step_time


def test_interleaved_places_stages_in_a_loop() -> None:
    assert orders.load("interleaved").placement(pipeline=3, stages_per_rank=2) == (0, 1, 2, 0, 1, 2)


def test_a_last_group_of_its_own_size_would_deadlock() -> None:
    """Why interleaved.py drops microbatches from whole groups: P = 4, v = 3, m = 5 built the other way is stuck."""
    pipeline, stages, microbatches = 4, 3, 5
    visits = [(c, m) for group in ([0, 1, 2, 3], [4]) for c in range(stages) for m in group]
    ranks = []
    for rank in range(pipeline):
        forwards = [Action(Kind.F, c * pipeline + rank, m) for c, m in visits]
        backwards = [Action(Kind.B, (stages - 1 - c) * pipeline + rank, m) for c, m in visits]
        warm_up = (stages - 1) * pipeline + 2 * (pipeline - 1 - rank)
        steady = [a for i, b in enumerate(backwards) for a in (*forwards[warm_up + i : warm_up + i + 1], b)]
        ranks.append((*forwards[:warm_up], *steady))
    placement = tuple(s % pipeline for s in range(pipeline * stages))
    naive = Order(name="naive", microbatches=microbatches, placement=placement, ranks=tuple(ranks))
    assert [f.code for f in check(naive)] == ["S013"]


def test_b01_fewer_microbatches_than_ranks() -> None:
    found = of("one_f_one_b", 4, 2, times=EVEN)
    assert found.step_time == 10
    assert found.bubble_of_step == pytest.approx(0.60)
    assert [p.activations for p in found.peak_live] == [2, 2, 2, 1]


def test_b14_same_bubble_other_memory() -> None:
    gpipe, one_f_one_b = of("gpipe", 8, 32, times=EVEN), of("one_f_one_b", 8, 32, times=EVEN)
    for found in (gpipe, one_f_one_b):
        assert found.step_time == 78
        assert found.bubble_of_step == pytest.approx(14 / 78)
        assert found.bubble_over_ideal == pytest.approx(0.21875)
    assert gpipe.peak_live[0].activations == 32
    assert one_f_one_b.peak_live[0].activations == 8
    interleaved = of("interleaved", 8, 32, 2, EVEN)
    assert interleaved.step_time == 71
    assert interleaved.bubble_of_step == pytest.approx(0.09859, abs=5e-6)


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_b16_stage_0_holds_no_more_with_more_microbatches(microbatches: int) -> None:
    for pipeline in (2, 4):
        peaks = of("one_f_one_b", pipeline, microbatches).peak_live
        assert [p.activations for p in peaks] == [min(pipeline - rank, microbatches) for rank in range(pipeline)]


@pytest.mark.parametrize(
    ("name", "pipeline", "microbatches", "stages", "percent"),
    [
        ("gpipe", 4, 4, None, 42.9),  # ledger N2
        ("one_f_one_b", 4, 4, None, 42.9),
        ("one_f_one_b", 4, 16, None, 15.8),
        ("one_f_one_b", 4, 32, None, 8.6),  # N7
        ("interleaved", 4, 4, 2, 27.3),  # N5
        ("one_f_one_b", 16, 135, None, 10.0),  # N6
        ("interleaved", 16, 32, 4, 10.5),
        ("interleaved", 16, 48, 4, 7.2),
    ],
)
def test_ledger_bubbles(name: str, pipeline: int, microbatches: int, stages: int | None, percent: float) -> None:
    assert round(100 * of(name, pipeline, microbatches, stages).bubble_of_step, 1) == percent


def test_ledger_n6_136_microbatches_are_needed_to_get_below_a_tenth() -> None:
    form = of("one_f_one_b", 16, 135).closed_form
    assert form is not None
    assert form.idle / form.step_time == Fraction(1, 10)
    assert of("one_f_one_b", 16, 136).bubble_of_step < 0.1


def test_ledger_n3_one_microbatch_idles_all_but_one_rank() -> None:
    assert of("one_f_one_b", 4, 1).bubble_of_step == pytest.approx(3 / 4)


def test_peak_counts_activations_and_deferred_weight_gradients_apart() -> None:
    text = [(Kind.F, 0), (Kind.F, 1), (Kind.I, 0), (Kind.I, 1), (Kind.W, 0), (Kind.W, 1)]
    order = Order(name="split", microbatches=2, placement=(0,), ranks=(tuple(Action(kind, 0, m) for kind, m in text),))
    assert check(order) == []
    assert peak_live(order) == (Live(2, 2),)
    assert play(order).step_time == 6


def test_build_refuses_with_numbers_and_neighbours() -> None:
    with pytest.raises(Refused) as refused:
        orders.build("gpipe", pipeline=0, microbatches=0, stages_per_rank=2, source="plan.toml")
    assert [f.code for f in refused.value.faults] == ["S002", "S002", "S003"]
    assert all(f.hint and f.because and f.values[0][0] == "plan.toml" for f in refused.value.faults)
    with pytest.raises(Refused, match="at least 2 stages per rank, not 1"):
        orders.build("interleaved", pipeline=2, microbatches=2, stages_per_rank=1)


@pytest.mark.parametrize(
    ("wrong", "meant"), [("1f1b", "one_f_one_b"), ("gpip", "gpipe"), ("Interleaved-1F1B", "interleaved")]
)
def test_unknown_schedule_names_a_close_one(wrong: str, meant: str) -> None:
    with pytest.raises(Refused, match=f"S001.*(?s:.)*did you mean.*{meant}"):
        orders.load(wrong)


@pytest.mark.parametrize(
    "text", ["F=0", "F=-1", "F=x", "F", "Q=1", "F=1,F=2", "B=2,I=1", "F=nan", "F=1/0", "F=inf", "", "W=1e99"]
)
def test_bad_times_are_refused(text: str) -> None:
    with pytest.raises(Refused, match="S004"):
        parse_times(text)


def test_times_may_state_the_whole_backward() -> None:
    times = parse_times("F=1/3, B=1.5")
    assert (Fraction(1, 3), Fraction(3, 4), Fraction(3, 4)) == (times.F, times.I, times.W)


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(Refused) as refused:
        study("gpipe", pipeline=0, microbatches=2, stages_per_rank=3, times="F=0")
    assert [f.code for f in refused.value.faults] == ["S004", "S002", "S003"]
    with pytest.raises(Refused, match="S007"):
        study("gpipe", pipeline=4)
    with pytest.raises(Refused, match="S005"):
        study("gpipe", pipeline=4, microbatches=10**7)


SPLIT = ("zb_h1", "zb_v", "dualpipe_v", "looped_bfs")


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("pipeline", [1, 2, 3, 4, 6])
def test_every_schedule_is_legal_and_as_long_as_its_formula(name: str, pipeline: int) -> None:
    exact = 0
    for microbatches in range(1, 15):
        if name == "dualpipe_v" and microbatches < 2 * pipeline:
            with pytest.raises(Refused, match="S008"):
                of(name, pipeline, microbatches)
            continue
        for times in ("F=1,I=1,W=1", "F=2,I=2,W=1", "F=3,I=2,W=2", "F=1,I=2,W=3"):
            found = of(name, pipeline, microbatches, times=times)
            assert check(found.order) == []
            if found.closed_form is not None:
                assert found.step_time == found.closed_form.step_time
                assert found.bubble_of_step == pytest.approx(found.closed_form.bubble_of_step, abs=1e-12)
                exact += 1
    assert exact, "a formula that never applies says nothing"


def test_zero_bubble_figures() -> None:
    """With F = I = W = 1, P = 4, m = 8: a third of 1F1B's bubble in ZB-H1, and only the ramp in ZB-V."""
    assert of("one_f_one_b", 4, 8).step_time == 24 + 3 * 3
    assert of("zb_h1", 4, 8).step_time == 24 + 3 * 1
    assert of("zb_v", 4, 8).step_time == 24 + Fraction(3, 2)
    assert of("dualpipe_v", 4, 8).step_time == 24 + 3 * 1


def test_no_rank_of_zb_v_waits_between_its_first_and_last_action() -> None:
    for pipeline in (2, 3, 4, 5):
        found = of("zb_v", pipeline, 2 * pipeline + 1)
        for actions in found.order.ranks:
            starts, ends = (getattr(found.played, side) for side in ("start", "end"))
            assert all(ends[a] == starts[b] for a, b in itertools.pairwise(actions))


def test_peaks_of_split_schedules() -> None:
    """Deferred weights trade for activations: the sum on each rank of ZB-H1 is that of 1F1B's first rank plus one."""
    assert [tuple(p) for p in peak_live(of("zb_h1", 4, 8).order)] == [(4, 1), (3, 2), (2, 3), (1, 4)]
    assert max(p.activations for p in peak_live(of("zb_v", 4, 8).order)) == 8  # stages of half a rank: 4 as in 1F1B
    assert [tuple(p) for p in peak_live(of("looped_bfs", 2, 4).order)] == [(8, 0), (8, 0)]


def test_a_pair_starts_when_both_inputs_are_there_and_ends_as_one() -> None:
    found = of("dualpipe_v", 2, 6)
    assert found.order.pairs
    for actions in found.order.ranks:
        for a, b in itertools.pairwise(actions):
            if a in found.order.pairs:
                assert (a.kind, b.kind) == (Kind.F, Kind.B)
                assert a.stage != b.stage
                assert found.played.start[a] == found.played.start[b]
                assert found.played.end[a] == found.played.end[b]


@pytest.mark.parametrize(
    ("pipeline", "stages_per_rank", "group"), [(2, 2, 2), (2, 2, 4), (3, 2, 4), (4, 3, 8), (4, 2, 16)]
)
def test_groups_of_microbatches_trade_memory_for_long_stretches(
    pipeline: int, stages_per_rank: int, group: int
) -> None:
    sizes = {"pipeline": pipeline, "stages_per_rank": stages_per_rank}
    order = orders.build(f"interleaved:{group}", microbatches=2 * group, **sizes)
    assert check(order) == []
    form = orders.load(f"interleaved:{group}").closed_form(microbatches=2 * group, **sizes, F=1, I=1, W=1)
    assert form is not None
    assert play(order).step_time == form.step_time * stages_per_rank
    narrow = peak_live(orders.build("interleaved", microbatches=2 * group, **sizes))
    more = (stages_per_rank - 1) * (group - pipeline)
    assert [p.activations for p in peak_live(order)] == [p.activations + more for p in narrow]
    assert check(orders.build(f"interleaved:{group}", microbatches=group + 1, **sizes)) == []
    with pytest.raises(Refused, match="S015"):
        orders.build(f"interleaved:{pipeline - 1}", microbatches=4, **sizes)
