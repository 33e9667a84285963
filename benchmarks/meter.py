"""What one rank measures of itself: time, CPU time and loss of each step, and its peak of anonymous memory.

The rank takes turns with others on the machine: before each step it waits, without using the CPU, until the driver
grants it one step, and after the step it reports. Started by hand, without a driver, it just runs. Uses the
standard library alone. CPU time is that of all threads of the process, from the kernel's accounting.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

TURNS, REPORTS = "BENCH_TURNS", "BENCH_REPORTS"
"""Environment variables: file descriptors on which a rank reads a byte a turn and writes a line of JSON a report."""


class Meter:
    """Make it when all is built, call `step(loss)` after every step and `done()` at the end."""

    def __init__(self, warmup: int) -> None:
        self.warmup, self.steps = warmup, 0
        self._turns = os.environ.get(TURNS)
        reports = os.environ.get(REPORTS)
        self._reports = sys.stdout if reports is None else os.fdopen(int(reports), "w", buffering=1)
        self._report({"ready": True})
        self._wait()

    def step(self, loss: float | None) -> None:
        """A step has ended; `loss` is what this rank knows of it (None: nothing)."""
        seconds, cpu = time.perf_counter() - self._time, time.process_time() - self._cpu
        self.steps += 1
        if self.steps == self.warmup:
            _reset_peak()
        self._report({"seconds": seconds, "cpu": cpu, "loss": loss})
        self._wait()

    def done(self) -> None:
        """Report the peak of anonymous memory since the end of the warm-up."""
        self._report({"peak_anonymous_mib": _peak_anonymous_mib()})

    def _wait(self) -> None:
        """Until it is this rank's turn; the driver's end of the pipe is closed after the last step."""
        if self._turns is not None:
            os.read(int(self._turns), 1)
        self._time, self._cpu = time.perf_counter(), time.process_time()

    def _report(self, what: dict[str, object]) -> None:
        self._reports.write(json.dumps(what) + "\n")


def _reset_peak() -> None:
    """Let the kernel's high-water mark of resident memory start anew (5: see proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak_anonymous_mib() -> float:
    """High-water mark of resident memory less what maps files or is shared, which does not shrink meanwhile."""
    lines = (line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {key: int(value.split()[0]) for key, value in lines if value.strip().endswith("kB")}
    return (kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"]) / 1024
