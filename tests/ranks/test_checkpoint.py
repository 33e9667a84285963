"""Checkpoints: exact under any change of layout (cases D01, D02, D03, D17, D18, E08)."""

import json
import os
import signal
from itertools import chain

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpointing import MODEL, Rank, job_of, run_job, same
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardsmith import api
from shardsmith.engine.checkpoint import whole
from shardsmith.engine.checkpoint.blocks import Block, read_blocks, stored_tensors, write_blocks
from shardsmith.engine.checkpoint.team import make_team
from shardsmith.engine.checkpoint.whole import open_full, read_full, write_full
from shardsmith.engine.runtime.failures import RankFailed
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.layout.axes.tensor import chunk
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import weights

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

PLANS = {
    "data": "data=2",
    "zero1_tensor": "data=2,zero=1,tensor=2",
    "zero3": "data=3,zero=3",
    "interleaved_tied": "pipeline=2,schedule=interleaved,stages_per_rank=2,microbatches=4",
    "hybrid": "data=4,replicate=2,zero=2",
    "three_axes": "data=2,tensor=2,pipeline=2,zero=3,sequence_parallel=true,microbatches=3",
}


def save_and_go_on(job):
    rank = Rank(job)
    rank.steps(0, 3)
    rank.checkpoints.save(3)
    return rank.state(), rank.steps(3, 6)


