"""Checkpoints that are torn, incomplete or of another run (cases D16, D22, D24, E11)."""

import logging
import os
import pickle
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointing import MODEL, Rank, job_of, run_job

from shardsmith import api
from shardsmith.engine.checkpoint import store
from shardsmith.engine.checkpoint.blocks import stored_tensors
from shardsmith.engine.runtime.failures import RankFailed
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.engine.train import checkpoints
from shardsmith.errors import Refused
from shardsmith.specs.job import Data, Optimisation

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

PLAN = "data=2,zero=1"


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(number, function, instead):
    """`function`, but `instead` at its call of that number (from 1)."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(1)
        return (instead if len(calls) == number else function)(*args, **kwargs)

    return wrapped


def half_a_file(writer, plan, planner):
    """Write some of what was planned, and die."""
    dcp.FileSystemWriter.write_data = WRITE_DATA
    WRITE_DATA(writer, replace(plan, items=plan.items[:2]), planner)
    die()


WRITE_DATA = dcp.FileSystemWriter.write_data
KILLS = {
    "before the first file": lambda: setattr(checkpoints, "write_blocks", die),
    "in the middle of the weights": lambda: setattr(dcp.FileSystemWriter, "write_data", half_a_file),
    "before the optimiser": lambda: setattr(checkpoints, "write_blocks", on_call(2, checkpoints.write_blocks, die)),
    "before the metadata": lambda: setattr(
        dcp.FileSystemWriter, "finish", on_call(2, dcp.FileSystemWriter.finish, die)
    ),
    "before the mark": lambda: setattr(store, "mark", die),
}


def killed_in_the_second_save(job, where):
    rank = Rank(job)
    rank.steps(0, 1)
    rank.checkpoints.save(1)
    rank.steps(1, 2)
    if dist.get_rank() == 0:
        KILLS[where]()
    rank.checkpoints.save(2)


def resume(job, steps=0):
    rank = Rank(job)
    rank.checkpoints.resume()
    first = rank.checkpoints.step
    return first, rank.steps(first, first + steps)


@pytest.mark.parametrize("where", KILLS)
def test_d16_a_save_that_was_killed_is_never_resumed_from(tmp_path, where):
    job = job_of(tmp_path, PLAN)
    with pytest.raises(RankFailed) as failed:
        run_job(killed_in_the_second_save, job, where, timeout_s=90)
    assert failed.value.faults[0].code == "R202"
    assert failed.value.rank == 0
    root = tmp_path / "checkpoints"
    assert store.newest(root, ("weights", "optimizer")) == store.Found(folder=root / "step-00000001")
    if where == "in the middle of the weights":
        # what it left behind is in nobody's way
        assert len(list(root.iterdir())) == 2
        assert run_job(resume_and_save, job, timeout_s=90) == [1, 1]
        assert sorted(path.name for path in root.iterdir()) == ["step-00000001", "step-00000002"]


def resume_and_save(job):
    rank = Rank(job)
    rank.checkpoints.resume()
    first = rank.checkpoints.step
    rank.steps(first, 2)
    rank.checkpoints.save(2)
    return first


def save_at(job, *steps):
    """Train, saving at each of `steps`; returns the losses of the three steps after the last."""
    rank = Rank(job)
    at = 0
    for step in steps:
        rank.steps(at, step)
        rank.checkpoints.save(step)
        at = step
    return rank.steps(at, at + 3)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A run with checkpoints of steps 2 and 5, and the losses after them."""
    root = tmp_path_factory.mktemp("two")
    losses = run_job(save_at, job_of(root, PLAN, keep=0), 2, 5, timeout_s=90)[0]
    return root, losses


@pytest.fixture
def run(two, tmp_path):
    """A copy of that run, to be damaged."""
    shutil.copytree(two[0] / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def test_d16_one_byte_less_is_detected_and_the_one_before_is_taken(run, caplog):
    file = run / "checkpoints" / "step-00000005" / "weights" / "__1_0.distcp"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - 1)
    found = store.newest(run / "checkpoints", ("weights", "optimizer"))
    assert found.folder == run / "checkpoints" / "step-00000002"
    (warning,) = found.warnings
    assert (warning.code, warning.severity) == ("F507", "warning")
    assert f"weights/__1_0.distcp has {size - 1} bytes instead of {size}" in warning.message
    with caplog.at_level(logging.WARNING, "shardsmith.checkpoint"):
        assert run_job(resume_saying, job_of(run, PLAN), timeout_s=90)[0][0] == 2
    # named, it is refused: going back three steps was not asked for
    with pytest.raises(Refused) as refused:
        store.named(file.parents[1], ("weights", "optimizer"))
    assert refused.value.faults[0].code == "F507"
    assert refused.value.faults[0].hint == "step-00000002 beside it is complete"


