"""The benchmarks run: both systems on two ranks with equal losses, and the GPU script on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardsmith.timeline import LaneKind, Span

pytestmark = pytest.mark.ranks
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


def run(script: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.timeout(900)
def test_torch_and_ours_lose_alike_at_data_2(tmp_path: Path) -> None:
    figures, page = tmp_path / "figures.json", tmp_path / "measured.md"
    sizes = ("--repeats", "1", "--steps", "2", "--warmup", "1")
    done = run("bench.py", "--layouts", "data 2", *sizes, "--json", str(figures), "--write", str(page))
    assert done.returncode == 0, done.stderr
    rows = {row["system"]: row for row in json.loads(figures.read_text())["rows"]}
    assert set(rows) == {"torch", "shardsmith"}
    assert rows["shardsmith"]["loss_error"] < 2e-5
    assert rows["torch"]["cpu_ratio"] == 1.0
    assert 100 < rows["shardsmith"]["anonymous_mib"] < 4000
    assert "| data 2 | 2 | 1 |" in page.read_text()


@pytest.mark.timeout(900)
def test_the_gpu_script_trains_on_the_cpu_and_is_empty_without_a_gpu(tmp_path: Path) -> None:
    tiny = ("--tiny", "--device", "cpu", "--no-compile", "--steps", "2")
    done = run("gpu.py", *tiny, "--json", str(tmp_path / "tiny.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "tiny.json").read_text())
    assert found["tokens_per_s"] > 0
    assert found["measured_steps"] == 2
    assert 5.5 < found["first_loss"] < 7.5
    absent = run("gpu.py", CUDA_VISIBLE_DEVICES="")
    assert absent.returncode == 0
    assert set(json.loads(absent.stdout).values()) == {None}


def test_n14_the_share_counts_collectives_inside_forward_actions_alone() -> None:
    from tensor_share import split

    def span(lane: LaneKind, name: str, start: float, end: float) -> Span:
        return Span(rank=0, lane=lane, name=name, start=start, end=end)

    spans = [
        span("compute", "F0.0", 0.0, 4.0),
        span("tensor", "all_reduce layer_forward", 1.0, 2.0),
        span("pipeline", "wait", 2.0, 3.0),
        span("compute", "B0.0", 5.0, 9.0),
        span("tensor", "all_reduce layer_backward", 6.0, 7.0),
        span("compute", "F0.1", 10.0, 12.0),
        span("tensor", "all_reduce layer_forward", 10.5, 11.0),
    ]
    assert split(spans) == (1.5, 6.0)
