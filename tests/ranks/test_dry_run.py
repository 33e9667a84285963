"""The dry run beside the closed forms and beside real ranks: calls, bytes and FLOPs are equal, peaks nearly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocations import largest_sum
from click.testing import CliRunner
from dry_runs import compared_all

from shardsmith import api
from shardsmith.cli.main import main
from shardsmith.design.footprint.record import computed
from shardsmith.engine.dataset.batches import Synthetic, batches_of
from shardsmith.engine.dryrun.rank import dry_run_rank, recorded
from shardsmith.engine.dryrun.run import dry_run
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.engine.train.step import Trainer
from shardsmith.errors import Refused
from shardsmith.layout.record import Compared, StepRecord
from shardsmith.plan.file import make_setup
from shardsmith.plan.mesh import positions
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Dtype, Optimisation
from shardsmith.specs.library import cluster_named
from shardsmith.specs.model import ModelSpec

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(450)]

LLAMA = ModelSpec(
    name="llama", layers=4, hidden=64, heads=8, kv_heads=2, head_dim=8, ffn=192, vocab=330, context=128, init_std=0.1
)
GPT = LLAMA.with_(
    name="gpt",
    kv_heads=8,
    norm="layernorm",
    activation="gelu_tanh",
    positions="learned",
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    tied=True,
)
QWEN = LLAMA.with_(name="qwen", qk_norm=True, window=40)
LONG, LONG_GPT, LONG_QWEN = (m.with_(vocab=64, context=256) for m in (LLAMA, GPT.with_(dropout=0.1), QWEN))
DROPS = GPT.with_(dropout=0.1, attention_dropout=0.1)
GROUPED = LLAMA.with_(dropout=0.1, attention_dropout=0.1)


def setup_of(line: str, model: ModelSpec, dtype: Dtype = "bfloat16", seq_len: int = 64) -> Setup:
    plan = make_setup(plan=line).plan
    plan = replace(plan, microbatch=plan.microbatch or 1, microbatches=plan.microbatches or 2)
    assert plan.microbatch is not None
    assert plan.microbatches is not None
    batch = plan.data * plan.microbatch * plan.microbatches
    base = make_setup(plan=str(plan), seq_len=seq_len, global_batch=batch, dtype=dtype)
    return replace(base, model=model, cluster=cluster_named("local"))


SP = "tensor=2,sequence_parallel=true"
PLANS = {
    "zero 0, 1f1b, sp, microbatches of 2": setup_of(f"{SP},pipeline=2,data=2,microbatch=2", LLAMA),
    "zero 1, gpipe, full recompute": setup_of(
        "data=3,zero=1,pipeline=2,schedule=gpipe,recompute=full,bucket_mb=0.1", LLAMA
    ),
    "zero 2, interleaved, selective": setup_of(
        "data=2,zero=2,pipeline=2,schedule=interleaved,recompute=selective,bucket_mb=0.1", LLAMA
    ),
    "zero 3, 1f1b, full recompute, sp": setup_of(f"{SP},data=2,zero=3,pipeline=2,recompute=full", LLAMA),
    "zero 3 per step, replicated twice": setup_of("data=4,replicate=2,zero=3,zero_gather=per_step,pipeline=2", LLAMA),
    "zb_h1, zero 1, sp": setup_of(f"{SP},data=2,zero=1,pipeline=2,schedule=zb_h1,microbatch=2", LLAMA),
    "zb_v, zero 2, selective": setup_of("data=2,zero=2,pipeline=2,schedule=zb_v,recompute=selective", LLAMA),
    "dualpipe_v, zero 3": setup_of("data=2,zero=3,pipeline=2,schedule=dualpipe_v,microbatches=4,bucket_mb=0.1", LLAMA),
    "looped_bfs, copied key/value heads": setup_of("tensor=4,replicate_kv=true,pipeline=2,schedule=looped_bfs", LLAMA),
    "tied gpt, 1f1b, sp": setup_of(f"{SP},pipeline=2,microbatch=2", GPT, "float32"),
    "tied gpt, both ends on a rank, zero 2": setup_of(
        "schedule=interleaved,stages_per_rank=2,data=2,zero=2,microbatch=2", GPT
    ),
    "windows and normed heads, zb_v, sp, full": setup_of(f"{SP},pipeline=2,schedule=zb_v,recompute=full", QWEN),
    "loss by chunks, zb_h1, zero 3": setup_of("data=2,zero=3,pipeline=2,schedule=zb_h1,loss_chunk=24", LLAMA),
    "loss by chunks, zb_h1, float64": setup_of("tensor=2,pipeline=2,schedule=zb_h1,loss_chunk=24", LLAMA, "float64"),
    "dropout, sp, zero 1, full recompute": setup_of(
        f"{SP},data=2,zero=1,recompute=full,microbatch=2", DROPS, "float32"
    ),
    "dropout, zero 3, selective": setup_of("data=2,zero=3,pipeline=2,recompute=selective", DROPS),
    "dropout, zb_h1, full recompute": setup_of("tensor=2,pipeline=2,schedule=zb_h1,recompute=full", GROUPED),
    "dropout of activations, sp, interleaved": setup_of(
        f"{SP},pipeline=2,schedule=interleaved,microbatch=2", GPT.with_(dropout=0.1)
    ),
    "dropout in windows, zb_v, zero 2": setup_of(
        "data=2,zero=2,pipeline=2,schedule=zb_v", QWEN.with_(attention_dropout=0.1), "float32"
    ),
    "ring of 4, interleaved": setup_of(
        "context=4,pipeline=2,schedule=interleaved,microbatch=2", LONG, "float32", seq_len=256
    ),
    "ring and heads, full recompute, zero 1": setup_of(
        "context=4,ulysses=2,pipeline=2,recompute=full,zero=1,microbatch=2", LONG, seq_len=256
    ),
    "heads to 4 ranks, zero 3": setup_of("context=4,ulysses=4,data=2,zero=3,microbatch=4", LONG, seq_len=256),
    "heads, sp, zb_h1": setup_of(f"context=2,ulysses=2,{SP},pipeline=2,schedule=zb_h1", LONG, seq_len=256),
    "ring, dropout, sp, selective, zero 2": setup_of(
        f"context=2,{SP},zero=2,recompute=selective,microbatch=2", LONG_GPT, "float32", seq_len=256
    ),
    "ring in windows, zb_v, full recompute": setup_of(
        "context=2,pipeline=2,schedule=zb_v,recompute=full,microbatch=2", LONG_QWEN, seq_len=256
    ),
    "sums beside weight gradients, sp, gpipe": setup_of(
        f"{SP},overlap=weight_gradient,pipeline=2,schedule=gpipe,microbatch=2", LONG, "float32", seq_len=256
    ),
    "chunks, full recompute": setup_of(
        "tensor=2,overlap=chunks,recompute=full,pipeline=2,microbatch=2", LONG, seq_len=256
    ),
    "chunks beside weight gradients, sp, selective, zero 3": setup_of(
        f"{SP},overlap=chunks+weight_gradient,recompute=selective,data=2,zero=3,pipeline=2,microbatch=2",
        LONG_GPT,
        "float32",
        seq_len=256,
    ),
    "halves, full recompute": setup_of(
        "tensor=2,overlap=half_microbatches,recompute=full,pipeline=2,microbatch=4", LONG, "float32", seq_len=256
    ),
    "halves, sp, full recompute, zb_h1": setup_of(
        f"{SP},overlap=half_microbatches,recompute=full,pipeline=2,schedule=zb_h1,microbatch=2", LONG_QWEN, seq_len=256
    ),
    "halves, sp, selective, dropout, zero 3": setup_of(
        f"{SP},overlap=half_microbatches,recompute=selective,data=2,zero=3,pipeline=2,microbatch=4,bucket_mb=0.1",
        LONG_GPT,
        seq_len=256,
    ),
    "halves beside weight gradients, ring": setup_of(
        "tensor=2,overlap=half_microbatches+weight_gradient,context=2,microbatch=2,zero=2", LONG, seq_len=256
    ),
    "chunks, sp, zb_h1, zero 1": setup_of(
        f"{SP},overlap=chunks,data=2,zero=1,pipeline=2,schedule=zb_h1,microbatch=2", LONG, seq_len=256
    ),
    "reduced in bfloat16, one rank of 2": setup_of("data=2,reduce_dtype=bfloat16,microbatch=4", LLAMA),
}
"""Each ZeRO level, schedule, recomputation, and sequence parallelism; dropout, the context axis, and overlap."""


@pytest.fixture(scope="module")
def compared() -> dict[str, Compared]:
    return compared_all({name: (setup, 1.0) for name, setup in PLANS.items()})


@pytest.mark.parametrize("name", PLANS)
def test_the_closed_forms_say_what_the_dry_run_finds(name: str, compared: dict[str, Compared]) -> None:
    c = compared[name]
    assert c.model.flops == c.run.flops
    assert set(c.model.collectives) == set(c.run.collectives)
    assert abs(c.peak_error) < 0.003, f"rank {c.run.rank}: {c.run.memory} {c.model.memory}"


def test_every_item_is_named_alike(compared: dict[str, Compared]) -> None:
    c = compared["zero 3, 1f1b, full recompute, sp"]
    for item in ("weights", "gradients", "activations", "messages", "buckets", "gathered"):
        assert abs(c.run.memory.get(item, 0) - c.model.memory.get(item, 0)) <= 0.01 * c.run.peak, item
    assert c.run.memory["gathered"] > 0


REAL = {
    "zero 0": setup_of("tensor=2,pipeline=2,microbatch=2", LLAMA, "float32", seq_len=128),
    "zero 2, zb_v": setup_of("data=2,zero=2,pipeline=2,schedule=zb_v", LLAMA, "float32", seq_len=128),
    "zero 1, full recompute, sp": setup_of(
        "tensor=2,sequence_parallel=true,data=2,zero=1,recompute=full,microbatch=2", LLAMA, "float32", seq_len=128
    ),
    "zero 3, selective": setup_of("data=2,zero=3,pipeline=2,recompute=selective,microbatch=2", GPT, "float32"),
    "context": setup_of("context=4,ulysses=2,zero=2,microbatch=2", LLAMA, "float32", seq_len=128),
    "overlap": setup_of(
        f"{SP},overlap=chunks+weight_gradient,data=2,zero=1,microbatch=2", LLAMA, "float32", seq_len=128
    ),
    "dropout": setup_of(f"{SP},pipeline=2,recompute=full,microbatch=2", DROPS, "float32"),
}


def measured(setups: list[Setup]) -> list[tuple[int, StepRecord]]:
    return [_measured(setup) for setup in setups]


def _measured(setup: Setup) -> tuple[int, StepRecord]:
    """The largest sum of allocations in the third step, and what the recorder counted."""
    batches = batches_of(
        Synthetic(seed=0, vocab=setup.model.vocab, seq_len=setup.workload.seq_len), seed=0, setup=setup
    )

    def made() -> Trainer:
        return Trainer(setup, Optimisation(), rank=dist.get_rank(), seed=0, device=torch.device("cpu"))

    def step(trainer: Trainer, number: int) -> None:
        trainer.recorder.counting = number == 2
        trainer.step(batches.batch(number, trainer.data_index))

    peak, trainer = largest_sum(made, step, of=2)
    record = StepRecord(
        rank=dist.get_rank(), pipeline_rank=trainer.coord.pipeline, memory={}, collectives=recorded(trainer), flops={}
    )
    return peak, record


@pytest.fixture(scope="module")
def real() -> list[list[tuple[int, StepRecord]]]:
    return run_forked(measured, 4, list(REAL.values()), timeout_s=150)


@pytest.mark.parametrize("name", REAL)
def test_real_ranks_do_what_the_dry_run_finds(name: str, real: list[list[tuple[int, StepRecord]]]) -> None:
    """What torch allocated for the rank itself; batches are numpy's."""
    at = list(REAL).index(name)
    (dry,) = dry_run(REAL[name], (3 * (at % 2),), timeout_s=150)
    peak, record = real[dry.rank][at]
    assert set(record.collectives) == set(dry.collectives)
    expected = dry.peak - dry.memory["inputs"]
    assert abs(expected / peak - 1.0) < 0.005, f"rank {dry.rank}: dry {dry.memory}, real {peak}"


