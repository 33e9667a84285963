"""The arithmetic and the tables of the benchmarks; measuring itself is tested in tests/ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import contest  # noqa: E402
import report  # noqa: E402
import workload  # noqa: E402
from launch import Measured, summarise  # noqa: E402

DATA, TENSOR = (next(layout for layout in contest.LAYOUTS if layout.name == name) for name in ("data 2", "tensor 2"))


def measured(cpu: float, mib: float = 100.0, losses: tuple[float, ...] = (8.0, 7.0)) -> Measured:
    return Measured(cpu_s_per_step=cpu, tokens_per_s=1000.0, anonymous_mib=mib, losses=losses)


def test_a_run_sums_over_ranks_and_takes_the_median_of_steady_steps() -> None:
    ranks = [
        {
            "warmup": 1,
            "cpu": [9.0, 1.0, 2.0, 6.0],
            "seconds": [9.0, 1.0, 3.0, 4.0],
            "losses": [None] * 4,
            "peak_anonymous_mib": 10.0,
        },
        {
            "warmup": 1,
            "cpu": [9.0, 3.0, 3.0, 3.0],
            "seconds": [9.0, 2.0, 2.0, 5.0],
            "losses": [4.0, 3.0, 2.0, 1.0],
            "peak_anonymous_mib": 20.0,
        },
    ]
    found = summarise(ranks)
    assert found.cpu_s_per_step == 5.0
    assert found.tokens_per_s == pytest.approx(workload.TOKENS_PER_STEP / 3.0)
    assert found.anonymous_mib == 30.0
    assert found.losses == (4.0, 3.0, 2.0, 1.0)


def test_ratios_are_formed_within_a_repeat() -> None:
    reference = [measured(1.0), measured(10.0), measured(2.0)]
    runs = [measured(2.0), measured(11.0), measured(3.0, losses=(8.0, 7.5))]
    row = report.summary("shardsmith", TENSOR, runs, reference)
    assert row.cpu_s_per_step == 3.0
    assert row.cpu_ratio == 1.5
    assert row.loss_error == 0.5


def test_a_section_is_replaced_and_the_rest_of_the_page_kept(tmp_path: Path) -> None:
    page = tmp_path / "measured.md"
    page.write_text("# Measured\n\nBefore.\n")
    rows = [
        report.summary("torch", DATA, [measured(2.0)], [measured(2.0)]),
        report.summary("shardsmith", DATA, [measured(1.5)], [measured(2.0)]),
        report.summary("torch", TENSOR, [measured(3.0)], [measured(2.0)]),
    ]
    note = "shardsmith, tensor 2: refused"
    figures = report.Figures(machine="two cores", repeats=1, steps=2, warmup=1, rows=rows, notes=[note])
    report.write_section(page, figures)
    page.write_text(page.read_text() + "\nAfter.\n")
    once = page.read_text()
    report.write_section(page, figures)
    assert page.read_text() == once
    assert once.startswith("# Measured\n\nBefore.\n")
    assert once.endswith("\nAfter.\n")
    assert "| data 2 | 2 | 2.00 (1.00) | 1.50 (0.75) |" in once
    assert "| tensor 2 | 2 | 3.00 (1.50) |  |" in once
    assert f"Not measured: {note}." in once


def test_layouts_have_plans_of_their_world() -> None:
    assert len({layout.name for layout in contest.LAYOUTS}) == len(contest.LAYOUTS)
    assert TENSOR.plan == "tensor=2"
    assert contest.LAYOUTS[-1].plan == "data=2,tensor=2,pipeline=2"
    assert contest.LAYOUTS[-1].world == 8
