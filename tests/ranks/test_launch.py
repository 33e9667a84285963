"""Ranks under the elastic agent: a dead one ends all soon, and its own error is the one shown (cases E01, E02)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardsmith.engine.runtime import progress
from shardsmith.engine.runtime.environment import detect, local_variables
from shardsmith.engine.runtime.failures import RankFailed
from shardsmith.engine.runtime.process import start, stop
from shardsmith.engine.train.launch import launch
from shardsmith.errors import Refused

pytestmark = pytest.mark.ranks

BOUND_S = 30.0


def all_gone(folder):
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    return bool(pids) and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def begin(folder, timeout_s=20.0):
    here = detect()
    (folder / f"{here.rank}.pid").write_text(str(os.getpid()))
    start(here, timeout_s=timeout_s, device="cpu")
    return here.rank


def reduce(operation="all_reduce"):
    x = torch.ones(1)
    progress.joining(operation, group="data", ranks=range(dist.get_world_size()))
    dist.all_reduce(x)
    return x.item()


def counts(folder):
    rank = begin(folder)
    print(f"hello from rank {rank}")
    (folder / f"{rank}.sum").write_text(str(reduce()))
    stop()


@pytest.mark.parametrize("world", [1, 2, 8])
def test_ranks_start_soon(tmp_path, world, capfd):
    began = time.monotonic()
    launch(counts, (tmp_path,), world=world, timeout_s=60, log_dir=tmp_path / "ranks")
    took = time.monotonic() - began
    assert took < BOUND_S
    assert [(tmp_path / f"{rank}.sum").read_text() for rank in range(world)] == [str(float(world))] * world
    assert all_gone(tmp_path)
    # rank 0 keeps the terminal, the others have their logs
    out, err = capfd.readouterr()
    assert out.strip() == "hello from rank 0"
    assert err == ""
    for rank in range(1, world):
        assert (tmp_path / "ranks" / f"rank{rank}.log").read_text() == f"hello from rank {rank}\n"


def loops(folder):
    rank = begin(folder)
    for step in range(10**6):
        progress.at_step(step)
        reduce()
        if rank == 1 and step == 50:
            (folder / "running").touch()


def die_in_step_20(folder):
    rank = begin(folder)
    for step in range(10**6):
        progress.at_step(step)
        reduce()
        if (rank, step) == (1, 20):
            (folder / "killed at").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_ends_all(tmp_path, capfd):
    with pytest.raises(RankFailed, match=r"rank 1 was killed by signal 9 \(SIGKILL\) in step 20") as failed:
        launch(die_in_step_20, (tmp_path,), world=3, timeout_s=60, log_dir=tmp_path / "ranks")
    assert time.monotonic() - float((tmp_path / "killed at").read_text()) < BOUND_S
    assert (failed.value.rank, failed.value.step) == (1, 20)
    assert all_gone(tmp_path)
    assert capfd.readouterr().err == ""  # the echo on rank 0 is not shown


def out_of_memory_in_step_2(folder):
    rank = begin(folder)
    for step in range(5):
        progress.at_step(step)
        reduce()
        if (rank, step) == (1, 2):
            print("two more tokens")
            raise MemoryError("no room for the logits")
        reduce()


def test_e02_memory_error_between_two_collectives(tmp_path):
    with pytest.raises(RankFailed) as failed:
        launch(out_of_memory_in_step_2, (tmp_path,), world=2, timeout_s=60, log_dir=tmp_path / "ranks")
    text = str(failed.value)
    assert "error[R201]: rank 1 failed in step 2: MemoryError: no room for the logits" in text
    assert "in out_of_memory_in_step_2" in text
    assert f"rank 1 had printed to {tmp_path}/ranks/rank1.log:\n  | two more tokens" in text
    assert "peer" not in text
    assert all_gone(tmp_path)


SKIPS = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from test_launch import begin, launch, progress, reduce, stop
from shardsmith.errors import Refused

def skips(folder):
    rank = begin(folder, timeout_s=5)
    for step in range(3):
        progress.at_step(step)
        if (rank, step) != (1, 2):
            reduce()
    if {stays} and rank == 1:
        time.sleep(600)
    stop()

try:
    launch(skips, (Path({folder!r}),), world=2, timeout_s=60, log_dir={folder!r} + "/ranks")
except Refused as refused:
    sys.exit(str(refused))
"""


@pytest.mark.alone
@pytest.mark.parametrize("stays", [True, False])
def test_e01_one_rank_skips_an_all_reduce(tmp_path, stays):
    script = SKIPS.format(here=str(Path(__file__).parent), stays=stays, folder=str(tmp_path))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    ended = time.time()
    assert run.returncode == 1, run.stderr
    assert "error[R203]: rank 1 did not join all_reduce number 3 of group data [0, 1]" in run.stderr
    assert ("it was at" if stays else "it had already returned") in run.stderr
    assert "rank 0 waited in vain" in run.stderr
    assert all_gone(tmp_path)
    began = max(path.stat().st_mtime for path in tmp_path.glob("*.pid"))
    assert ended - began < 15  # both gone within 15 s of their start


LOOPS = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_launch import launch, loops
launch(loops, (Path({folder!r}),), world=2, timeout_s=60, log_dir={folder!r} + "/ranks")
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -2), (signal.SIGKILL, -9)])
def test_a_signal_to_the_parent_ends_all(tmp_path, number, status):
    script = LOOPS.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as parent:
        deadline = time.monotonic() + 60
        while not (tmp_path / "running").exists():
            assert time.monotonic() < deadline, "the ranks never started"
            time.sleep(0.05)
        parent.send_signal(number)
        assert parent.wait(timeout=BOUND_S) == status
    while not all_gone(tmp_path):
        assert time.monotonic() < deadline + BOUND_S, "ranks outlived their parent"
        time.sleep(0.05)


def test_signal_handlers_are_given_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    launch(counts, (tmp_path,), world=1, timeout_s=60, log_dir=tmp_path / "ranks")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_under_a_launcher_the_function_runs_here(tmp_path, monkeypatch):
    for name, value in local_variables(0, 1, master=f"file://{tmp_path}/meet").items():
        monkeypatch.setenv(name, value)
    pids = []
    launch(lambda: pids.append(os.getpid()), (), world=1, timeout_s=5, log_dir=tmp_path)
    assert pids == [os.getpid()]
    with pytest.raises(Refused, match=r"R106.*the plan needs 4 ranks, but 1 were started"):
        launch(print, (), world=4, timeout_s=5, log_dir=tmp_path)
    with pytest.raises(KeyError):  # its own error, as it was
        launch(lambda: {}["missing"], (), world=1, timeout_s=5, log_dir=tmp_path)


def test_a_lone_process_is_no_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert detect().launcher == "none"
