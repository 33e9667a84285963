"""Forked ranks: results come back, the first real failure is the one shown, nothing is left behind."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardsmith.engine.runtime import progress
from shardsmith.engine.runtime.environment import detect, local_variables
from shardsmith.engine.runtime.failures import RankFailed
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.engine.runtime.process import start, stop
from shardsmith.errors import Refused

pytestmark = [pytest.mark.ranks, pytest.mark.alone]


def summed(scale):
    x = torch.full((3,), float(dist.get_rank()) * scale)
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), x


def test_results_in_order_of_rank(run_ranks):
    for rank, (rank_there, world, threads, x) in enumerate(run_ranks(3, summed, 10.0)):
        assert (rank_there, world, threads, x.tolist()) == (rank, 3, 1, [30.0] * 3)


def test_one_process_reference_trains_in_a_fork(run_ranks):
    def trained():
        w = torch.ones(64, 64, requires_grad=True)
        (w @ w).sum().backward()
        dist.all_reduce(w.grad)
        return w.grad

    assert run_ranks(1, trained)[0][0, 0] == 128


def test_large_results(run_ranks):
    values = run_ranks(2, lambda: torch.full((2**20, 4), 1.5))
    assert [tuple(v.shape) for v in values] == [(2**20, 4)] * 2
    assert values[1][-1, -1] == 1.5


def fails_on_one(error):
    dist.barrier()
    if dist.get_rank() == 1:
        progress.at_step(2)
        time.sleep(0.2)
        raise error
    dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize("error", [ValueError("the real reason"), MemoryError("the real reason"), SystemExit(3)])
def test_the_first_real_failure_is_shown(run_ranks, error):
    with pytest.raises(RankFailed) as failed:
        run_ranks(3, fails_on_one, error)
    text = str(failed.value)
    assert (failed.value.rank, failed.value.step) == (1, 2)
    assert f"rank 1 failed in step 2: {type(error).__name__}: {error}" in text
    assert "fails_on_one" in text  # the traceback
    assert "closed by peer" not in text


def test_a_refusal_keeps_its_code(run_ranks):
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, lambda: detect({"RANK": "0"}))
    assert failed.value.faults[0].code == "R101"
    assert "WORLD_SIZE" in str(failed.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named_with_its_signal(run_ranks, number):
    def killed():
        dist.barrier()
        if dist.get_rank() == 2:
            os.kill(os.getpid(), number)
        dist.all_reduce(torch.ones(2))

    with pytest.raises(RankFailed, match=rf"rank 2 was killed by signal {number.value} \({number.name}\)") as failed:
        run_ranks(3, killed)
    assert failed.value.faults[0].code == "R202"


def stuck_here(folder):
    (folder / str(os.getpid())).touch()
    if dist.get_rank() > 0:
        while True:
            time.sleep(0.1)


def test_a_timeout_names_who_did_not_finish_and_where_and_ends_them(tmp_path):
    began = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_forked(stuck_here, 3, tmp_path, timeout_s=4.0)
    assert time.monotonic() - began < 20
    text = str(failed.value)
    assert "2 of 3 ranks had not finished after 4 s" in text
    assert "rank 1: it was at" in text
    assert "rank 2: it was at" in text
    assert "in stuck_here" in text
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def skips(collectives):
    everybody = range(dist.get_world_size())
    for _ in range(collectives[dist.get_rank()]):
        progress.joining("all_reduce", group="data", ranks=everybody)
        dist.all_reduce(torch.ones(2))
    while dist.get_rank() in (1, 2):
        time.sleep(0.1)


def test_who_kept_the_others_waiting():
    with pytest.raises(RankFailed) as failed:
        run_forked(skips, 3, (2, 1, 2), wait_s=2.0, timeout_s=60)
    assert failed.value.faults[0].code == "R203"
    assert failed.value.rank == 1
    assert "rank 1 did not join all_reduce number 2 of group data [0, 1, 2]: it was at" in str(failed.value)
    assert "in skips" in str(failed.value)


def test_who_kept_the_others_waiting_without_notes():
    def silent():
        if dist.get_rank() == 1:
            time.sleep(60)
        dist.all_reduce(torch.ones(2))

    with pytest.raises(RankFailed, match="rank 1 has no error of its own: it was at") as failed:
        run_forked(silent, 2, wait_s=2.0, timeout_s=60)
    assert failed.value.faults[0].code == "R203"


def claim(variables, timeout_s):
    began = time.monotonic()
    try:
        start(detect(variables), timeout_s=timeout_s, device="cpu")
    except Refused as refused:
        return refused.faults[0].code, str(refused), time.monotonic() - began
    stop()
    return "started", "", time.monotonic() - began


@pytest.mark.parametrize("launched", ["file", "port"])
def test_h08_two_processes_both_claim_rank_0(tmp_path, launched):
    variables = local_variables(0, 2, master=f"file://{tmp_path}/meet")
    if launched == "port":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free)}
    answers = run_forked(claim, 2, variables, 5.0, join=False, timeout_s=30)
    codes = sorted(code for code, _, _ in answers)
    # with a file both learn of it; on a port the second cannot listen and the first misses rank 1
    assert codes == (["R103", "R103"] if launched == "file" else ["R103", "R104"])
    assert all("rank = 0" in text for _, text, _ in answers)
    assert all(seconds < 15 for _, _, seconds in answers)


def test_a_rank_that_never_comes_is_named(tmp_path):
    variables = local_variables(0, 3, master=f"file://{tmp_path}/meet")
    [(code, text, _)] = run_forked(claim, 1, variables, 1.5, join=False, timeout_s=30)
    assert code == "R104"
    assert "2 of 3 ranks did not start within 1.5 s: rank 1, rank 2" in text


def test_a_group_starts_again_after_it_stopped(run_ranks):
    def twice():
        stop()
        sums = []
        for _ in range(2):
            start(detect(), timeout_s=20, device="cpu")
            x = torch.ones(1)
            dist.all_reduce(x)
            sums.append(x.item())
            stop()
        return sums

    assert run_ranks(2, twice) == [[2.0, 2.0]] * 2