def test_a_thousand_ranks_on_one_machine() -> None:
    """All four positions of a pipeline of 1,024 ranks, each the closed form's."""
    setup = setup_of("tensor=8,replicate_kv=true,pipeline=4,data=32,zero=1", LLAMA)
    assert setup.plan.world == 1024
    found = api.dryrun(setup, all_stages=True, timeout_s=150)
    assert [c.run.pipeline_rank for c in found.ranks] == list(range(4))
    assert [c.run.rank for c in found.ranks] == list(positions(setup.plan))
    assert all(c.same_collectives and c.model.flops == c.run.flops for c in found.ranks)
    # A rank holds so little here that step counts and lone numbers, which no form lists, are 0.3 % of it.
    assert max(abs(c.peak_error) for c in found.ranks) < 0.01
    assert found.fullest.run.peak == max(c.run.peak for c in found.ranks)


def test_nothing_is_left_behind() -> None:
    """A second dry run in one process finds the same, and no process group or patched method stays."""
    run_forked(_twice, 1, join=False, timeout_s=100)


def _twice() -> None:
    setup = PLANS["zb_v, zero 2, selective"]
    resize = torch.UntypedStorage.resize_
    first, second = (dry_run_rank(setup, 0, Optimisation()) for _ in range(2))
    assert first == second
    assert not dist.is_initialized()
    assert torch.UntypedStorage.resize_ is resize


