"""The arithmetic and the tables of the benchmarks; measuring itself is tested in tests/ranks."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import contest  # noqa: E402
import report  # noqa: E402
import workload  # noqa: E402
from bench import race  # noqa: E402
from launch import Contestant, RunFailed, Step  # noqa: E402

DATA, TENSOR = (next(layout for layout in contest.LAYOUTS if layout.name == name) for name in ("data 2", "tensor 2"))


def measured(*cpu: float, mib: float = 100.0, losses: tuple[float, ...] = (8.0, 7.0)) -> report.Measured:
    steps = tuple(Step(cpu_s=c, seconds=2 * c, loss=1.0) for c in cpu)
    return report.Measured(steps=steps, losses=losses, anonymous_mib=mib)


def compared(found: report.Measured, reference: report.Measured) -> report.Compared:
    return report.Compared(found, reference)


def test_ratios_are_formed_within_a_round() -> None:
    first = compared(measured(2.0, 11.0), measured(1.0, 10.0))
    second = compared(measured(3.0, mib=50.0, losses=(8.0, 7.5)), measured(2.0))
    row = report.summary("shardsmith", TENSOR, [first, second])
    assert row.cpu_s_per_step == 3.0
    assert row.cpu_ratio == 1.5
    assert row.tokens_per_s == pytest.approx(workload.TOKENS_PER_STEP / 6.0)
    assert row.anonymous_mib == 75.0
    assert row.memory_ratio == 0.75
    assert row.loss_error == 0.5


RANK = """
import os, sys, time
sys.path.insert(0, {folder!r})
from meter import Meter
rank = int(os.environ["RANK"])
meter = Meter(1)
for step in range(3):
    print(open({log!r}, "a").write(f"{name}{{rank}}.{{step}} "), flush=True)
    if {fails} and step == 1:
        raise ValueError("broken on purpose")
    end = time.process_time() + 0.02
    while time.process_time() < end:
        pass
    meter.step(10.0 * step if rank or {alone} else None)
meter.done()
"""


def contestant(tmp_path: Path, name: str, *, world: int = 1, fails: bool = False) -> Contestant:
    code = RANK.format(folder=str(BENCHMARKS), log=str(tmp_path / "log"), name=name, fails=fails, alone=world == 1)
    return Contestant([sys.executable, "-c", code], world=world, timeout_s=60.0)


def test_contestants_take_turns_and_the_steps_are_summed(tmp_path: Path) -> None:
    other = ("shardsmith", TENSOR)
    racing = {contest.REFERENCE: contestant(tmp_path, "a"), other: contestant(tmp_path, "b", world=2)}
    failed: dict[contest.Pair, str] = {}
    found = race(racing, failed, steps=3, warmup=1)
    assert failed == {}
    turns = (tmp_path / "log").read_text().split()
    assert [turn[0] for turn in turns] == list("abbbbaabb")
    assert found[other].losses == (0.0, 10.0, 20.0)
    assert len(found[other].steps) == 2
    assert all(0.04 <= step.cpu_s < 1.0 for step in found[other].steps)
    assert found[other].anonymous_mib > found[contest.REFERENCE].anonymous_mib > 1.0


def test_who_fails_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    other = ("shardsmith", TENSOR)
    racing = {contest.REFERENCE: contestant(tmp_path, "a"), other: contestant(tmp_path, "b", fails=True)}
    failed: dict[contest.Pair, str] = {}
    found = race(racing, failed, steps=3, warmup=1)
    assert set(found) == {contest.REFERENCE}
    assert "broken on purpose" in failed[other]
    with pytest.raises(RunFailed, match="broken on purpose"):
        race({contest.REFERENCE: contestant(tmp_path, "a", fails=True)}, {}, steps=3, warmup=1)


def test_a_section_is_replaced_and_the_rest_of_the_page_kept(tmp_path: Path) -> None:
    page = tmp_path / "measured.md"
    page.write_text("# Measured\n\nBefore.\n")
    rows = [
        report.summary("torch", DATA, [compared(measured(2.0), measured(2.0))]),
        report.summary("shardsmith", DATA, [compared(measured(1.5), measured(2.0))]),
        report.summary("torch", TENSOR, [compared(measured(3.0), measured(2.0))]),
    ]
    note = "shardsmith, tensor 2: refused"
    figures = report.Figures(machine="two cores", repeats=1, steps=2, warmup=1, rows=rows, notes=[note])
    report.write_section(page, "benchmarks", report.markdown(figures))
    page.write_text(page.read_text() + "\nAfter.\n")
    once = page.read_text()
    report.write_section(page, "benchmarks", report.markdown(figures))
    assert page.read_text() == once
    assert once.startswith("# Measured\n\nBefore.\n")
    assert once.endswith("\nAfter.\n")
    assert "| data 2 | 2 | 1 | 2.00 (1.00) | 1.50 (0.75) |" in once
    assert "| tensor 2 | 2 | 1 | 3.00 (1.50) |  |" in once
    assert f"Not measured: {note}." in once


def test_layouts_measured_one_after_the_other_stand_in_one_table(tmp_path: Path) -> None:
    def figures(name: str, *cpu: tuple[contest.Layout, float]) -> report.Figures:
        rows = [report.summary("torch", layout, [compared(measured(c), measured(2.0))]) for layout, c in cpu]
        return report.Figures(machine=name, repeats=1, steps=2, warmup=1, rows=rows, notes=["a note"])

    path = tmp_path / "figures.json"
    path.write_text(json.dumps(asdict(figures("older", (DATA, 2.0), (TENSOR, 3.0)))))
    assert report.read(path) == figures("older", (DATA, 2.0), (TENSOR, 3.0))
    both = report.joined(report.read(path), figures("newer", (TENSOR, 5.0)))
    assert both == figures("newer", (DATA, 2.0), (TENSOR, 5.0))


def test_layouts_have_plans_of_their_world() -> None:
    assert len({layout.name for layout in contest.LAYOUTS}) == len(contest.LAYOUTS)
    assert TENSOR.plan == "tensor=2"
    assert contest.LAYOUTS[-1].plan == "data=2,tensor=2,pipeline=2"
    assert contest.LAYOUTS[-1].world == 8
