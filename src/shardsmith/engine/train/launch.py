"""Start local ranks under torch's elastic agent, and end all of them when one dies.

Where a launcher has already made this process a rank (torchrun, srun, mpirun), the function just runs here.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from shardsmith.engine.runtime import environment, failures, process, progress

T = TypeVar("T")

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch(function: Callable[..., T], args: Sequence[Any], *, world: int, timeout_s: float, log_dir: str | Path) -> T:
    """Call `function(*args)` on `world` local ranks, or here where this process already is one of `world` ranks.

    Returns what rank 0, or this process as a rank, returned.

    Each rank finds its place by `environment.detect()`. Rank 0 keeps the terminal; the others write to
    `log_dir/rank<N>.log`. When a rank dies all are ended, and `RankFailed` carries its own error (R201), the
    signal that killed it (R202), or who kept the others waiting (R203). `timeout_s` seconds bound the
    rendezvous. SIGINT ends all ranks and then this process (KeyboardInterrupt). SIGTERM is passed on to the
    ranks: if they end well, having noticed it, this returns as ever; if they do not, or at a second SIGTERM,
    all end, and then this process (SystemExit 143).
    Raises `Refused` (R106) if a launcher started another number of ranks.
    """
    folder = Path(log_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    here = environment.detect()
    if here.launcher == "none":
        failures.clear(folder)
        return _run_agent(function, tuple(args), world, timeout_s, folder)
    environment.require_world(here, world)
    progress.start_notes(folder, here.rank)
    try:
        return function(*args)
    except Exception as error:
        failures.write_failure(failures.describe(here.rank, error), folder)
        failures.explain_here(here.rank, world, folder, error)
        raise
    finally:
        progress.stop_notes()


def _run_agent(function: Callable[..., T], args: tuple[Any, ...], world: int, timeout_s: float, folder: Path) -> T:
    # asking NVML instead of the CUDA runtime keeps CUDA usable in forked ranks
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    process.preload()
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id="shardsmith",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"timeout": int(max(timeout_s, 1)), "is_host": True},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle=",".join(number.name for number in _SIGNALS if number is not signal.SIGTERM),
    )
    gc.collect()  # what an earlier launch left behind must not be destroyed in a fork, where its threads are missing
    with _kept_signals(), _quiet_agent(), _passing_on() as terminated:
        try:
            returned: dict[int, T] = elastic_launch(config, _rank)(function, args, world, folder)
            return returned[0]
        except ChildFailedError as error:
            if terminated():
                raise SystemExit(128 + signal.SIGTERM) from None
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            raise failures.judge(folder, world, exit_codes=codes) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None


@contextmanager
def _passing_on() -> Iterator[Callable[[], bool]]:
    """The first SIGTERM goes on to the ranks and a second one ends all; yields whether one has come."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    came: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)
        again = len(came) > 1
        for child in multiprocessing.active_children():
            with suppress(ProcessLookupError):
                # To a rank that trains, SIGTERM is a request, however often it comes; SIGINT ends it.
                os.kill(child.pid or 0, signal.SIGINT if again else number)
        if again:
            raise SignalException("a second SIGTERM", signal.Signals(number))

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
    yield lambda: bool(came)


def _rank(function: Callable[..., T], args: tuple[Any, ...], world: int, folder: Path) -> T:
    """One forked rank, from its first line to its last."""
    rank = int(os.environ["RANK"])
    failures.prepare_rank(folder, rank, keep_terminal=rank == 0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // world))
    result: T = failures.run_guarded(function, args, folder, rank)
    return result


@contextmanager
def _kept_signals() -> Iterator[None]:
    """Give signals back the handlers that they had before the agent took them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent's own reports name the process that ended first, not the error that came first: keep them out."""
    agents = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(agents)]
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for logger in levels:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
