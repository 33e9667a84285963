"""The expert axis on real ranks: exact small cases, what is sent and kept, checkpoints across plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardsmith.engine.dataset.batches import Synthetic, batches_of
from shardsmith.engine.models.experts import MoE, Router, in_room
from shardsmith.engine.runtime.dispatch import ALONE, Dispatch, Placement, combine, make_route
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.grouped import Stack, grouped, kernel_for
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.engine.train.step import StepResult, Trainer
from shardsmith.layout.check import check
from shardsmith.layout.collectives import collectives
from shardsmith.layout.shards import rank_states
from shardsmith.plan.file import make_setup
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import Experts, Latent, ModelSpec

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
MOE = ModelSpec(
    name="moe",
    layers=2,
    hidden=12,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ffn=16,
    vocab=13,
    context=16,
    init_std=0.3,
    experts=Experts(count=4, top_k=2, ffn=8, aux_loss=0.1),
)
SHARED = MOE.with_(
    name="shared",
    layers=3,
    kv_heads=4,
    head_dim=6,
    latent=Latent(kv_rank=5, nope=2, rope=4, value=3, q_rank=7),
    tied=True,
    experts=Experts(
        count=4, top_k=2, ffn=8, first_dense=1, score="sigmoid", shared_ffn=8, balance="bias", bias_rate=0.1
    ),
)


def setup_of(line: str, model: ModelSpec = MOE, *, dtype: str = "float32", microbatches: int = 2) -> Setup:
    plan = make_setup(plan=line).plan
    base = make_setup(plan=line, seq_len=8, global_batch=plan.data * microbatches, dtype=dtype)
    found = replace(base, model=model)
    assert not [f for f in check(found, running=True) if f.severity == "error"], line
    return found


def trainer_of(setup: Setup, optimisation: Optimisation | None = None) -> Trainer:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Trainer(setup, optimisation or Optimisation(), rank=rank, seed=0, device=CPU)


def train(trainer: Trainer, steps: int) -> list[StepResult]:
    source = Synthetic(seed=0, vocab=trainer.setup.model.vocab, seq_len=8, ignored=0.5)
    batches = batches_of(source, seed=0, setup=trainer.setup)
    return [trainer.step(batches.batch(step, trainer.data_index)) for step in range(steps)]


def routed(rows: list[float], experts: list[int], placement: Placement, held: Tensor) -> Tensor:
    """Outputs of scalar experts `held` for scalar tokens."""
    stack = Stack(len(held), 1, 1)
    stack.weight = torch.nn.Parameter(held[:, None, None].clone())
    x = torch.tensor(rows, dtype=torch.float64)[:, None].requires_grad_()
    route = make_route(torch.tensor(experts)[:, None], None, 2, placement)
    dispatch = Dispatch(route)
    (out,) = grouped(dispatch.wait(dispatch.start(x, 1)), route.rows, [stack])
    y = combine(out, torch.ones(len(rows), 1, dtype=torch.float64), route)
    (y.sum() / 4).backward()  # the mean over the tokens of all ranks
    assert stack.weight.grad is not None, "every expert has a gradient"
    return stack.weight.grad.flatten()


def scalar_experts(expert: int) -> list[float]:
    rank, ones = dist.get_rank(), torch.ones(2, dtype=torch.float64)
    rows, chosen = [[1.0, 2.0], [3.0, 4.0]][rank], [0, 1]
    if expert == 1:
        gradient = routed(rows, chosen, ALONE, ones)
        dist.all_reduce(gradient)
        return gradient.tolist()
    group = Group(axis="expert", ranks=(0, 1), index=rank, recorder=Recorder(rank), handle=dist.group.WORLD)
    return routed(rows, chosen, Placement(group=group), ones[:1]).tolist()


def test_a16_expert_gradients_do_not_grow_with_expert(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(2, scalar_experts, 1) == [[1.0, 1.5], [1.0, 1.5]]
    assert run_ranks(2, scalar_experts, 2) == [[1.0], [1.5]]


def unused_experts() -> list[list[float]]:
    rank, ones = dist.get_rank(), torch.ones(1, dtype=torch.float64)
    group = Group(axis="expert", ranks=(0, 1), index=rank, recorder=Recorder(rank), handle=dist.group.WORLD)
    place = Placement(group=group)
    apart = routed([2.0, 4.0], [rank, rank], place, ones)
    first = routed([2.0, 4.0], [0, 0], place, ones)
    return [apart.tolist(), first.tolist()]


def test_c06_experts_without_tokens_take_part_and_have_zero_gradients(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(2, unused_experts) == [[[1.5], [3.0]], [[1.5], [0.0]]]


def aux_gradients(lines: list[str], batch: int) -> list[dict[str, Any]]:
    """Gradients of the routers with the main loss switched off."""
    found = []
    for line in lines:
        setup = setup_of(line, MOE.with_(experts=replace(MOE.experts, aux_loss=1.0)), dtype="float64")
        setup = replace(setup, workload=replace(setup.workload, global_batch=batch))
        trainer = trainer_of(setup, Optimisation(optimizer="sgd", lr=0.0))
        for stage in trainer.stages.values():
            stage.loss_sum = lambda left, labels: (left * 0.0).sum()  # type: ignore[method-assign]
        (result,) = train(trainer, 1)
        assert result.loads is not None, "a model with experts"
        routers = {n: g.clone() for n, g in trainer.gradients().items() if "router" in n}
        found.append({"loss": result.loads.aux_loss, **routers})
    return found


def test_a18_the_auxiliary_loss_depends_on_no_layout(run_ranks: Callable[..., list[Any]]) -> None:
    ((reference, by_two),) = run_ranks(1, aux_gradients, ["microbatch=1", "microbatch=2"], 4)
    assert reference["loss"] > 1.0
    gradients = [g for name, g in reference.items() if name != "loss"]
    assert len(gradients) == 2
    assert all(float(g.abs().max()) > 1e-4 for g in gradients)
    others = [by_two]
    for lines in (
        ["tensor=2", "tensor=2,sequence_parallel=true,expert=2", "context=2", "data=2,expert=2", "context=2,expert=2"],
        ["tensor=2,context=2", "tensor=2,context=2,expert=4", "data=2,tensor=2,expert_tensor=2,microbatch=2"],
    ):
        world = setup_of(lines[0]).plan.world
        others += [one for rank in run_ranks(world, aux_gradients, lines, 4) for one in rank]
    for found in others:
        assert found["loss"] == pytest.approx(reference["loss"], rel=1e-12)
        for name, gradient in reference.items():
            if name != "loss":
                assert float((found[name] - gradient).abs().max()) <= 1e-6 * float(gradient.abs().max()), name


def recorded(setups: list[Setup]) -> list[dict[tuple[str, str, str], tuple[int, int]]]:
    """Calls and bytes of the second step: headers travel only in the first."""
    found = []
    for setup in setups:
        trainer = trainer_of(setup)
        train(trainer, 1)
        trainer.recorder.counting = True
        train(trainer, 1)
        found.append({(k.axis, k.kind, k.purpose): (t.count, t.bytes) for k, t in trainer.recorder.tallies.items()})
    return found


SENT = {
    2: (
        ("data=2,expert=2", MOE),
        ("data=2,expert=2,zero=3", SHARED),
        ("tensor=2,expert=2", MOE),
        ("tensor=2,expert_tensor=2,recompute=full", SHARED),
        ("tensor=2,expert=2,sequence_parallel=true,recompute=full", SHARED),
        ("context=2,expert=2,capacity_factor=8.0,zero=1", MOE),
        ("tensor=2,zero=2,bucket_mb=0.001", MOE),
        ("data=2,zero=3,recompute=full", MOE.with_(experts=replace(MOE.experts, count=1, top_k=1))),
    ),
    4: (
        ("data=2,tensor=2,expert=2,expert_tensor=2,zero=1", SHARED),
        ("data=4,replicate=2,expert=2,zero=2", MOE),
        ("data=2,pipeline=2,expert=2,zero=3,schedule=zb_h1", SHARED),
        ("context=2,tensor=2,expert=4,sequence_parallel=true", SHARED),
    ),
}


@pytest.mark.parametrize("world", SENT)
def test_what_is_sent_is_what_the_layout_says(world: int, run_ranks: Callable[..., list[Any]]) -> None:
    setups = [setup_of(line, model) for line, model in SENT[world]]
    for rank, found in enumerate(run_ranks(world, recorded, setups, timeout=150)):
        for setup, counts in zip(setups, found, strict=True):
            predicted = {(c.axis, c.kind, c.purpose): (c.count, c.bytes) for c in collectives(setup, rank)}
            assert counts == predicted, f"{setup.plan}, rank {rank}"


def kept(setups: list[Setup]) -> list[int]:
    """Bytes of weights, gradients and optimiser state, storage by storage."""
    found = []
    for setup in setups:
        trainer = trainer_of(setup)
        train(trainer, 2)
        parts = [d for of_stage in trainer.data.values() for d in of_stage] + [trainer.tied_data]
        held: list[Tensor | None] = [*trainer.parameters().values()]
        held += [t for d in parts for t in (*d.stored.values(), *d.owned.values(), *(b.flat for b in d.buckets))]
        held += [p.grad for p in trainer.parameters().values()] + [p.grad for d in parts for p in d.owned.values()]
        held += [t for state in trainer.optimizer.state.values() for key, t in state.items() if key != "step"]
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in held if t is not None)}
        found.append(sum(storages.values()))
    return found


def test_g01_bytes_kept_are_exactly_the_formula(run_ranks: Callable[..., list[Any]]) -> None:
    one_each = MOE.with_(experts=replace(MOE.experts, count=2, top_k=1))
    lines = (
        *((f"data=4,expert=2,zero={z}", m) for z in (0, 1, 2, 3) for m in (MOE, one_each)),
        ("data=2,tensor=2,expert=4,zero=1", SHARED),
        ("data=2,tensor=2,zero=3", SHARED),
    )
    setups = [setup_of(line, model) for line, model in lines]
    for rank, found in enumerate(run_ranks(4, kept, setups, timeout=150)):
        assert found == [rank_states(setup, rank).total for setup in setups], rank


def capacity_of(lines: list[str]) -> list[float]:
    return [train(trainer_of(setup_of(line, dtype="float64")), 1)[0].loads.dropped for line in lines]  # type: ignore[union-attr]


def test_dropped_rows_are_reported_alike_by_every_layout(run_ranks: Callable[..., list[Any]]) -> None:
    ((alone, dropless),) = run_ranks(1, capacity_of, ["microbatch=2,capacity_factor=0.5", "microbatch=2"])
    lines = [f"{axis}=2,expert=2,microbatch=1,capacity_factor=0.5" for axis in ("tensor", "context")]
    assert 0.4 <= alone < 1.0
    assert dropless == 0.0
    assert run_ranks(2, capacity_of, lines) == [[alone] * 2] * 2


def test_room_goes_to_the_first_tokens_of_each_sequence() -> None:
    chosen = torch.tensor([[[0, 1], [1, 0]], [[0, 2], [1, 2]], [[0, 1], [1, 0]]])
    kept_first = in_room(chosen, 3, 2)
    assert kept_first.tolist() == [[[True, True]] * 2, [[True, True]] * 2, [[False, True], [False, True]]]
    assert in_room(chosen, 3, 3).all()


def choices(spec: Experts, logits: list[float], bias: list[float] | None = None) -> tuple[list[int], list[float]]:
    router = Router(MOE.with_(hidden=1), spec)
    router.weight = torch.nn.Parameter(torch.tensor(logits)[:, None])
    if bias is not None:
        router.balance = torch.tensor(bias)
    scored, _ = router(torch.ones(1, 1))
    order = scored.chosen[0].argsort()
    return scored.chosen[0][order].tolist(), scored.weights[0][order].tolist()


def test_groups_and_biases_decide_the_choice_and_not_the_weights() -> None:
    logits = [3.0, 0.0, 2.0, 1.9, 1.0, 1.0]
    plain = Experts(count=6, top_k=2, ffn=1, normalise=False)
    assert choices(plain, logits)[0] == [0, 2]
    # By their best expert the first group wins, by the sum of their best two the second.
    assert choices(replace(plain, groups=3), logits)[0] == [0, 1]
    sigmoid = replace(plain, score="sigmoid", groups=3, balance="bias", normalise=True, scale=2.5)
    chosen, weights = choices(sigmoid, logits)
    assert chosen == [2, 3]
    assert sum(weights) == pytest.approx(2.5)
    chosen, biased = choices(sigmoid, logits, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    assert chosen == [4, 5]
    assert biased == pytest.approx([1.25, 1.25])


def test_kernels_by_dtype_and_width() -> None:
    assert kernel_for(torch.float64, 16, 16) == "loop"
    assert kernel_for(torch.float32, 16, 12) == "grouped_mm"
    assert kernel_for(torch.float32, 16, 10) == "loop"
    assert kernel_for(torch.bfloat16, 16, 12) == "loop"
    assert kernel_for(torch.bfloat16, 16, 8) == "grouped_mm"


def biases_move(line: str) -> list[Any]:
    setup = setup_of(line, SHARED, dtype="float64")
    setup = replace(setup, workload=replace(setup.workload, global_batch=4))
    trainer = trainer_of(setup)
    (result,) = train(trainer, 1)
    assert result.loads is not None, "a model with experts"
    moved = {name: bias.tolist() for name, bias in trainer.biases().items()}
    return [moved, result.loads.loads.tolist()]


def test_biases_rise_for_experts_with_less_than_the_mean_load(run_ranks: Callable[..., list[Any]]) -> None:
    (alone,) = run_ranks(1, biases_move, "microbatch=2")
    moved, loads = alone
    for layer, row in enumerate(loads, start=1):
        mean = sum(row) / len(row)
        signs = [(mean > load) - (mean < load) for load in row]
        assert moved[f"layers.{layer}.mlp.router.balance"] == pytest.approx([0.1 * sign for sign in signs])
    assert run_ranks(2, biases_move, "data=2,expert=2,microbatch=1") == [alone, alone]


def in_bfloat16(lines: list[str]) -> list[list[float]]:
    return [
        [r.loss for r in train(trainer_of(setup_of(line, dtype="bfloat16"), Optimisation(lr=0.02)), 8)]
        for line in lines
    ]


def test_bfloat16_trains_alike_with_and_without_expert(run_ranks: Callable[..., list[Any]]) -> None:
    everywhere, placed, sharded = run_ranks(2, in_bfloat16, ["data=2", "data=2,expert=2", "data=2,expert=2,zero=3"])[0]
    assert placed == pytest.approx(everywhere, rel=0.02)
    assert sharded == pytest.approx(placed, rel=0.02)
    assert everywhere[-1] < everywhere[0]


def lanes() -> dict[str, int]:
    trainer = trainer_of(setup_of("data=2,expert=2", SHARED))
    trainer.recorder.tracing = True
    train(trainer, 1)
    names: dict[str, int] = {}
    for span in trainer.recorder.spans:
        if span.lane == "expert":
            names[span.name] = names.get(span.name, 0) + 1
    return names


def test_dispatch_and_combine_have_a_lane(run_ranks: Callable[..., list[Any]]) -> None:
    for names in run_ranks(2, lanes):
        passes = 2 * 2  # layers with experts x microbatches
        assert names == {
            "all_to_all expert_rows": passes,
            **{
                f"all_to_all {what}_{way}": passes
                for what in ("dispatch", "combine")
                for way in ("forward", "backward")
            },
        }


def order_of_calls() -> list[str]:
    """What happens between the dispatch's start and its end, forward and backward."""
    trainer = trainer_of(setup_of("data=2,expert=2", SHARED))
    calls: list[str] = []
    real_move, real_settle = Dispatch.move, Dispatch.settle

    def move(self: Dispatch, x: Tensor, *, home: bool, purpose: str) -> Tensor:
        calls.append(f"start {purpose}")
        return real_move(self, x, home=home, purpose=purpose)

    def settle(self: Dispatch) -> Tensor:
        calls.append("wait")
        return real_settle(self)

    Dispatch.move, Dispatch.settle = move, settle  # type: ignore[method-assign]
    for stage in trainer.stages.values():
        for block in stage.blocks():
            if isinstance(block.mlp, MoE):
                down = block.mlp.shared.down.weight
                block.mlp.shared.register_forward_hook(lambda *_: calls.append("shared forward"))
                down.register_post_accumulate_grad_hook(lambda _: calls.append("shared backward"))
    train(trainer, 1)
    return calls


