"""Faults of ZeRO that people have met elsewhere, each with its exact right value, on real ranks at every level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardsmith.engine.dataset.batches import Synthetic, batches_of
from shardsmith.engine.parallel.data import DataParallel, DataSettings
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.packing import rows_of
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.engine.train.rank_model import TIED
from shardsmith.engine.train.step import Trainer
from shardsmith.plan.file import make_setup
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import ModelSpec

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
GPT = ModelSpec(
    name="gpt",
    layers=2,
    hidden=8,
    heads=2,
    kv_heads=2,
    head_dim=4,
    ffn=8,
    vocab=7,
    context=8,
    norm="layernorm",
    activation="gelu_tanh",
    positions="learned",
    tied=True,
    init_std=0.2,
)
LEVELS = (0, 1, 2, 3)


def one_weight(level: int, start: float, *, stream: bool, **dtypes: torch.dtype) -> tuple[nn.Parameter, DataParallel]:
    """A weight [3, 1] of `start` on all data ranks, sharded at `level`."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    recorder = Recorder(rank)
    alone = Group(axis="data", ranks=(rank,), index=0, recorder=recorder)
    handle = dist.group.WORLD if world > 1 else None
    every = Group(axis="data", ranks=tuple(range(world)), index=rank, recorder=recorder, handle=handle)
    kinds = {"grad_dtype": torch.float32, "reduce_dtype": torch.float32, "optimizer_dtype": torch.float32} | dtypes
    settings = DataSettings(
        shard=every if level else alone,
        replicate=alone if level else every,
        level=level,
        stream=stream,
        bucket_mb=1.0,
        **kinds,
    )
    full = torch.full((3, 1), start, dtype=torch.bfloat16)
    rows = rows_of(full, settings.shard.size, settings.shard.index).clone()
    parameter = nn.Parameter(full)
    return parameter, DataParallel({"w": parameter}, {"place": ["w"]}, settings, {"w": rows})


def accumulate(parameter: nn.Parameter, data: DataParallel, gradients: list[float]) -> None:
    """One step in which every microbatch gives each element its gradient."""
    data.begin()
    for unit in data.units.values():
        unit.wait()
    for m, gradient in enumerate(gradients):
        reduced = data.settings.stream or m == len(gradients) - 1
        if reduced:
            data.arm()
        (parameter * gradient).sum().backward()
        if reduced:
            data.finish()
    data.wait()


def _sum_of_ones(level: int, stream: bool, dtype: str) -> list[float]:
    parameter, data = one_weight(level, 1.0, stream=stream, grad_dtype=getattr(torch, dtype))
    accumulate(parameter, data, [1.0] * 512)
    return data.shard_gradients["w"].flatten().tolist()


@pytest.mark.parametrize(("level", "stream"), [(0, False), (1, False), (2, True), (2, False), (3, True)])
def test_a28_512_ones_are_512(level: int, stream: bool, run_ranks: Callable[..., list[Any]]) -> None:
    (alone,) = run_ranks(1, _sum_of_ones, level, stream, "float32")
    assert alone == [512.0] * 3
    both = run_ranks(2, _sum_of_ones, level, stream, "float32")
    assert both == ([[1024.0] * 3] * 2 if level == 0 else [[1024.0] * 2, [1024.0]])


def test_a28_a_bfloat16_buffer_stops_at_256_where_the_plan_asks_for_one(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(1, _sum_of_ones, 0, False, "bfloat16") == [[256.0] * 3]


def _eight_updates(level: int, optimizer: str) -> dict[str, Any]:
    wide = getattr(torch, optimizer)
    parameter, data = one_weight(level, 1.0, stream=level >= 2, optimizer_dtype=wide, grad_dtype=wide)
    sgd = torch.optim.SGD(data.owned.values(), lr=0.001)
    for _ in range(8):
        accumulate(parameter, data, [0.25, 0.25])
        data.hand_over()
        sgd.step()
        data.publish()
        if level == 3:
            data.free_weights()
    for unit in data.units.values():
        unit.wait()
    owned, stored = data.owned["w"].data, data.stored["w"]
    return {"weight": set(parameter.flatten().tolist()), "owned": set(owned.flatten().tolist()), "dtype": stored.dtype}


@pytest.mark.parametrize("level", LEVELS)
def test_c04_small_updates_survive_in_the_master_weights(level: int, run_ranks: Callable[..., list[Any]]) -> None:
    for found in run_ranks(2, _eight_updates, level, "float32"):
        (master,) = found["owned"]
        assert abs(master - 0.992) < 1e-6
        assert found["weight"] == {0.9921875}
        assert found["dtype"] is torch.bfloat16
    for found in run_ranks(2, _eight_updates, level, "bfloat16"):
        assert found["weight"] == found["owned"] == {1.0}


def _tied_gradients(setup: Setup) -> tuple[Any, list[float]]:
    trainer = Trainer(setup, Optimisation(), rank=dist.get_rank(), seed=0, device=CPU)
    for data in trainer._all_data():
        data.begin()
    for unit in trainer.tied_data.units.values():
        unit.wait()
    stage, replica = trainer.coord.pipeline, trainer.coord.shard
    mean = (((1.0, 3.0), (5.0, 7.0))[stage][replica]) / 2
    (trainer.tied_data.parameters[TIED] * mean).sum().backward()
    trainer._reduce_gradients()
    return trainer.coord, trainer.tied_data.shard_gradients[TIED].flatten().tolist()


@pytest.mark.parametrize("zero", LEVELS)
def test_a10_every_copy_of_a_tied_weight_gets_8(zero: int, run_ranks: Callable[..., list[Any]]) -> None:
    base = make_setup(plan=f"data=2,pipeline=2,zero={zero},microbatches=1", seq_len=4, global_batch=2)
    found = run_ranks(4, _tied_gradients, replace(base, model=GPT))
    rows = {coord.shard: set() for coord, _ in found}  # type: ignore[var-annotated]
    for coord, gradient in found:
        assert set(gradient) == {8.0}
        rows[coord.shard].add(len(gradient))
    sizes = {0: {7 * 8}, 1: {7 * 8}} if zero == 0 else {0: {4 * 8}, 1: {3 * 8}}
    assert rows == sizes


def _norm_and_tokens(setup: Setup) -> tuple[float, int]:
    trainer = Trainer(setup, Optimisation(), rank=dist.get_rank(), seed=0, device=CPU)
    batches = batches_of(Synthetic(seed=3, vocab=7, seq_len=3), seed=0, setup=setup)
    result = trainer.step(batches.batch(0, trainer.data_index))
    return result.grad_norm, result.tokens


def test_a07_norm_under_a_pipeline_is_the_norm_of_one_device(run_ranks: Callable[..., list[Any]]) -> None:
    lines = ("microbatches=2", "pipeline=2,microbatches=2,zero=3", "data=2,zero=2", "data=2,pipeline=2,zero=3")
    norms = []
    for line in lines:
        setup = replace(make_setup(plan=line, seq_len=3, global_batch=2, dtype="float64"), model=GPT)
        found = set(run_ranks(setup.plan.world, _norm_and_tokens, setup))
        ((norm, tokens),) = found
        assert tokens == 6
        norms.append(norm)
    assert norms == pytest.approx([norms[0]] * len(lines), rel=1e-12)
