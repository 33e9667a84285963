"""What ranks hold at each ZeRO level: bytes between steps exactly by formula, bounded peaks, and never a full model."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardsmith.engine.dataset.batches import Synthetic, batches_of
from shardsmith.engine.train.step import Trainer
from shardsmith.layout.axes.data import States
from shardsmith.layout.shards import data_shard, local_shards, rank_states, stage_states
from shardsmith.plan.file import make_setup
from shardsmith.plan.mesh import mesh_of
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import ModelSpec, parameter_count

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
LLAMA = ModelSpec(
    name="llama", layers=4, hidden=12, heads=4, kv_heads=2, head_dim=4, ffn=20, vocab=29, context=16, init_std=0.2
)
GPT = LLAMA.with_(
    name="gpt", norm="layernorm", activation="gelu_tanh", positions="learned", attention_bias=True, mlp_bias=True
).with_(kv_heads=4, tied=True)


def setup_of(line: str, model: ModelSpec = LLAMA, dtype: str = "float32", microbatches: int = 2) -> Setup:
    plan = make_setup(plan=line).plan
    base = make_setup(plan=line, seq_len=4, global_batch=plan.data * microbatches, dtype=dtype)
    return replace(base, model=model)


def trained(setup: Setup, steps: int = 2, optimisation: Optimisation | None = None, *, stays: bool = True) -> Trainer:
    rank = dist.get_rank()
    trainer = Trainer(setup, optimisation or Optimisation(), rank=rank, seed=0, device=CPU, stays=stays)
    train(trainer, steps)
    return trainer


def train(trainer: Trainer, steps: int) -> None:
    setup = trainer.setup
    batches = batches_of(Synthetic(seed=0, vocab=setup.model.vocab, seq_len=4), seed=0, setup=setup)
    for step in range(steps):
        trainer.step(batches.batch(step, trainer.data_index))


def storages(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    """Bytes of each storage behind `tensors`, by its address."""
    found = [t.untyped_storage() for t in tensors if t is not None]
    return {s.data_ptr(): s.nbytes() for s in found if s.nbytes()}


def measured(trainer: Trainer) -> States:
    """Bytes of this rank's states, storage by storage."""
    parts = trainer._all_data()
    weights = storages([*trainer.parameters().values(), *(t for d in parts for t in d.stored.values())])
    owned = [p for d in parts for p in d.owned.values()]
    grads = [*(b.flat for d in parts for b in d.buckets), *(p.grad for p in [*owned, *trainer.parameters().values()])]
    gradients = storages(grads)
    moments = storages(t for state in trainer.optimizer.state.values() for key, t in state.items() if key != "step")
    masters = {at: size for at, size in storages(owned).items() if at not in weights}
    assert not weights.keys() & gradients.keys()
    sums = [sum(kind.values()) for kind in (weights, gradients, {**moments, **masters})]
    return States(weights=sums[0], gradients=sums[1], optimizer=sums[2])


def states_of_plans(setups: list[Setup]) -> list[States]:
    return [measured(trained(setup)) for setup in setups]


FEW_BYTES, SETTLED_S = 2000, 5.0
"""A worker thread of gloo lets go of the tensors of a finished collective a moment after the wait for it returns."""

LINES = (
    "data=2",
    *(f"data=2,zero={z}" for z in (1, 2, 3)),
    *(f"data=2,zero={z},bucket_mb=0.001" for z in (2, 3)),
    *(f"data=2,zero={z},zero_gather=per_step" for z in (2, 3)),
    *(f"data=3,zero={z}" for z in (1, 2, 3)),
    *(f"data=4,replicate=2,zero={z}" for z in (1, 2, 3)),
    *(f"data=2,pipeline=2,zero={z}" for z in (0, 1, 2, 3)),
    *(f"data=2,pipeline=2,schedule=interleaved,zero={z}" for z in (1, 3)),
    *(f"data=2,tensor=2,zero={z},sequence_parallel=true" for z in (1, 2, 3)),
)
"""What differs in what ranks hold; plans of equal world run in the same processes."""


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_between_steps_are_exactly_the_formula(
    world: int, dtype: str, model: ModelSpec, run_ranks: Callable[..., list[Any]]
) -> None:
    setups = [s for s in (setup_of(line, model, dtype) for line in LINES) if s.plan.world == world]
    by_rank = run_ranks(world, states_of_plans, setups, timeout=150)
    for at, setup in enumerate(setups):
        exact = [found[at] for found in by_rank]
        assert exact == [rank_states(setup, rank) for rank in range(world)], setup.plan
        fullest = [s.states for s in stage_states(setup)]
        if len(fullest) == setup.plan.pipeline:
            assert [exact[rank] for rank in mesh_of(setup.plan).group(0, "pipeline")] == fullest


