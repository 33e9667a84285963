"""What the tests of checkpoints share: a small job, and a rank that trains, saves, loads and tells what it holds."""

import numpy as np
import torch
import torch.distributed as dist

from shardsmith.engine.dataset.batches import Synthetic, batches_of
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.engine.train.checkpoints import Checkpoints
from shardsmith.engine.train.gather import gather_objects
from shardsmith.engine.train.step import Trainer
from shardsmith.plan.line import parse_plan_line
from shardsmith.plan.setup import Job, Setup
from shardsmith.specs.job import Data, Optimisation, Run, Workload
from shardsmith.specs.library import cluster_named, model_named

# every dim is uneven over some axis: 13 rows of vocabulary over 2, 14 and 12 over 3 and 4, halves of 7 over 2
MODEL = model_named("tiny-gpt").with_(
    layers=4, hidden=12, heads=2, kv_heads=2, head_dim=6, ffn=14, vocab=13, context=16
)
ADAMW = Optimisation(lr=1e-2, clip=1.0)


def job_of(folder, plan, *, batch=12, dtype="float64", optimisation=ADAMW, model=MODEL, timeout_s=60.0, **run):
    setup = Setup(
        model=model,
        workload=Workload(seq_len=8, global_batch=batch, dtype=dtype),
        cluster=cluster_named("local"),
        plan=parse_plan_line(plan),
    )
    run = Run(folder=str(folder), timeout_s=timeout_s, **run)
    return Job(setup=setup, data=Data(seed=1), optimisation=optimisation, run=run)


def run_job(function, job, *args, timeout_s=60):
    """The results of `function(job, *args)` on the ranks that the plan of `job` has."""
    return run_forked(function, job.setup.plan.world, job, *args, timeout_s=timeout_s)


class Rank:
    """One rank of a job on synthetic samples, as the training loop would drive it."""

    def __init__(self, job, samples=2**20):
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.trainer = Trainer(job.setup, job.optimisation, rank=rank, seed=0, device=torch.device("cpu"))
        source = Synthetic(seed=1, vocab=job.setup.model.vocab, seq_len=8, samples=samples, ignored=0.5)
        self.checkpoints = Checkpoints(job, self.trainer, batches_of(source, seed=job.data.seed, setup=job.setup))

    def steps(self, first, stop):
        batches, at = self.checkpoints.batches, self.trainer.data_index
        return [self.trainer.step(batches.batch(step, at)).loss for step in range(first, stop)]

    def state(self):
        """All full tensors on rank 0, weights and moments, each element from its one owner; counters too."""
        checkpoints, trainer = self.checkpoints, self.trainer
        weights = checkpoints._weights()
        blocks = weights | checkpoints._optimizer(checkpoints._record(0), weights)
        mine = {
            name: (block.shape, block.offsets, block.tensor.numpy().copy())
            for name, block in blocks.items()
            if block.owned and not name.startswith("random.")
        }
        counts = {int(state["step"]) for state in trainer.optimizer.state.values() if "step" in state}
        parts = gather_objects((mine, counts | {trainer.updates}))
        return None if parts is None else assemble(parts)


def assemble(parts):
    full = {"counters": np.array(sorted(set().union(*(counts for _, counts in parts))))}
    for part, _ in parts:
        for name, (shape, offsets, array) in part.items():
            whole = full.setdefault(name, np.full(shape, np.nan))
            place = tuple(slice(o, o + n) for o, n in zip(offsets, array.shape, strict=True))
            assert np.isnan(whole[place]).all(), f"{name} has two owners"
            whole[place] = array
    assert not any(np.isnan(whole).any() for whole in full.values())
    return full


def same(found, expected):
    """Names of the tensors that are not equal to the bit."""
    assert found.keys() == expected.keys()
    return [name for name in expected if not np.array_equal(found[name], expected[name])]
