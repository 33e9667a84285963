"""The ranks of one contestant: started as processes of their own, let take steps one at a time, ended for certain."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meter import REPORTS, TURNS

TAIL = 30
"""Lines of the log of a failed rank that are shown."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of all ranks together: it lasts as long as the slowest; `loss` is the mean of what ranks know."""

    cpu_s: float
    seconds: float
    loss: float


class RunFailed(Exception):
    """A rank ended with an error, or took too long; the message shows the log of the rank to blame."""


class Contestant:
    """`world` ranks of `command` over gloo, one thread each. Use as a context manager: no process is left behind."""

    def __init__(
        self, command: Sequence[str], *, world: int, timeout_s: float, extra: Mapping[str, str] | None = None
    ) -> None:
        self.command, self.world, self.timeout_s, self.extra = list(command), world, timeout_s, dict(extra or {})
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._turns: list[int] = []
        self._reports: list[int] = []
        self._texts = [b""] * world
        self._folder = tempfile.TemporaryDirectory(prefix="shardsmith-bench-")

    def __enter__(self) -> Contestant:
        base = {**os.environ, **_environment(self.world), **self.extra}
        for rank in range(self.world):
            (turn_in, turn_out), (report_in, report_out) = os.pipe(), os.pipe()
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), TURNS: str(turn_in), REPORTS: str(report_out)}
            with self._log(rank).open("wb") as log:
                process = subprocess.Popen(
                    self.command,
                    env={**base, **own, "BENCH_NOTES": self._folder.name},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(turn_in, report_out),
                )
            os.close(turn_in)
            os.close(report_out)
            self._ranks.append(process)
            self._turns.append(turn_out)
            self._reports.append(report_in)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
        for descriptor in (*self._turns, *self._reports):
            os.close(descriptor)
        self._folder.cleanup()

    def wait_until_ready(self) -> None:
        """Return when all ranks are built and wait for their turn."""
        self._next_reports()

    def step(self) -> Step:
        """Let all ranks take one step."""
        for turn in self._turns:
            os.write(turn, b".")
        reports = self._next_reports()
        losses = [r["loss"] for r in reports if r["loss"] is not None]
        return Step(
            cpu_s=sum(r["cpu"] for r in reports),
            seconds=max(r["seconds"] for r in reports),
            loss=sum(losses) / len(losses),
        )

    def finish(self) -> float:
        """After the last step: the peaks of anonymous memory of all ranks, summed, in MiB."""
        for turn in self._turns:
            os.write(turn, b".")
        return float(sum(r["peak_anonymous_mib"] for r in self._next_reports()))

    def _next_reports(self) -> list[dict[str, Any]]:
        """One line from every rank, in order of rank; raises `RunFailed` when one ends or none comes in time."""
        deadline = time.monotonic() + self.timeout_s
        found: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as waiting:
            for rank, descriptor in enumerate(self._reports):
                waiting.register(descriptor, selectors.EVENT_READ, rank)
            while len(found) < self.world:
                ready = waiting.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RunFailed(f"no step within {self.timeout_s:.0f} s\n{self._blame()}")
                for key, _ in ready:
                    rank, chunk = key.data, os.read(key.fd, 65536)
                    if not chunk:
                        raise RunFailed(f"rank {rank} ended early\n{self._blame()}")
                    self._texts[rank] += chunk
                    line, end, rest = self._texts[rank].partition(b"\n")
                    if end:
                        found[rank], self._texts[rank] = json.loads(line), rest
                        waiting.unregister(key.fd)
        return [found[rank] for rank in range(self.world)]

    def _blame(self) -> str:
        """The log of the first rank whose error is not merely that another one went away."""
        time.sleep(2)  # the others' own errors reach their logs
        texts = [self._log(rank).read_text(errors="replace").strip() for rank in range(self.world)]
        own = [i for i, text in enumerate(texts) if "Error" in text and "Connection" not in text.splitlines()[-1]]
        blamed = own[0] if own else 0
        return f"rank {blamed}:\n" + "\n".join(texts[blamed].splitlines()[-TAIL:])

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"


def _environment(world: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
    }