def load_each(job, folders):
    rank = Rank(job)
    found = []
    for folder in folders:
        rank.checkpoints.load(folder)
        found.append((rank.checkpoints.step, rank.state(), rank.steps(3, 6)))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint a plan, with the state that it should hold and the losses of the run that wrote it."""
    root = tmp_path_factory.mktemp("saved")
    found = {}
    for name, plan in PLANS.items():
        state, losses = run_job(save_and_go_on, job_of(root / name, plan), timeout_s=120)[0]
        found[name] = (root / name / "checkpoints" / "step-00000003", state, losses)
    return found


@pytest.mark.parametrize("target", PLANS)
def test_every_plan_loads_what_every_plan_saved(saved, target, tmp_path):
    folders = [folder for folder, _, _ in saved.values()]
    found = run_job(load_each, job_of(tmp_path, PLANS[target]), folders, timeout_s=200)[0]
    for (name, (_, state, losses)), (step, loaded, after) in zip(saved.items(), found, strict=True):
        assert step == 3
        assert loaded["counters"].tolist() == [3]
        assert same(loaded, state) == [], f"{name} -> {target}"
        np.testing.assert_allclose(after, losses, rtol=1e-10, err_msg=f"{name} -> {target}")
        if name == target:
            assert after == losses


def test_one_process_reads_full_tensors_and_writes_the_start_of_a_run(saved, tmp_path, monkeypatch):
    folder, state, _ = saved["three_axes"]
    full = dict(read_full(folder))
    assert list(full) == [weight.name for weight in weights(MODEL)]
    assert all(np.array_equal(tensor.numpy(), state[name]) for name, tensor in full.items())
    assert open_full(folder).model == MODEL
    # torch's own tool reads the same folder
    dcp_to_torch_save(folder / "weights", tmp_path / "weights.pt")
    theirs = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert theirs.keys() == full.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in full.items())
    # a file for every few tensors, as a large model would have
    monkeypatch.setattr(whole, "FILE_BYTES", 2000)
    write_full(tmp_path / "start", ((name, tensor) for name, tensor in full.items()), model=MODEL)
    assert len(list((tmp_path / "start" / "weights").glob("*.distcp"))) > 3
    assert all(torch.equal(tensor, full[name]) for name, tensor in read_full(tmp_path / "start"))
    job = job_of(tmp_path / "run", PLANS["zero1_tensor"], resume=str(tmp_path / "start"))
    (step, started), *_ = run_job(start_from, job, timeout_s=120)
    assert step == 0
    assert started.keys() == full.keys() | {"counters"}
    assert all(np.array_equal(started[name], tensor.numpy()) for name, tensor in full.items())


def start_from(job):
    rank = Rank(job)
    rank.checkpoints.resume()
    return rank.checkpoints.step, rank.state()


def blocks_of(tensors, data, tensor=1):
    """This rank's rows of each full tensor: cut over `tensor`, then over `data`, in chunks of ceil."""
    rank, found = dist.get_rank(), {}
    for name, full in tensors.items():
        first, rows = chunk(full.shape[0], tensor, rank // data)
        inner, rows = chunk(rows, data, rank % data)
        part = full[first + inner : first + inner + rows].clone()
        offsets = (first + inner, *[0] * (full.dim() - 1))
        found[name] = Block(shape=tuple(full.shape), offsets=offsets, tensor=part)
    return found


def write_cut(folder, sizes, data, tensor):
    tensors = {f"t{n}": torch.arange(n * 2.0).reshape(n, 2) for n in sizes}
    write_blocks(folder, blocks_of(tensors, data, tensor), make_team(60).group)


def read_cut(folder, sizes, data):
    blocks = blocks_of({f"t{n}": torch.full((n, 2), -1.0) for n in sizes}, data)
    read_blocks(folder, blocks, make_team(60).group)
    return {name: (block.offsets[0], block.tensor.numpy()) for name, block in blocks.items()}


@pytest.mark.parametrize(("data", "tensor"), [(4, 1), (4, 2)])
def test_d02_d03_rows_that_do_not_divide_and_ranks_without_any(tmp_path, data, tensor):
    # 10 over 4: 3, 3, 3, 1; 6 over 4: 2, 2, 2, 0; 1 over 4; and 6 over 2 x 4, where an empty part begins where
    # another rank's part does
    sizes = (10, 6, 1)
    run_forked(write_cut, data * tensor, tmp_path / "cut", sizes, data, tensor, timeout_s=60)
    for ranks in (4, 3, 2, 1):
        parts = run_forked(read_cut, ranks, tmp_path / "cut", sizes, ranks, timeout_s=60)
        for n in sizes:
            joined = np.concatenate([part[f"t{n}"][1] for part in parts])
            assert np.array_equal(joined, np.arange(n * 2.0).reshape(n, 2)), (n, ranks)


def test_d01_moments_do_not_know_how_many_ranks_saved_them(tmp_path):
    job = job_of(tmp_path / "four", "data=4,zero=1")
    state, losses = run_job(save_and_go_on, job)[0]
    folder = tmp_path / "four" / "checkpoints" / "step-00000003"
    for ranks in (1, 2, 3):
        job = job_of(tmp_path / str(ranks), f"data={ranks},zero={min(1, ranks - 1)}")
        (_, loaded, after), *_ = run_job(load_each, job, [folder])[0]
        assert same(loaded, state) == []
        np.testing.assert_allclose(after, losses, rtol=1e-10)


def next_samples(job, steps):
    rank = Rank(job, samples=12)
    if job.run.resume == "never":
        rank.steps(0, 1)
        rank.checkpoints.save(1)
    else:
        rank.checkpoints.resume()
    batches = rank.checkpoints.batches
    return [batches.sample_ids(step, rank.trainer.data_index).ravel().tolist() for step in range(1, 1 + steps)]


def test_d17_the_position_in_the_data_is_global(tmp_path):
    job = job_of(tmp_path, "data=4", batch=4, resume="never")
    straight = run_job(next_samples, job, 2)
    second, third = ([rank[step] for rank in straight] for step in (0, 1))
    rest = sorted(chain(*second, *third))
    assert len(set(rest)) == 8
    # half the ranks, twice the microbatches: the same samples in the same step
    halved = run_job(next_samples, job_of(tmp_path, "data=2", batch=4), 1)
    assert sorted(chain(*(rank[0] for rank in halved))) == sorted(chain(*second))
    # three ranks and a batch of 3: 8 samples remain of the epoch, each comes once
    thirds = run_job(next_samples, job_of(tmp_path, "data=3", batch=3), 3)
    stream = [sample for step in range(3) for rank in thirds for sample in rank[step]]
    assert sorted(stream[:8]) == rest


def run_of(folder, steps, **run):
    model = MODEL.with_(ffn=7)
    job = job_of(folder, "data=4,zero=3", dtype="float32", model=model, steps=steps, tensorboard=False, **run)
    api.train(job)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_d18_resume_is_bitwise(tmp_path):
    straight = run_of(tmp_path / "straight", 6)
    half = run_of(tmp_path / "half", 3, save_every=2, keep=1)
    assert [line["step"] for line in half] == [0, 1, 2]
    resumed = run_of(tmp_path / "half", 6, save_every=2, keep=1)
    assert [line["step"] for line in resumed] == list(range(6))
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in resumed] == [line[key] for line in straight]
    assert (tmp_path / "half/model.safetensors").read_bytes() == (tmp_path / "straight/model.safetensors").read_bytes()
    assert [path.name for path in (tmp_path / "half" / "checkpoints").iterdir()] == ["step-00000006"]
    # nothing is left to do: nothing is done
    assert run_of(tmp_path / "half", 6, save_every=2, keep=1) == resumed


