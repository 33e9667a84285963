"""What one rank measures of itself: time, CPU time and loss of each step, and its peak of anonymous memory.

Uses the standard library alone. CPU time is that of all threads of the process, from the kernel's accounting.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

OUT = "BENCH_OUT"
"""Environment variable: the folder for one JSON file a rank."""


class Meter:
    """Call `step(loss)` after every step and `done()` at the end; the first steps warm up and set the memory mark."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.losses: list[float | None] = []
        self._mark()

    def step(self, loss: float | None) -> None:
        """A step has ended; `loss` is what this rank knows of it (None: nothing)."""
        self.seconds.append(time.perf_counter() - self._time)
        self.cpu.append(time.process_time() - self._cpu)
        self.losses.append(loss)
        if len(self.seconds) == self.warmup:
            _reset_peak()
        self._mark()

    def done(self) -> None:
        """Write this rank's figures."""
        figures = {
            "warmup": self.warmup,
            "seconds": self.seconds,
            "cpu": self.cpu,
            "losses": self.losses,
            "peak_anonymous_mib": _peak_anonymous_mib(),
        }
        path = Path(os.environ[OUT]) / f"rank{os.environ['RANK']}.json"
        path.write_text(json.dumps(figures))

    def _mark(self) -> None:
        self._time, self._cpu = time.perf_counter(), time.process_time()


def _reset_peak() -> None:
    """Let the kernel's high-water mark of resident memory start anew (5: see proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak_anonymous_mib() -> float:
    """High-water mark of resident memory less what maps files or is shared, which does not shrink meanwhile."""
    lines = (line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {key: int(value.split()[0]) for key, value in lines if value.strip().endswith("kB")}
    return (kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"]) / 1024