@pytest.mark.parametrize("more", ["grad_dtype=bfloat16", "grad_dtype=bfloat16,optimizer_dtype=bfloat16"])
def test_bytes_follow_the_dtypes_of_the_plan(more: str, run_ranks: Callable[..., list[Any]]) -> None:
    setups = [setup_of(f"data=2,zero={zero},{more}", dtype="bfloat16") for zero in (0, 1, 3)]
    for rank, found in enumerate(run_ranks(2, states_of_plans, setups)):
        assert found == [rank_states(setup, rank) for setup in setups]


def test_nothing_else_stays_between_steps(run_ranks: Callable[..., list[Any]]) -> None:
    for line, model in (("data=2,zero=2", LLAMA), ("data=2,zero=3", GPT)):
        for others in run_ranks(2, _others, setup_of(line, model)):
            # Step counts of AdamW, rotary frequencies, tokens and losses of the last step.
            assert 0 < others < FEW_BYTES, line


def _others(setup: Setup) -> int:
    """Bytes of all tensors in the process that are no states."""
    before = _alive()
    trainer = trained(setup, stays=False)
    deadline = time.monotonic() + SETTLED_S
    while True:
        found = _alive()
        others = sum(size for at, size in found.items() if at not in before) - measured(trainer).total
        if others < FEW_BYTES or time.monotonic() > deadline:
            return others
        time.sleep(0.05)


def _alive() -> dict[int, int]:
    gc.collect()
    return storages(t for t in gc.get_objects() if isinstance(t, Tensor))


def test_sgd_without_momentum_keeps_no_moments(run_ranks: Callable[..., list[Any]]) -> None:
    setup = setup_of("data=2,zero=1", dtype="bfloat16")
    for rank, found in enumerate(run_ranks(2, _states_of_sgd, setup)):
        assert found == rank_states(setup, rank, moments=0)


def _states_of_sgd(setup: Setup) -> States:
    return measured(trained(setup, optimisation=Optimisation(optimizer="sgd")))


def test_c05_zero_saves_nothing_over_tensor_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    setups = [setup_of(f"tensor=2,zero={zero}") for zero in range(4)]
    for found in run_ranks(2, states_of_plans, setups):
        assert len({exact.total for exact in found}) == 1
    both = [setup_of(f"tensor=2,data=2,zero={zero}") for zero in (0, 3)]
    none, everything = run_ranks(4, states_of_plans, both)[0]
    assert 0.5 <= everything.total / none.total < 0.52


def test_c10_hybrid_shards_are_what_the_plan_says(run_ranks: Callable[..., list[Any]]) -> None:
    model = LLAMA.with_(vocab=28)
    setup = setup_of("data=4,replicate=2,zero=3", model)
    found = run_ranks(4, _layout_read_back, setup)
    assert [f["shard"] for f in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [f["replicate"] for f in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    for rank, one in enumerate(found):
        coord = mesh_of(setup.plan).coord(rank)
        kept = {h.weight.name: data_shard(h.shard, setup.plan, coord) for h in local_shards(setup, rank)}
        assert one["held"] == {name: (shard.offsets, shard.shape) for name, shard in kept.items()}
    assert found[0]["held"] == found[2]["held"], "replicas hold the same rows"
    local = [sum(prod(shape) for _, shape in one["held"].values()) for one in found]
    assert local == [parameter_count(model) // 2] * 4, "N/2, not N/4"


def _layout_read_back(setup: Setup) -> dict[str, Any]:
    trainer = trained(setup, steps=1)
    held = {name: (h.offsets, tuple(h.parameter.shape)) for name, h in trainer.held().items()}
    return {"shard": trainer.groups.shard.ranks, "replicate": trainer.groups.replicate.ranks, "held": held}