def test_dispatch_runs_beside_the_shared_expert_both_ways(run_ranks: Callable[..., list[Any]]) -> None:
    calls = run_ranks(2, order_of_calls)[0]
    for way in ("forward", "backward"):
        starts = [at for at, call in enumerate(calls) if call == f"start dispatch_{way}"]
        assert len(starts) == 4
        for at in starts:
            beside = calls[at + 1 : calls.index("wait", at)]
            assert set(beside) == {f"shared {way}"}, calls[at : at + 4]


def save_and_load(first: str, second: str, folder: Path) -> list[float]:
    from shardsmith.engine.train.checkpoints import Checkpoints
    from shardsmith.plan.setup import Job
    from shardsmith.specs.job import Run

    def run(line: str, steps: int, start: int) -> list[float]:
        setup = setup_of(line, SHARED.with_(experts=replace(SHARED.experts, count=2, top_k=1)), dtype="float64")
        setup = replace(setup, workload=replace(setup.workload, global_batch=4))
        job = Job(setup=setup, run=Run(folder=str(folder), save_every=2, steps=4))
        trainer = trainer_of(setup, job.optimisation)
        source = Synthetic(seed=0, vocab=setup.model.vocab, seq_len=8, ignored=0.5)
        checkpoints = Checkpoints(job, trainer, batches_of(source, seed=0, setup=setup))
        checkpoints.resume()
        assert checkpoints.step == start
        losses = []
        for step in range(start, steps):
            losses.append(trainer.step(checkpoints.batches.batch(step, trainer.data_index)).loss)
            checkpoints.after(step)
        return losses

    return run(first, 2, 0) + run(second, 4, 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("data=4,expert=2,zero=3", "data=2,tensor=2,expert=2,expert_tensor=2,zero=1"),
        ("data=2,tensor=2,expert=2", "data=4,zero=2"),
    ],
)
def test_experts_and_biases_are_saved_and_cut_anew(
    first: str, second: str, run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    straight = run_ranks(4, save_and_load, second, second, tmp_path / "straight")[0]
    assert run_ranks(4, save_and_load, first, second, tmp_path / "cut")[0] == pytest.approx(straight, rel=1e-10)