def resume_saying(job):
    """The first step and what rank 0 was told."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("shardsmith.checkpoint").addHandler(handler)
    rank = Rank(job)
    rank.checkpoints.resume()
    counters = {int(state["step"]) for state in rank.trainer.optimizer.state.values()}
    return rank.checkpoints.step, said, counters, rank.steps(rank.checkpoints.step, rank.checkpoints.step + 3)


def test_d24_moments_are_loaded_or_waived_by_name(two, run):
    step, said, counters, losses = run_job(resume_saying, job_of(run, PLAN), timeout_s=90)[0]
    assert (step, counters, losses) == (5, {5}, two[1])
    shutil.rmtree(run / "checkpoints" / "step-00000005" / "optimizer")
    with pytest.raises(RankFailed) as failed:
        run_job(resume_saying, job_of(run, PLAN), timeout_s=90)
    assert [fault.code for fault in failed.value.faults] == ["F508"]
    assert 'run.reset = ["optimizer"]' in failed.value.faults[0].hint
    job = job_of(run, PLAN, reset=("optimizer",))
    step, said, counters, losses = run_job(resume_saying, job, timeout_s=90)[0]
    assert (step, counters) == (5, set())
    assert any("the optimiser starts without the moments" in text for text in said)
    assert losses[0] == two[1][0]  # the weights are those
    assert losses[1:] != two[1][1:]


def other_jobs(run):
    adamw = job_of(run, PLAN)
    return {
        "F503": replace(adamw, setup=replace(adamw.setup, model=MODEL.with_(norm_eps=1e-6, layers=5))),
        "F504": replace(adamw, data=Data(seed=2)),
        "F508": replace(adamw, optimisation=Optimisation(optimizer="sgd", momentum=0.9)),
        "F509": replace(adamw, run=replace(adamw.run, resume=str(run / "checkpoints" / "step-00000002"))),
        "F506": replace(adamw, run=replace(adamw.run, resume=str(run / "elsewhere"))),
    }


def refusals(jobs):
    found = {}
    for code, job in jobs.items():
        try:
            Rank(job).checkpoints.resume()
        except Refused as refused:
            found[code] = [(fault.code, fault.message) for fault in refused.faults]
    return found


def test_what_does_not_belong_together_is_refused_on_all_ranks(run):
    jobs = other_jobs(run)
    everything = replace(jobs["F503"], data=jobs["F504"].data, optimisation=jobs["F508"].optimisation)
    for found in run_forked(refusals, 2, jobs | {"all": everything}, timeout_s=120):
        assert {code for _, faults in found.items() for code, _ in faults} == {*jobs}
        for code in jobs:
            assert {said for said, _ in found[code]} == {code}
        assert [message.split(" ")[0] for _, message in found["F503"]] == ["model.layers", "model.norm_eps"]
        assert [code for code, _ in found["all"]] == ["F503", "F503", "F508", "F504"]


def test_never_means_never_and_does_not_mix_two_histories(run, tmp_path_factory):
    fresh = tmp_path_factory.mktemp("fresh")
    job = job_of(fresh, PLAN, resume="never")
    assert run_job(resume, job)[0] == (0, [])
    with pytest.raises(RankFailed) as failed:
        run_job(resume, job_of(run, PLAN, resume="never"))
    assert failed.value.faults[0].code == "F509"


def test_settings_that_contradict_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(Refused) as refused:
        api.train(job_of(tmp_path, PLAN, save_every=-1, keep=-2, resume="never", reset=("data",)))
    assert [fault.code for fault in refused.value.faults] == ["F510", "F510", "F511"]


def test_the_newest_complete_ones_are_kept(run):
    assert run_job(save_and_list, job_of(run, PLAN, keep=2, save_every=1), timeout_s=90)[0] == [
        "step-00000005",
        "step-00000006",
    ]


def save_and_list(job):
    rank = Rank(job)
    # a torn one does not count as one of those that are kept
    (rank.checkpoints.root / "step-00000004").mkdir(exist_ok=True)
    rank.checkpoints.resume()
    rank.steps(5, 6)
    rank.checkpoints.after(4)
    rank.checkpoints.after(5)
    return sorted(path.name for path in rank.checkpoints.root.iterdir())


def save_alone(job):
    rank = Rank(job)
    rank.steps(0, 1)
    began = time.monotonic()
    if dist.get_rank() == 0:
        try:
            rank.checkpoints.save(1)
        except Refused as refused:
            return refused.faults[0], time.monotonic() - began
    time.sleep(6)
    return None


@pytest.mark.alone
def test_d22_a_save_by_one_rank_alone_names_the_other(tmp_path):
    fault, seconds = run_job(save_alone, job_of(tmp_path, "tensor=2", timeout_s=3.0))[0]
    assert fault.code == "R302"
    assert "the checkpoint of step 1" in fault.message
    assert "Ranks 1 failed" in fault.message
    assert seconds < 6
    assert not (tmp_path / "checkpoints").exists()


def save_different(job):
    rank = Rank(job)
    try:
        rank.checkpoints.save(1 + dist.get_rank())
    except Refused as refused:
        return refused.faults[0]
    return None


def test_d22_two_ranks_at_different_steps_are_told(tmp_path):
    for fault in run_job(save_different, job_of(tmp_path, PLAN)):
        assert fault.code == "R302"
        assert [what for _, what in fault.values] == ["the checkpoint of step 1", "the checkpoint of step 2"]


def full_disk(*_, **__):
    raise OSError(28, "No space left on device")


def save_with_a_full_disk(job):
    rank = Rank(job)
    rank.checkpoints.save(0)
    if dist.get_rank() == 1:
        dcp.FileSystemWriter.write_data = full_disk
    try:
        rank.checkpoints.save(1)
    except Refused as refused:
        return refused.faults[0]
    return None


def test_e11_an_error_on_one_rank_is_one_on_all(tmp_path):
    for fault in run_job(save_with_a_full_disk, job_of(tmp_path, PLAN)):
        assert fault.code == "F501"
        assert "rank 1: OSError: [Errno 28] No space left on device" in fault.message
        assert "rank 0" not in fault.message
    found = store.newest(tmp_path / "checkpoints", ("weights", "optimizer"))
    assert found == store.Found(folder=tmp_path / "checkpoints" / "step-00000000")


class Trap:
    def __reduce__(self):
        return os.system, ("exit 3",)


def test_metadata_that_would_run_code_is_refused(run):
    folder = run / "checkpoints" / "step-00000005" / "weights"
    assert stored_tensors(folder)["embedding.weight"][0] == (13, 12)
    (folder / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(Refused) as refused:
        stored_tensors(folder)
    assert refused.value.faults[0].code == "F502"
    assert "system" in refused.value.faults[0].message
