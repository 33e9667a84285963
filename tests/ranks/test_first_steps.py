"""Ranks that are fed other data than the plan says: found in step 1, by name (cases F05, F07)."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from shardsmith.engine.dataset.batches import Batches, Synthetic, batches_of
from shardsmith.engine.runtime.failures import RankFailed
from shardsmith.engine.runtime.groups import make_groups
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.engine.train.first_steps import check_batches
from shardsmith.plan.file import make_setup
from shardsmith.plan.mesh import data_index, mesh_of

pytestmark = pytest.mark.ranks


@dataclass(frozen=True, kw_only=True)
class Unsplit(Batches):
    """A loader that forgot to split."""

    def batch(self, step, data_index):
        return super().batch(step, 0)


def check(plan, fault="", samples=100):
    setup = make_setup(plan=plan, seq_len=8)
    rank, mesh = dist.get_rank(), mesh_of(setup.plan)
    groups = make_groups(mesh, rank, Recorder(rank), ends=(0, mesh.sizes.pipeline - 1), kv_copies=1, timeout_s=20)
    batches = batches_of(Synthetic(seed=0, vocab=50, seq_len=8, samples=samples), seed=0, setup=setup)
    if fault == "unsplit":
        batches = Unsplit(**vars(batches))
    microbatches = batches.batch(0, data_index(mesh.coord(rank), mesh.sizes))
    if fault == "token" and rank == 3:
        microbatches[0].tokens[0, 5] += 1
    if fault == "documents" and rank == 1:
        microbatches[1] = replace(microbatches[1], documents=torch.zeros(1, 8, dtype=torch.int64))
    check_batches(microbatches, batches, groups, 0)
    return [i for m in microbatches for i in m.samples]


def test_f05_f07_what_the_plan_says_passes(run_ranks):
    found = run_ranks(4, check, "data=2,tensor=2,microbatches=2")
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert not set(found[0]) & set(found[2])


def test_f05_a_stream_that_nobody_splits_is_refused(run_ranks):
    with pytest.raises(RankFailed, match=r"G501.*step 1: the data ranks 0, 1 share 2 samples") as failed:
        run_ranks(2, check, "data=2,microbatches=2", "unsplit")
    assert "rank 1: samples" in str(failed.value)


def test_f05_data_smaller_than_a_batch_may_repeat(run_ranks):
    found = run_ranks(2, check, "data=2,microbatches=2", "", 1)
    assert found == [[0, 0], [0, 0]]


def test_f07_one_token_on_one_tensor_rank(run_ranks):
    with pytest.raises(RankFailed, match=r"G502.*step 1: the tensor ranks 2, 3 .* rank 3 holds another"):
        run_ranks(4, check, "data=2,tensor=2,microbatches=2", "token")


def test_f07_document_borders_on_one_pipeline_rank(run_ranks):
    with pytest.raises(RankFailed, match=r"G502.*step 1: the pipeline ranks 0, 1 .* rank 1 holds another"):
        run_ranks(2, check, "pipeline=2,microbatches=2", "documents")
