"""Run a function on N forked local ranks and get its results: parity checks and tests start ranks this way.

Forking from a process that has imported torch takes a fraction of a second; a fresh interpreter a rank takes many.
The parent must not have trained anything itself: threads of its autograd or OpenMP pools do not survive a fork.
So a one-process reference is also a fork, of world 1.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from shardsmith.engine.runtime import environment, failures, process

T = TypeVar("T")

GRACE_S = 5.0
"""How long an ended rank may take to go before it is killed."""


def run_forked(
    function: Callable[..., T],
    world: int,
    *args: Any,
    timeout_s: float = 120.0,
    wait_s: float = 30.0,
    threads: int = 1,
    join: bool = True,
) -> list[T]:
    """Call `function(*args)` on `world` forked ranks with gloo on CPU; returns the results in order of rank.

    The function finds its process group started (`join=False`: only its environment set, for a function that
    starts its own). Results come back by pickle; tensors may be large. All ranks are gone on return. Raises
    `RankFailed` with the first rank's own error (R201), the signal that killed one (R202), who kept the others
    waiting more than `wait_s` seconds in one collective (R203), or who was not done after `timeout_s` (R204).
    """
    assert world >= 1, f"world = {world}: at least one rank runs"
    process.preload()
    with tempfile.TemporaryDirectory(prefix="shardsmith-ranks-") as name:
        folder = Path(name)
        fork = multiprocessing.get_context("fork")
        children = [
            fork.Process(target=_rank, args=(function, args, rank, world, folder, wait_s, threads, join), daemon=False)
            for rank in range(world)
        ]
        try:
            for child in children:
                child.start()
            exit_codes = _watch(children, time.monotonic() + timeout_s)
        finally:
            _end(children)
        if len(exit_codes) < world or any(exit_codes.values()):
            raise failures.judge(folder, world, exit_codes=exit_codes, unfinished_after_s=timeout_s)
        return [pickle.loads((folder / f"rank{rank}.result").read_bytes()) for rank in range(world)]


def _rank(
    function: Callable[..., Any],
    args: Sequence[Any],
    rank: int,
    world: int,
    folder: Path,
    wait_s: float,
    threads: int,
    join: bool,
) -> None:
    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # a killed parent leaves no orphans
    failures.prepare_rank(folder, rank, keep_terminal=False)
    os.environ.update(environment.local_variables(rank, world, master=f"file://{folder}/rendezvous"))
    torch.set_num_threads(threads)

    def call() -> None:
        if join:
            process.start(environment.detect(), timeout_s=wait_s, device="cpu")
        result = function(*args)
        (folder / f"rank{rank}.result").write_bytes(pickle.dumps(result, pickle.HIGHEST_PROTOCOL))
        if join:
            process.stop()

    failures.run_guarded(call, (), folder, rank)


def _watch(children: Sequence[ForkProcess], deadline: float) -> dict[int, int]:
    """Wait until all are gone, one failed, or time is up; the exit codes of those that are gone, by rank."""
    waiting = list(children)
    while waiting:
        left = deadline - time.monotonic()
        connection.wait([child.sentinel for child in waiting], timeout=max(left, 0.0))
        waiting = [child for child in children if child.is_alive()]
        failed = any(child.exitcode for child in children if child not in waiting)
        if failed or time.monotonic() >= deadline:
            break
    return {rank: child.exitcode for rank, child in enumerate(children) if child.exitcode is not None}


def _end(children: Sequence[ForkProcess]) -> None:
    """End what still runs: first so that it leaves its stack behind, then for certain."""
    started = [child for child in children if child.pid is not None]
    for child in started:
        child.terminate()
    deadline = time.monotonic() + GRACE_S
    for child in started:
        child.join(max(deadline - time.monotonic(), 0.0))
        if child.is_alive():
            child.kill()
        child.join(GRACE_S)
