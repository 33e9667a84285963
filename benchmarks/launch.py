"""Start the ranks of one run as processes of their own, wait with a time limit, and sum up what they measured."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meter import OUT
from workload import TOKENS_PER_STEP

HERE = Path(__file__).parent
TAIL = 30
"""Lines of the log of a failed rank that are shown."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run, over all its ranks: steady figures are medians over the steps after warm-up."""

    cpu_s_per_step: float
    tokens_per_s: float
    anonymous_mib: float
    losses: tuple[float, ...]


class RunFailed(Exception):
    """A rank ended with an error, or the run took too long; the message shows the log of the rank to blame."""


def run(command: Sequence[str], *, world: int, timeout_s: float, extra: Mapping[str, str] | None = None) -> Measured:
    """Run `command` on `world` ranks over gloo, one thread each; no process is left behind."""
    with tempfile.TemporaryDirectory(prefix="shardsmith-bench-") as name:
        out = Path(name)
        logs = [(out / f"rank{rank}.log").open("w+") for rank in range(world)]
        base = {**os.environ, **_environment(world, out), **(extra or {})}
        ranks = [
            subprocess.Popen(
                list(command),
                env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=logs[rank],
                stderr=subprocess.STDOUT,
            )
            for rank in range(world)
        ]
        try:
            reason = _wait(ranks, timeout_s)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                rank.wait()
        if reason is not None:
            raise RunFailed(f"{reason}\n{_blame(out, world)}")
        return summarise([json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world)])


def summarise(ranks: Sequence[dict[str, Any]]) -> Measured:
    """Sums over ranks of CPU time and memory; a step lasts as long as its slowest rank."""
    warmup, steps = ranks[0]["warmup"], len(ranks[0]["cpu"])
    steady = range(warmup, steps)
    cpu = [sum(rank["cpu"][step] for rank in ranks) for step in steady]
    seconds = [max(rank["seconds"][step] for rank in ranks) for step in steady]
    losses = []
    for step in range(steps):
        known = [rank["losses"][step] for rank in ranks if rank["losses"][step] is not None]
        losses.append(sum(known) / len(known))
    return Measured(
        cpu_s_per_step=statistics.median(cpu),
        tokens_per_s=TOKENS_PER_STEP / statistics.median(seconds),
        anonymous_mib=sum(rank["peak_anonymous_mib"] for rank in ranks),
        losses=tuple(losses),
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> str | None:
    """None when all ended well; else why not, as soon as one has failed or time is up."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [index for index, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            time.sleep(2)  # the others' own errors reach their logs
            return f"rank {failed[0]} ended with exit code {codes[failed[0]]}"
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return f"not done after {timeout_s:.0f} s"
        time.sleep(0.05)


def _environment(world: int, out: Path) -> dict[str, str]:
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
        OUT: str(out),
    }


def _blame(out: Path, world: int) -> str:
    """The log of the first rank whose error is not merely that another one went away."""
    texts = [(out / f"rank{rank}.log").read_text(errors="replace").strip() for rank in range(world)]
    own = [i for i, text in enumerate(texts) if "Error" in text and "Connection" not in text.splitlines()[-1]]
    blamed = own[0] if own else 0
    return f"rank {blamed}:\n" + "\n".join(texts[blamed].splitlines()[-TAIL:])


if __name__ == "__main__":
    print(run(sys.argv[2:], world=int(sys.argv[1]), timeout_s=300))