def narrow_run(job, first):
    rank = Rank(job)
    rank.checkpoints.resume()
    assert rank.checkpoints.step == first
    scale = rank.trainer.scaler.scale
    if first:
        return scale, rank.steps(3, 6)
    rank.trainer.scaler.scale = 8.0 if rank.trainer.scaler.dynamic else 1.0
    rank.steps(0, 3)
    rank.checkpoints.save(3)
    return rank.trainer.scaler.scale, rank.steps(3, 6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_saved_of_a_narrow_run_are_the_master_weights(tmp_path, dtype):
    plan = "data=2,zero=2,tensor=2"
    job = job_of(tmp_path / "a", plan, dtype=dtype)
    saved = run_job(narrow_run, job, 0)
    stored = stored_tensors(tmp_path / "a" / "checkpoints" / "step-00000003" / "weights")
    assert {kind for _, kind in stored.values()} == {torch.float32}
    assert run_job(narrow_run, job, 3) == saved
    assert saved[0][0] == (8.0 if dtype == "float16" else 1.0)


def momentum_run(job, first):
    rank = Rank(job)
    rank.checkpoints.resume()
    if first == 0:
        rank.checkpoints.save(0)  # before the first step there are no moments
        rank.steps(0, 2)
        rank.checkpoints.save(2)
    return rank.checkpoints.step, rank.steps(2, 5)


def test_momentum_of_sgd_is_resumed_and_a_checkpoint_before_the_first_step_is_one(tmp_path):
    sgd = Optimisation(optimizer="sgd", lr=0.1, momentum=0.9)
    job = job_of(tmp_path, "data=2,zero=1", optimisation=sgd)
    (_, losses), *_ = run_job(momentum_run, job, 0)
    assert run_job(momentum_run, job, 2)[0] == (2, losses)
    start = job_of(tmp_path / "b", "data=2", optimisation=sgd, resume=str(tmp_path / "checkpoints/step-00000000"))
    assert run_job(start_from, start)[0][0] == 0


def die_in_step_3(job):
    rank = Rank(job)
    rank.steps(0, 2)
    rank.checkpoints.save(2)
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.steps(2, 3)


def go_on(job, first, stop):
    rank = Rank(job)
    rank.checkpoints.resume()
    assert rank.checkpoints.step == first
    return rank.steps(first, stop)


def test_e08_a_smaller_world_goes_on_with_the_same_global_batch(tmp_path):
    four, two = "data=4,microbatch=2", "data=2,microbatch=2"
    straight = run_job(go_on, job_of(tmp_path / "straight", four, batch=8), 0, 6)[0]
    with pytest.raises(RankFailed) as failed:
        run_job(die_in_step_3, job_of(tmp_path / "run", four, batch=8))
    assert failed.value.rank == 3
    after = run_job(go_on, job_of(tmp_path / "run", two, batch=8), 2, 6)[0]
    np.testing.assert_allclose(after, straight[2:], rtol=1e-10)
