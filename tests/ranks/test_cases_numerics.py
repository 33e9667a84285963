"""Faults of loss, gradients, norms and initial weights that others have met, with the exact right values."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from toys import (
    PLAIN,
    Toy,
    ToyTrainer,
    assert_same,
    given,
    microbatch,
    random_microbatch,
    scale,
    single,
    small,
    trained,
)

from shardsmith.engine.dataset.batches import IGNORED, Synthetic, batches_of
from shardsmith.engine.models.initialise import initial_shard
from shardsmith.engine.parallel.tensor import sum_partial_gradients
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.linear import Projection, Seam, linear
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.engine.runtime.vocabulary import token_losses
from shardsmith.engine.train.gather import full_parameters
from shardsmith.engine.train.norm import clip_factor
from shardsmith.engine.train.step import Trainer
from shardsmith.layout.axes.tensor import chunk, tensor_shard
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import Weight, weights

pytestmark = pytest.mark.ranks

NO = IGNORED
CLIPPED = Optimisation(optimizer="sgd", lr=1.0, weight_decay=0.0, clip=1.0)


def tensor_group() -> Group:
    """All ranks as one tensor group."""
    ranks = tuple(range(dist.get_world_size()))
    return Group(
        axis="tensor", ranks=ranks, index=dist.get_rank(), recorder=Recorder(dist.get_rank()), handle=dist.group.WORLD
    )


def test_a01_loss_is_the_mean_over_the_tokens_of_the_step(run_ranks):
    rows = (([4, 9, 9, 9], [0, NO, NO, NO]), ([1, 1, 1, 9], [0, 0, 0, NO]))

    def over_data_ranks():
        trainer = ToyTrainer("data=2", [scale()], seq_len=4)
        tokens, labels = rows[trainer.data_index]
        return trainer.step([microbatch(0, [tokens], [labels])]), trainer.grads()["w"], trainer.values()["w"]

    def over_microbatches():
        trainer = ToyTrainer("microbatches=2", [scale()], seq_len=4)
        batch = [microbatch(i, [tokens], [labels]) for i, (tokens, labels) in enumerate(rows)]
        return trainer.step(batch), trainer.grads()["w"], trainer.values()["w"]

    for result, gradient, value in (*run_ranks(2, over_data_ranks), *run_ranks(1, over_microbatches)):
        assert (result.loss, result.tokens, result.grad_norm) == (1.75, 4, 1.75)
        assert (gradient, value) == ([1.75], [1 - 1.75])


def test_a04_tensor_ranks_are_no_data_ranks(run_ranks):
    rows = (([2, 2, 2, 7, 7], [0, 0, 0, NO, NO]), ([1, 1, 0, 0, 0], [0] * 5))

    def step():
        trainer = ToyTrainer("data=2,tensor=2", [scale()], seq_len=5)
        tokens, labels = rows[trainer.data_index]
        return trainer.data_index, trainer.step([microbatch(0, [tokens], [labels])]), trainer.grads()["w"]

    found = run_ranks(4, step)
    assert [index for index, _, _ in found] == [0, 0, 1, 1]
    for _, result, gradient in found:
        assert (result.loss, result.tokens, result.grad_norm, gradient) == (1.0, 8, 1.0, [1.0])


def test_a07_a_pipeline_back_propagates_the_mean(run_ranks):
    batches = [[random_microbatch(i, 8, valid=3) for i in range(2)]]
    one, two = small("microbatches=2"), small("pipeline=2,microbatches=2")
    ((alone, _),) = run_ranks(1, trained, one, batches)
    (result, _), _ = run_ranks(2, trained, two, batches)[0], None
    assert result[0].tokens == alone[0].tokens == 6
    assert result[0].grad_norm / alone[0].grad_norm == pytest.approx(1.0, rel=1e-12)  # wrong: 6
    assert_same(run_ranks, two, batches)  # also the update of SGD


def test_a08_accumulated_gradients_are_never_rescaled(run_ranks):
    def in_one_call():
        trainer = ToyTrainer("pipeline=2,microbatches=8", [scale("w"), scale("v")])
        trainer.step([single(i, 1) for i in range(8)])
        return trainer.grads()

    def in_two_calls():
        trainer = ToyTrainer("pipeline=2,microbatches=4", [scale("w"), scale("v")])
        for _ in range(2):
            trainer.work.begin([single(i, 1) for i in range(4)], 8.0)
            trainer.interpreter.run(trainer.work, trainer.wire)
        return trainer.grads()

    for call in (in_one_call, in_two_calls):
        assert run_ranks(2, call) == [{"w": [1.0]}, {"v": [1.0]}]  # wrong: 1.25 or 0.625


def tied_ends() -> list[Toy]:
    """Two stages that share a scalar; its gradient is the token on the first and the label on the last."""
    name = "embedding.weight"
    return [
        Toy(parameters={name: [1.0]}, value=lambda p, x: x * p[name]),
        Toy(
            parameters={name: [1.0]},
            value=lambda p, x: x,
            loss=lambda p, left, labels: left + labels * p[name],
        ),
    ]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe"])
def test_a10_tied_copies_end_with_the_same_full_gradient(run_ranks, schedule):
    tokens_and_labels = ((1, 5), (3, 7))

    def step():
        trainer = ToyTrainer(f"data=2,pipeline=2,schedule={schedule}", tied_ends(), tied=True)
        token, label = tokens_and_labels[trainer.data_index]
        return trainer.step([single(0, token, label)]), trainer.grads(), trainer.values()

    for result, gradients, values in run_ranks(4, step):
        assert gradients == {"embedding.weight": [8.0]}  # wrong: 7 and 9
        assert values == {"embedding.weight": [1 - 8.0]}
        assert result.grad_norm == 8.0  # counted once


def test_a12_replicas_count_once_and_shards_each(run_ranks):
    def step():
        trainer = ToyTrainer("tensor=4", [given(["sharded"], replicated=[3, 4], sharded=[6])])
        return trainer.step([single(0, 0)]).grad_norm

    assert run_ranks(4, step) == [13.0] * 4  # wrong: 15.6205


@pytest.mark.parametrize(
    ("line", "toys", "grads"),
    [
        ("pipeline=2", [given(a=[3]), given(b=[4])], [{"a": 3.0}, {"b": 4.0}]),
        (
            "pipeline=2,schedule=interleaved,stages_per_rank=2",
            [given(a=[1]), given(b=[2]), given(c=[2]), given(d=[4])],
            [{"a": 1.0, "c": 2.0}, {"b": 2.0, "d": 4.0}],
        ),
    ],
)
def test_a14_all_stages_share_one_norm_and_one_clip_factor(run_ranks, line, toys, grads):
    def step():
        trainer = ToyTrainer(line, toys, CLIPPED)
        return trainer.step([single(0, 0)]).grad_norm, trainer.grads(), trainer.values()

    for (norm, gradients, values), unclipped in zip(run_ranks(2, step), grads, strict=True):
        assert norm == 5.0
        for name, gradient in unclipped.items():
            assert gradients[name] == pytest.approx([0.2 * gradient], rel=1e-6)  # wrong: 1/3 and 1/4
            assert values[name] == pytest.approx([1 - 0.2 * gradient], rel=1e-6)


def test_a14_infinity_norm(run_ranks):
    largest = Optimisation(optimizer="sgd", lr=1.0, weight_decay=0.0, clip=2.0, norm="max")

    def step():
        trainer = ToyTrainer("pipeline=2", [given(a=[3, -1]), given(b=[-4, 2])], largest)
        return trainer.step([single(0, 0)]).grad_norm, trainer.grads()

    (norm, first), (same, second) = run_ranks(2, step)
    assert norm == same == 4.0
    assert first["a"] == pytest.approx([1.5, -0.5], rel=1e-6)
    assert second["b"] == pytest.approx([-2.0, 1.0], rel=1e-6)


def test_a14_infinity_norm_of_a_model_equals_one_process(run_ranks):
    settings = Optimisation(optimizer="sgd", lr=0.5, weight_decay=0.1, clip=0.01, norm="max")
    setup = small("tensor=2,pipeline=2,microbatches=2,sequence_parallel=true", "tiny-gpt")
    batches = [[random_microbatch(2 * s + i, 8) for i in range(2)] for s in range(2)]
    reference = assert_same(run_ranks, setup, batches, settings)
    assert min(reference.grad_norms) > 0.01  # or nothing was clipped


def test_clip_factor_leaves_small_gradients_alone():
    assert [clip_factor(norm, 1.0) for norm in (0.0, 0.5, 1.0)] == [1.0] * 3
    assert clip_factor(5.0, 1.0) == pytest.approx(0.2, rel=1e-6)
    assert clip_factor(5.0, 0.0) == 1.0


def test_a20_partial_gradients_of_norms_are_summed(run_ranks):
    def summed():
        gain = torch.nn.Parameter(torch.ones(2))
        gain.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]][dist.get_rank()])
        sum_partial_gradients([gain.grad], tensor_group(), "partial_gradients")
        return gain.grad.tolist()

    assert run_ranks(2, summed) == [[4.0, 6.0]] * 2  # wrong: as they were, or [2, 3]


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt"])
def test_a20_norm_weights_stay_bitwise_equal(run_ranks, model):
    setup = small("tensor=2,microbatches=2,sequence_parallel=true", model, dtype="float32")

    def five_steps():
        trainer = Trainer(setup, Optimisation(lr=1e-2), rank=dist.get_rank(), seed=0, device=torch.device("cpu"))
        batches = batches_of(Synthetic(seed=0, vocab=29, seq_len=8), seed=0, setup=trainer.setup)
        for step in range(5):
            trainer.step(batches.batch(step, 0))
        trainer.check_replicas()
        return {name: p.detach() for name, p in trainer.parameters().items() if trainer.weights[name].role == "norm"}

    first, second = run_ranks(2, five_steps)
    assert len(first) == (2 * 4 + 1) * (2 if model == "tiny-gpt" else 1)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert not torch.equal(value, value.round()), f"{name} has not moved"


def test_a24_the_softmax_has_exactly_the_vocabulary(run_ranks):
    def loss():
        group = tensor_group()
        first, rows = chunk(5, group.size, group.index)
        logits = torch.zeros(1, rows, dtype=torch.float64, requires_grad=True)
        out = token_losses(logits, torch.tensor([4]), first, group)
        out.sum().backward()
        return out.item(), logits.grad[0].tolist()

    found = run_ranks(2, loss)
    assert [value for value, _ in found] == [pytest.approx(math.log(5), abs=1e-15)] * 2  # wrong: ln 6
    gradient = [g for _, part in found for g in part]
    assert gradient == pytest.approx([0.2, 0.2, 0.2, 0.2, -0.8])


def test_a26_each_part_of_a_sequence_keeps_its_positions(run_ranks):
    assert run_ranks(2, lambda: tensor_group().part(torch.arange(8)).tolist()) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt"])
def test_a26_positions_under_sequence_parallelism_are_global(run_ranks, model):
    """Positions that start at 5, so that counting from 0 anywhere would show."""
    setup = small("tensor=2,pipeline=2,microbatches=2,sequence_parallel=true", model)
    shifted = [[random_microbatch(i, 8, first=5) for i in range(2)]]
    reference = assert_same(run_ranks, setup, shifted)
    if model == "tiny-gpt":
        from_zero = assert_same(run_ranks, setup, [[random_microbatch(i, 8) for i in range(2)]])
        assert abs(from_zero.losses[0] - reference.losses[0]) > 1e-3


@pytest.mark.parametrize("kind", ["reduce", "scatter"])
def test_a27_row_bias_is_added_once(run_ranks, kind):
    def product():
        group, column = tensor_group(), dist.get_rank()
        row = Projection(1, 1, bias=True).double()
        with torch.no_grad():
            row.weight.copy_(torch.tensor([[1.0 + column]]))
            row.bias.fill_(10.0)
        rows = 1 if kind == "reduce" else 2  # under sequence parallelism each rank keeps one of two tokens
        x = torch.ones(rows, 1, 1, dtype=torch.float64)
        (y,) = linear(x, [row], Seam(group=group, leave=kind))
        y.sum().backward()
        if kind == "scatter":
            sum_partial_gradients([row.bias.grad], group, "partial_gradients")
        return y.flatten().tolist(), row.bias.grad.item()

    # with sequence parallelism the loss is the sum of two tokens, and so is the gradient of the bias
    assert run_ranks(2, product) == [([13.0], 1.0 if kind == "reduce" else 2.0)] * 2  # wrong: 23, and 0.5


def test_a31_trained_layers_are_dealt_round_robin(run_ranks):
    def layers(stages_per_rank):
        plan = f"pipeline=2,schedule=interleaved,stages_per_rank={stages_per_rank},microbatches=2"
        setup = small(plan, layers=8)
        trainer = Trainer(setup, PLAIN, rank=dist.get_rank(), seed=0, device=torch.device("cpu"))
        names = [list(dict(stage.layers.named_children())) for stage in trainer.stages.values()]
        return [[int(name) for name in stage] for stage in names]

    assert run_ranks(2, layers, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert run_ranks(2, layers, 4) == [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]


def test_a34_spread_follows_the_full_shape():
    full = Weight(name="down.weight", shape=(32, 4096), role="down", init_std=math.sqrt(2 / 4128))
    whole = initial_shard(full, tensor_shard(full, 1, 0, False), seed=0)
    for tensor in (1, 2, 4):
        parts = [initial_shard(full, tensor_shard(full, tensor, rank, False), seed=0) for rank in range(tensor)]
        assert parts[0].shape == (32, 4096 // tensor)
        assert torch.equal(torch.cat(parts, 1), whole)
        for part in parts:
            assert part.std().item() == pytest.approx(0.0220, rel=0.02)  # wrong at tensor = 4: 0.0435


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt"])
def test_a34_gathered_initial_weights_are_bitwise_equal(run_ranks, model):
    def gathered(line):
        trainer = Trainer(small(line, model), PLAIN, rank=dist.get_rank(), seed=3, device=torch.device("cpu"))
        return full_parameters(trainer)

    one = run_ranks(1, gathered, "")[0]
    lines = ("tensor=2", "tensor=4", "pipeline=2,tensor=2", "data=2,tensor=2,sequence_parallel=true")
    lines = (*lines, "pipeline=2,schedule=interleaved,stages_per_rank=2")
    for line in lines:
        other = run_ranks(small(line).plan.world, gathered, line)[0]
        assert other.keys() == one.keys()
        assert all(torch.equal(other[name], one[name]) for name in one), line
    by_name = {w.name: w for w in weights(small("", model).model)}
    normal = [w.name for w in by_name.values() if w.init == "normal" and w.numel > 500]
    assert normal
    for name in normal:
        assert one[name].std().item() == pytest.approx(by_name[name].init_std, rel=0.15), name
