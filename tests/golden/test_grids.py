"""Grids as users see them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardsmith.schedule.study import study

CASES = [
    ("gpipe", 2, 4, None, "F=1,B=1"),
    ("one_f_one_b", 2, 4, None, "F=1,B=1"),
    ("one_f_one_b", 4, 2, None, "F=1,B=1"),
    ("one_f_one_b", 4, 6, None, "F=1,I=1,W=1"),
    ("interleaved", 2, 4, 2, "F=1,I=1,W=1"),
    ("interleaved", 4, 5, 2, "F=2,B=2"),
]


@pytest.mark.parametrize(("name", "pipeline", "microbatches", "stages", "times"), CASES)
def test_grid(
    golden: Callable[[str, str], None], name: str, pipeline: int, microbatches: int, stages: int | None, times: str
) -> None:
    drawn = study(name, pipeline=pipeline, microbatches=microbatches, stages_per_rank=stages, times=times)
    golden(f"grids/{name}_p{pipeline}_m{microbatches}.txt", drawn.drawing().text() + "\n")
