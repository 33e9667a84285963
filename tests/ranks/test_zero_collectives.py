"""What ranks send at each ZeRO level: the recorded step of every rank equals the layout's counts, calls and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardsmith.engine.dataset.batches import Synthetic, batches_of
from shardsmith.engine.train.step import Trainer
from shardsmith.layout.axes.data import data_collectives, states
from shardsmith.layout.collectives import collectives
from shardsmith.plan.file import make_setup
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import ModelSpec, parameter_count

pytestmark = pytest.mark.ranks

LLAMA = ModelSpec(
    name="llama", layers=4, hidden=10, heads=4, kv_heads=2, head_dim=2, ffn=18, vocab=13, context=16, init_std=0.2
)
GPT = LLAMA.with_(
    name="gpt",
    kv_heads=4,
    norm="layernorm",
    activation="gelu_tanh",
    positions="learned",
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    tied=True,
)
Counts = dict[tuple[str, str, str], tuple[int, int]]


def setup_of(line: str, model: ModelSpec = LLAMA, microbatches: int = 3, dtype: str = "float32") -> Setup:
    plan = make_setup(plan=line).plan
    base = make_setup(plan=line, seq_len=4, global_batch=plan.data * microbatches, dtype=dtype)
    return replace(base, model=model)


def recorded(setups: list[Setup]) -> list[Counts]:
    return [_recorded(setup) for setup in setups]


def _recorded(setup: Setup) -> Counts:
    """Calls and bytes of the second step: headers travel only in the first."""
    trainer = Trainer(setup, Optimisation(), rank=dist.get_rank(), seed=0, device=torch.device("cpu"))
    source = Synthetic(seed=0, vocab=setup.model.vocab, seq_len=4, ignored=0.5)
    batches = batches_of(source, seed=0, setup=setup)
    for step in range(2):
        trainer.recorder.counting = step == 1
        trainer.step(batches.batch(step, trainer.data_index))
    tallies = trainer.recorder.tallies.items()
    return {(k.axis, k.kind, k.purpose): (t.count, t.bytes) for k, t in tallies}


def predicted(setup: Setup, rank: int) -> Counts:
    return {(c.axis, c.kind, c.purpose): (c.count, c.bytes) for c in collectives(setup, rank)}


LINES = {
    2: (
        *(f"data=2,zero={z}" for z in range(4)),
        *(f"data=2,zero={z},bucket_mb=0.001" for z in range(4)),
        *(f"data=2,zero={z},zero_gather=per_step" for z in (2, 3)),
        *(f"data=2,zero={z},reduce_dtype=bfloat16" for z in (0, 1, 2, 3)),
        "data=2,zero=3,schedule=interleaved,stages_per_rank=2",
    ),
    3: (*(f"data=3,zero={z},bucket_mb=0.001" for z in (1, 2, 3)), "pipeline=3,zero=3"),
    4: (
        *(f"data=4,replicate=2,zero={z}" for z in (1, 2, 3)),
        "data=4,replicate=2,zero=3,zero_gather=per_step,bucket_mb=0.001",
        *(
            f"data=2,pipeline=2,schedule={s},zero={z}"
            for s in ("gpipe", "one_f_one_b", "interleaved")
            for z in (1, 2, 3)
        ),
        *(f"data=2,pipeline=2,zero={z},zero_gather=per_step" for z in (2, 3)),
        *(f"data=2,tensor=2,zero={z}" for z in (1, 3)),
        *(f"data=2,tensor=2,sequence_parallel=true,zero={z}" for z in (1, 2, 3)),
    ),
    8: ("data=2,pipeline=2,tensor=2,sequence_parallel=true,zero=3", "data=4,replicate=2,pipeline=2,zero=2"),
}


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["untied", "tied"])
@pytest.mark.parametrize("world", LINES)
def test_recorded_collectives_are_the_layouts(
    world: int, model: ModelSpec, run_ranks: Callable[..., list[Any]]
) -> None:
    setups = [setup_of(line, model) for line in LINES[world]]
    by_rank = run_ranks(world, recorded, setups, timeout=150)
    for at, setup in enumerate(setups):
        for rank, found in enumerate(by_rank):
            assert found[at] == predicted(setup, rank), f"{setup.plan}, rank {rank}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_travel_narrow(dtype: str, run_ranks: Callable[..., list[Any]]) -> None:
    setup = setup_of("data=2,zero=3", dtype=dtype)
    wide = setup_of("data=2,zero=3")
    for rank, (found,) in enumerate(run_ranks(2, recorded, [setup])):
        assert found == predicted(setup, rank)
        gathered, reduced = ("data", "all_gather", "weights"), ("data", "reduce_scatter", "gradients")
        assert found[gathered][1] * 2 == predicted(wide, rank)[gathered][1]
        assert found[reduced] == predicted(wide, rank)[reduced], "gradients are reduced in float32"


def test_c01_level_3_gathers_every_unit_for_each_microbatch_of_a_pipeline(run_ranks: Callable[..., list[Any]]) -> None:
    setups = [
        setup_of(f"data=2,pipeline=2,zero=3{more}", microbatches=m)
        for more in ("", ",zero_gather=per_step")
        for m in (2, 4)
    ]
    gathered, reduced = ("data", "all_gather", "weights"), ("data", "reduce_scatter", "gradients")
    for rank, (two, four, step_of_2, step_of_4) in enumerate(run_ranks(4, recorded, setups)):
        first = rank < 2
        # Two layers, forward and backward; the embedding forward only, or the head both ways.
        assert two[gathered][0] == 2 * (2 * 2 + (1 if first else 2))
        assert four[gathered] == (2 * two[gathered][0], 2 * two[gathered][1])
        assert (two[reduced][0], four[reduced][0]) == (2, 4)
        assert step_of_2[gathered] == step_of_4[gathered]
        assert step_of_2[gathered][0] == 3, "each unit once a step"
        assert step_of_2[reduced] == step_of_4[reduced] == (1, two[reduced][1] // 2)
        for setup, found in zip(setups, (two, four, step_of_2, step_of_4), strict=True):
            assert found == predicted(setup, rank)


def test_c12_deferred_gradients_trade_memory_for_traffic(run_ranks: Callable[..., list[Any]]) -> None:
    lines = ("data=8,zero=2,zero_gather=per_step", "data=8,zero=2")
    deferred, each = (setup_of(f"{line},bucket_mb=100", microbatches=4) for line in lines)
    kept = [states(s, 8 * 10**6).gradients for s in (deferred, each)]
    assert kept == [32 * 10**6, 4 * 10**6]
    sent = [data_collectives(s, [("w", (8000, 1000))], 4)[0] for s in (deferred, each)]
    assert [(c.kind, c.count, c.bytes) for c in sent] == [
        ("reduce_scatter", 1, 32 * 10**6),
        ("reduce_scatter", 4, 4 * 32 * 10**6),
    ]
    small = [setup_of(line.replace("data=8", "data=2"), microbatches=4) for line in lines]
    (once, four), _ = run_ranks(2, recorded, small)
    reduced = ("data", "reduce_scatter", "gradients")
    assert (once[reduced][0], four[reduced][0]) == (1, 4)
    assert four[reduced][1] == 4 * once[reduced][1]
    assert once[reduced][1] >= 4 * parameter_count(LLAMA)
