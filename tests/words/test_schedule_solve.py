"""A schedule made to measure: legal, under its caps, never worse than a named one, and better where stages differ."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardsmith.cli.main import main
from shardsmith.errors import Refused
from shardsmith.schedule.check import check
from shardsmith.schedule.ir import Action, Kind
from shardsmith.schedule.lower import lower
from shardsmith.schedule.orders import build
from shardsmith.schedule.play import peak_live, play
from shardsmith.schedule.rendezvous import rendezvous
from shardsmith.schedule.solve import Solved, solve


def solved(times: list[int], microbatches: int, **caps: int | None) -> Solved:
    return solve([Fraction(t) for t in times], pipeline=len(times), microbatches=microbatches, effort=8.0, **caps)


def one_f_one_b(times: list[int], microbatches: int) -> float:
    def length(action: Action) -> int:
        return times[action.stage] * (2 if action.kind is Kind.B else 1)

    return play(build("one_f_one_b", pipeline=len(times), microbatches=microbatches), length).step_time


@pytest.mark.parametrize(
    ("times", "microbatches", "live", "deferred", "slots"),
    [
        ([1, 1, 1, 2], 8, 4, None, 51),
        ([1, 1, 1, 2], 8, 2, None, 51),  # half the memory of 1F1B, and still shorter
        ([1, 1, 1, 2], 8, 4, 1, 53),
        ([2, 1, 1, 1], 6, 3, 3, 38),
    ],
)
def test_uneven_stages_beat_1f1b_under_its_memory(
    times: list[int], microbatches: int, live: int, deferred: int | None, slots: int
) -> None:
    found = solved(times, microbatches, live=live, deferred=deferred)
    assert check(found.order) == []
    assert rendezvous(lower(found.order)) == []
    peaks = peak_live(found.order)
    assert max(p.activations for p in peaks) <= live
    assert max(p.deferred for p in peaks) <= (deferred or live)
    assert found.played.step_time == slots < one_f_one_b(times, microbatches)
    assert found.proven


def test_equal_stages_reach_the_closed_form_of_zb_h1() -> None:
    found = solved([1, 1, 1], 5)
    assert found.played.step_time == 5 * 3 + 2  # m (F + I + W) + (P - 1)(F + I - W)
    assert found.named_slots == found.played.step_time


def test_the_grid_goes_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "made.grid"
    words = ["schedule", "solved", "--pipeline", "2", "--microbatches", "3", "--stage-times", "1,2", "--json"]
    made = CliRunner().invoke(main, [*words, "--out", str(path)])
    assert made.exit_code == 0, made.output
    answer = json.loads(made.stdout)
    assert answer["proven"]
    assert answer["step_time"] == answer["bound"] <= answer["best_named_step_time"]
    read = CliRunner().invoke(main, ["schedule", f"file:{path}", "--json"])
    assert json.loads(read.stdout)["step_time"] == answer["step_time"]


@pytest.mark.parametrize(
    ("times", "pipeline", "caps", "code"),
    [
        ([1, 1, 1], 2, {}, "S030"),
        ([1, 0], 2, {}, "S030"),
        ([1, 1], 2, {"live": 0}, "S031"),
        ([1, 1], 2, {"deferred": 0}, "S031"),
        ([1] * 400, 400, {}, "S033"),
        ([1], 0, {}, "S002"),
    ],
)
def test_what_cannot_be_made_is_refused(times: list[int], pipeline: int, caps: dict[str, int], code: str) -> None:
    with pytest.raises(Refused) as refused:
        solve([Fraction(t) for t in times], pipeline=pipeline, microbatches=2, **caps)
    assert code in {fault.code for fault in refused.value.faults}