def invoke(*words: str) -> Any:
    return CliRunner().invoke(main, ["dryrun", *words])


def test_the_verb_prints_both_sides() -> None:
    plan = "tensor=2,pipeline=2,data=2,zero=1,microbatches=2"
    found = json.loads(invoke("--plan", plan, "--seq-len", "32", "--rank", "5", "--json").output)
    assert found["rank"] == 5
    assert found["peak_gib"] == pytest.approx(sum(found["memory_gib"].values()))
    assert found["collectives"]["send"] == {"count": 2, "bytes": 2 * 32 * 128 * 4}
    assert found["collectives"] == found["model"]["collectives"]
    assert found["flops"] == found["model"]["flops"]
    assert found["difference"]["flops"] == 0
    assert abs(found["difference"]["peak"]) < 0.01
    assert found["ranks"][0]["model"] == found["model"]


REFUSED: dict[str, tuple[str, ...]] = {
    "X204": ("--plan", "tensor=2", "--rank", "2"),
    "X205": ("--plan", "compile=true"),
    "T203": ("--plan", "tensor=3"),
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_cannot_be_run_dry_is_refused(code: str) -> None:
    result = invoke(*REFUSED[code], "--json")
    assert result.exit_code == 1
    assert code in [error["code"] for error in json.loads(result.output)["errors"]]


def test_attention_across_ranks_with_dropout_is_refused() -> None:
    with pytest.raises(Refused, match="X209"):
        api.dryrun(setup_of("context=2", LLAMA.with_(attention_dropout=0.1)))


def test_a_plan_that_does_not_fit_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    large = make_setup(plan="tensor=8", model="llama3-405b", cluster="h100", nodes=1)
    assert [fault.code for fault in api.check(large).errors] == ["H404"]
    seen: list[Callable[..., Any]] = []
    monkeypatch.setattr(
        "shardsmith.engine.dryrun.run.dry_run", lambda *a, **k: seen.append(a[0]) or [computed(large, 0)]
    )
    assert api.dryrun(large).fullest.run.peak > 80 * 2**30
    assert seen
