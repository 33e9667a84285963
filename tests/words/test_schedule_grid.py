"""Grids: drawn, read back, and judged by the clock of their own slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardsmith.errors import Refused
from shardsmith.schedule.grid import parse, read
from shardsmith.schedule.orders import build, load
from shardsmith.schedule.study import study

DATA = Path(__file__).parent / "data"


def test_ledger_n4_the_drawn_1f1b_runs_b1_before_its_gradient_exists() -> None:
    fault = read(DATA / "drawn_1f1b.txt").faults()[0]
    assert fault.code == "S013"
    assert fault.message == "B1 on rank 0 in slot 2 is impossible: it waits for B1 on rank 1"
    assert [text for _, text in fault.values] == ["rank 0, slot 2: B1", "rank 1, slot 3: B1"]
    assert "slot 4 at the earliest" in fault.hint


def test_ledger_n4_the_drawn_gpipe_runs_b4_before_its_gradient_exists() -> None:
    fault = read(DATA / "drawn_gpipe.txt").faults()[0]
    assert fault.code == "S013"
    assert fault.message == "B4 on rank 0 in slot 5 is impossible: it waits for B4 on rank 1"
    assert [text for _, text in fault.values] == ["rank 0, slot 5: B4", "rank 1, slot 6: B4"]


@pytest.mark.parametrize("name", ["drawn_1f1b", "drawn_gpipe"])
def test_a_drawn_grid_that_cannot_run_is_no_schedule(name: str) -> None:
    with pytest.raises(Refused, match="S013"):
        load(f"file:{DATA / name}.txt")


@pytest.mark.parametrize(("name", "stages"), [("gpipe", None), ("one_f_one_b", None), ("interleaved", 2)])
@pytest.mark.parametrize("times", ["F=1,B=1", "F=1,I=1,W=1", "F=1,I=1.01,W=0.5"])
def test_what_is_drawn_reads_back_as_the_same_order(name: str, stages: int | None, times: str) -> None:
    drawn = study(name, pipeline=3, microbatches=4, stages_per_rank=stages, times=times)
    grid = parse(drawn.drawing().text(), source="drawn")
    assert grid.faults() == []
    assert grid.order.ranks == drawn.order.ranks
    assert grid.order.placement == drawn.order.placement
    if drawn.drawing().column is not None:
        assert grid.drawn == drawn.played


def test_a_file_is_a_schedule_with_its_own_sizes(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("# 1F1B\nF1 F2 . . B1 = . B2 =\n.  F1 B1 = F2 B2 = . .\n", encoding="utf-8")
    found = study(f"file:{path}")
    assert found.step_time == 9
    assert found.bubble_of_step == pytest.approx(6 / 18)
    assert found.closed_form is None
    assert found.drawing().text().splitlines()[0] == "rank 0: F1 F2 .  .  B1 =  .  B2 ="
    assert study(f"file:{path}", times="F=1,B=1").step_time == 6
    order = build(f"file:{path}", pipeline=2, microbatches=2)
    assert order.ranks == build("one_f_one_b", pipeline=2, microbatches=2).ranks
    with pytest.raises(Refused) as refused:
        build(f"file:{path}", pipeline=4, microbatches=8)
    assert [f.code for f in refused.value.faults] == ["S006", "S006"]


def test_slots_count_not_only_the_order() -> None:
    late = parse("F0 . B0 =\n. F0 B0", source="late").faults()
    assert [f.code for f in late] == ["S013"]
    assert "B0 on rank 0 in slot 2 is impossible" in late[0].message
    assert parse("F0 . . B0 =\n. F0 B0", source="right").faults() == []


def test_one_slot_of_a_long_backward_is_not_enough() -> None:
    fault = parse("F0 . . B0\n. F0 B0 =", source="long").faults()[0]
    assert "can start in slot 4 at the earliest" in fault.hint


def test_an_input_that_is_drawn_nowhere() -> None:
    faults = parse("F0 . B0\n. F0 .", source="half").faults()
    assert [f.code for f in faults] == ["S013", "S012"]
    assert faults[0].message.startswith("B0 on rank 0 in slot 2 is impossible: it waits for B0 on rank 1")


def test_a_stage_on_two_ranks_is_found() -> None:
    faults = parse("F0.0 B0.0 .\n. . F0.1 B0.1", source="two").faults()
    assert {f.code for f in faults} == {"S010"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F0 X1", "'X1' in slot 1 of rank 0: not a cell"),
        ("= F0 B0", "'=' in slot 0 of rank 0: nothing goes on here"),
        ("F0 . = B0", "'=' in slot 2 of rank 0: nothing goes on here"),
        ("rank 1: F0 B0", "row 0 is labelled rank 1"),
        ("F0 B0.0", "does not say its stage"),
        ("F2 B2", "the first microbatch is 2, it must be 0 or 1"),
        ("F0 F3 B0 B3", "no cell for microbatch 1, but for microbatch 3"),
        ("F0.0 B0.0\nF2.0 B2.0", "no cell for stage 1"),
        ("F1.0 B1.0", "the first stage is 1"),
        ("# nothing\n", "no action in the grid"),
    ],
)
def test_unreadable_grids(text: str, words: str) -> None:
    with pytest.raises(Refused, match="F302") as refused:
        parse(text, source="grid.txt")
    assert words in str(refused.value)
    assert "grid.txt" in str(refused.value)


@pytest.mark.parametrize("kind", ["missing", "folder", "bytes"])
def test_unreadable_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    if kind == "bytes":
        path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Refused, match="F301"):
        read(path)
