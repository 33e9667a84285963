"""This process as one rank of a started job: its device and its process group.

Starting checks, within the timeout, that each rank is there exactly once and that all compute on one kind of device.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from shardsmith.engine.runtime.environment import Environment
from shardsmith.errors import Code
from shardsmith.units import counted

DeviceChoice = Literal["auto", "cpu", "cuda"]

NO_MASTER = Code(
    code="R102",
    title="no address of rank 0",
    because="the ranks find each other at an address that rank 0 listens on",
)
TWICE = Code(
    code="R103",
    title="a rank is there twice",
    because="each rank belongs to one process; a second one would corrupt logs and checkpoints",
)
MISSING = Code(
    code="R104",
    title="a rank did not start",
    because="the plan needs all its ranks; the start waits for them only so long",
)
DEVICES = Code(
    code="R105",
    title="too few devices for the ranks",
    because="each rank needs a device of its own, and all ranks must compute on the same kind",
)

_starts = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Process:
    """A rank whose process group has started: where it computes and how it communicates."""

    environment: Environment
    device: torch.device
    backend: str
    timeout_s: float


def start(environment: Environment, *, timeout_s: float = 300.0, device: DeviceChoice = "auto") -> Process:
    """Join the other ranks in a process group: NCCL where every rank has a GPU of its own, else gloo on CPU.

    No wait, now or in a later collective, lasts longer than `timeout_s` seconds. Raises `Refused`: a rank is
    there twice (R103) or did not start in time (R104), nobody says where rank 0 is (R102), or only some ranks
    have a GPU (R105).
    """
    assert not dist.is_initialized(), "the process group has already started"
    attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_starts)}"
    store = PrefixStore(f"shardsmith/{attempt}", _store(environment, timeout_s, attempt))
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    with_gpu = _arrive(environment, store, timeout_s, has_gpu=environment.local_rank < gpus)
    if with_gpu not in (0, environment.world) or (device == "cuda" and not with_gpu):
        raise DEVICES.refuse(
            f"{with_gpu} of {environment.world} ranks have a GPU of their own",
            (environment.launcher, f"world = {environment.world}, local_rank = {environment.local_rank}"),
            ("this node", counted(gpus, "GPU")),
            hint=f"at most {counted(gpus, 'rank')} on this node, "
            "or CUDA_VISIBLE_DEVICES= (empty) to compute on the CPU",
        )
    chosen = torch.device("cuda", environment.local_rank) if with_gpu else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if with_gpu else "gloo"
    if with_gpu:
        torch.cuda.set_device(chosen)
    dist.init_process_group(
        backend,
        store=store,
        rank=environment.rank,
        world_size=environment.world,
        timeout=timedelta(seconds=timeout_s),
        device_id=chosen if with_gpu else None,
    )
    # a rank that is done at once must not close connections that others are still opening
    dist.barrier()
    return Process(environment=environment, device=chosen, backend=backend, timeout_s=timeout_s)


def preload() -> None:
    """Import now what torch imports when an optimiser first steps, so that ranks forked from here share it.

    Otherwise each rank spends 1.7 s of its own CPU time on that (torch 2.13), which is most of a short run.
    """
    import_module("torch._dynamo")


def stop() -> None:
    """Leave the process group; harmless where none has started."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _store(environment: Environment, timeout_s: float, attempt: str) -> Store:
    """The place where ranks find each other."""
    wait = timedelta(seconds=timeout_s)
    if environment.world == 1:
        return HashStore()
    if environment.master.startswith("file://"):
        # the last to close a file removes it, so each attempt has its own
        store: Store = FileStore(f"{environment.master.removeprefix('file://')}.{attempt}", environment.world)
        store.set_timeout(wait)
        return store
    if not environment.master:
        raise NO_MASTER.refuse(
            f"rank {environment.rank} does not know where rank 0 is",
            (environment.launcher, f"rank = {environment.rank}, world = {environment.world}"),
            hint="set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port on it",
        )
    host, _, port = environment.master.rpartition(":")
    # torchrun already serves the store at that address
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serve = environment.rank == 0 and not (environment.launcher == "torchrun" and served)
    try:
        return TCPStore(host, int(port), environment.world, serve, timeout=wait, wait_for_workers=False)
    except dist.DistNetworkError as error:
        if serve:
            raise TWICE.refuse(
                f"rank 0 cannot listen at {environment.master}: another process does, a second rank 0 or another job",
                (environment.launcher, f"rank = 0, master = {environment.master}"),
                hint="end the other process, or choose another MASTER_PORT",
            ) from error
        raise _missing(environment, [0], timeout_s) from error


def _arrive(environment: Environment, store: Store, timeout_s: float, *, has_gpu: bool) -> int:
    """Wait until each rank is there exactly once; returns how many have a GPU of their own."""
    rank, world = environment.rank, environment.world
    if store.add(f"claim/{rank}", 1) > 1:
        store.set("go", str(rank))
        raise _twice(environment, rank)
    store.add("gpus", int(has_gpu))
    if store.add("arrived", 1) == world:
        store.set("go", "all")
    if not _waited(lambda slice_s: store.wait(["go"], timedelta(seconds=slice_s)), timeout_s):
        absent = [other for other in range(world) if not store.check([f"claim/{other}"])]
        raise _missing(environment, absent, timeout_s)
    word = store.get("go").decode()
    if word != "all":
        raise _twice(environment, int(word))
    return int(store.add("gpus", 0))


def _waited(wait: Callable[[float], None], timeout_s: float) -> bool:
    """Whether `wait(seconds)` came back in time; slices keep the process open to signals."""
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        try:
            wait(min(left, 1.0))
        except RuntimeError as error:
            # a FileStore reports its timeout as a plain RuntimeError; a lost connection is no timeout
            if not isinstance(error, dist.DistStoreError) and "timeout" not in str(error).lower():
                raise
            continue
        return True
    return False


def _twice(environment: Environment, rank: int) -> Exception:
    return TWICE.refuse(
        f"two processes claim to be rank {rank} of {environment.world}",
        (environment.launcher, f"rank = {environment.rank}, world = {environment.world}"),
        hint="let one launcher number the processes (torchrun, srun or mpirun), or set RANK differently in each",
    )


def _missing(environment: Environment, absent: list[int], timeout_s: float) -> Exception:
    names = ", ".join([f"rank {rank}" for rank in absent[:8]] + ["..."] * (len(absent) > 8))
    hint = "start every rank; within a SLURM job, with srun" if environment.launcher == "slurm" else "start every rank"
    return MISSING.refuse(
        f"{len(absent)} of {environment.world} ranks did not start within {timeout_s:g} s: {names}",
        (environment.launcher, f"rank = {environment.rank}, world = {environment.world}"),
        hint=hint,
    )
