"""Evaluation: collective, without a trace, the same on every plan (cases B12, E03, E12)."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardsmith.engine.dataset.batches import HeldOut, batches_of, held_out_of
from shardsmith.engine.dataset.samples import IGNORED, Sample, Synthetic
from shardsmith.engine.train.evaluate import evaluate
from shardsmith.engine.train.step import Trainer
from shardsmith.plan.file import make_setup
from shardsmith.specs.job import Optimisation
from shardsmith.specs.library import model_named

pytestmark = pytest.mark.ranks

SETTINGS = Optimisation(optimizer="sgd", lr=0.1)
SMALL = model_named("tiny-llama").with_(layers=4, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=24, vocab=17)


def trainer_of(plan, global_batch=4):
    setup = make_setup(plan=plan, seq_len=8, dtype="float64", global_batch=global_batch)
    setup = type(setup)(model=SMALL, workload=setup.workload, cluster=setup.cluster, plan=setup.plan)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Trainer(setup, SETTINGS, rank=rank, seed=0, device=torch.device("cpu"), timeout_s=20)


def eval_train_eval_train(plan):
    trainer = trainer_of(plan)
    source = Synthetic(seed=1, vocab=17, seq_len=8, ignored=0.5, packed=True, samples=10)
    held_out = held_out_of(source, seed=0, setup=trainer.setup)
    batches = batches_of(Synthetic(seed=0, vocab=17, seq_len=8), seed=0, setup=trainer.setup)
    losses = []
    for step in range(2):
        state = [p.detach().clone() for p in trainer.parameters().values()]
        random = torch.get_rng_state()
        found = evaluate(trainer, held_out)
        losses.append((found.loss, found.tokens))
        assert torch.equal(torch.get_rng_state(), random)
        assert all(torch.equal(a, b) for a, b in zip(state, trainer.parameters().values(), strict=True))
        assert all(m.training for m in trainer.stages.values())
        losses.append((trainer.step(batches.batch(step, trainer.data_index)).loss, 0))
    return losses


PLANS = [
    "pipeline=2,microbatches=4",
    "pipeline=2,microbatches=4,schedule=gpipe",
    "pipeline=2,stages_per_rank=2,schedule=interleaved,microbatches=2",
    "data=2,tensor=2,pipeline=2,microbatches=2,schedule=one_f_one_b,sequence_parallel=true",
]


@pytest.mark.parametrize("plan", PLANS)
def test_b12_eval_train_eval_train_ends_and_equals_one_process(run_ranks, plan):
    (alone,) = run_ranks(1, eval_train_eval_train, "microbatch=1")
    world = make_setup(plan=plan).plan.world
    found = run_ranks(world, eval_train_eval_train, plan)
    assert all(losses == found[0] for losses in found)
    assert [tokens for _, tokens in found[0]] == [tokens for _, tokens in alone]
    for (loss, _), (reference, _) in zip(found[0], alone, strict=True):
        assert loss == pytest.approx(reference, rel=1e-10)
    assert alone[0] != alone[2]  # the step between changed the model


class Unequal:
    """Two samples: one target whose label is 4, and three whose labels are 1."""

    samples, seq_len = 2, 4

    def sample(self, index):
        labels = [[4, IGNORED, IGNORED, IGNORED], [1, 1, 1, IGNORED]][index]
        return Sample(tokens=np.zeros(4, dtype=np.int64), labels=np.array(labels))


def mean_of_labels():
    trainer = trainer_of("data=2", global_batch=2)
    for stage in trainer.stages.values():
        stage.loss_sum = lambda logits, labels: labels[labels != IGNORED].double().sum()
    found = evaluate(trainer, HeldOut(source=Unequal(), seed=0, data=2, microbatch=1, microbatches=1))
    return found.loss, found.tokens


def test_e12_mean_over_unequal_counts(run_ranks):
    assert run_ranks(2, mean_of_labels) == [(1.75, 4), (1.75, 4)]


def five_samples(plan):
    trainer = trainer_of(plan)
    source = Synthetic(seed=1, vocab=17, seq_len=8, samples=5)
    held_out = held_out_of(source, seed=0, setup=trainer.setup)
    found = evaluate(trainer, held_out)
    return held_out.batches, found.loss, found.tokens


def test_e03_a_tail_is_counted_once_on_every_plan(run_ranks):
    (alone,) = run_ranks(1, five_samples, "microbatch=1")
    assert alone[::2] == (2, 40)
    found = run_ranks(2, five_samples, "data=2,microbatch=2,microbatches=1")
    for batches, loss, tokens in found:
        assert (batches, tokens) == (2, 40)
        assert loss == pytest.approx(alone[1], rel=1e-12)
