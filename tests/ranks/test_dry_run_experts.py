"""Dry runs of experts and latent attention, with a stated routing, beside the closed forms and beside real ranks."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import pytest
import torch
import torch.distributed as dist
from allocations import largest_sum
from click.testing import CliRunner
from dry_runs import compared_all
from test_dry_run import LLAMA, SP, setup_of

from shardsmith import api
from shardsmith.cli.main import main
from shardsmith.design.footprint.record import computed
from shardsmith.engine.dataset.batches import Synthetic, batches_of
from shardsmith.engine.dryrun.rank import recorded
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.engine.runtime.grouped import kernel_for
from shardsmith.engine.train.step import Trainer
from shardsmith.errors import Refused
from shardsmith.layout.record import Compared, StepRecord
from shardsmith.layout.routing import StatedRouting
from shardsmith.plan.file import make_setup
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import Experts, Latent, ModelSpec

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(450)]

SMALL = LLAMA.with_(vocab=96)
"""A head so small that the layers hold most."""

MIXTRAL = SMALL.with_(name="mixtral", experts=Experts(count=8, top_k=2, ffn=48, z_loss=0.1))
QWEN = SMALL.with_(
    name="qwen-moe",
    qk_norm=True,
    experts=Experts(count=8, top_k=4, ffn=32, first_dense=1, normalise=False, shared_ffn=64, shared_gate=True),
)
DEEPSEEK = SMALL.with_(
    name="deepseek",
    kv_heads=8,
    head_dim=12,
    latent=Latent(kv_rank=24, nope=8, rope=4, value=8, q_rank=32),
    experts=Experts(
        count=8,
        top_k=3,
        ffn=32,
        first_dense=1,
        score="sigmoid",
        scale=2.5,
        groups=4,
        top_groups=2,
        shared_ffn=32,
        balance="bias",
        aux_loss=0.001,
    ),
)
LITE = DEEPSEEK.with_(
    name="deepseek-lite",
    latent=Latent(kv_rank=24, nope=8, rope=4, value=8),
    experts=Experts(count=4, top_k=2, ffn=32, balance="none"),
)
LATENT = DEEPSEEK.with_(name="latent", experts=None)

PLANS: dict[str, tuple[Setup, float]] = {
    "all experts here, float64, sp, zero 1": (setup_of(f"{SP},zero=1", LITE, "float64"), 1.0),
    "zero 3, uneven, float32": (setup_of("data=4,expert=2,zero=3,microbatch=2", MIXTRAL, "float32"), 1.5),
    "an expert a rank, rows cut by zero 2": (
        setup_of("data=4,tensor=2,expert=4,zero=2,recompute=selective,bucket_mb=0.05", LITE),
        1.25,
    ),
    "capacity, expert_tensor, sp, full recompute": (
        setup_of(f"{SP},data=2,expert=2,expert_tensor=2,recompute=full,capacity_factor=0.7", MIXTRAL),
        1.0,
    ),
    "tensor ranks that route parts, selective": (setup_of("tensor=2,expert=2,recompute=selective", QWEN), 1.0),
    "zb_v, sp, shared experts with gates": (
        setup_of(f"{SP},expert=2,pipeline=2,schedule=zb_v", QWEN.with_(tied=True)),
        1.0,
    ),
    "dualpipe_v, zero 3": (
        setup_of("data=2,pipeline=2,expert=2,schedule=dualpipe_v,zero=3,microbatches=4", DEEPSEEK),
        1.5,
    ),
    "zb_h1, full recompute, zero 1": (
        setup_of("data=2,pipeline=2,expert=2,schedule=zb_h1,zero=1,recompute=full", DEEPSEEK),
        1.0,
    ),
    "context, tensor and data in one expert mesh, capacity": (
        setup_of(f"context=2,{SP},data=2,expert=8,capacity_factor=1.0,microbatch=2", DEEPSEEK),
        1.5,
    ),
    "latent attention, zero 3 per step, interleaved": (
        setup_of("data=2,zero=3,zero_gather=per_step,pipeline=2,schedule=interleaved,tensor=2", LATENT),
        1.0,
    ),
}
"""Each with its imbalance: experts and latents under ZeRO levels, schedules, recomputations, and other axes."""


@pytest.fixture(scope="module")
def compared() -> dict[str, Compared]:
    return compared_all(PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_the_closed_forms_say_what_a_dry_run_of_experts_finds(name: str, compared: dict[str, Compared]) -> None:
    c = compared[name]
    assert c.model.flops == c.run.flops
    assert set(c.model.collectives) == set(c.run.collectives)
    assert abs(c.peak_error) < 0.003, f"rank {c.run.rank}: {c.run.memory} {c.model.memory}"


def test_the_plans_have_both_kernels() -> None:
    kinds = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
    found = {kernel_for(kinds[s.workload.dtype], s.model.hidden, 32) for s, _ in PLANS.values()}
    assert found == {"loop", "grouped_mm"}


REAL: dict[str, tuple[Setup, float]] = {
    "uneven, zero 2": (setup_of("data=4,expert=2,zero=2,microbatch=2", MIXTRAL, "float32", seq_len=128), 1.5),
    "tensor and pipeline, selective": (
        setup_of("tensor=2,pipeline=2,expert=2,recompute=selective,microbatch=2", DEEPSEEK, "float32", seq_len=128),
        1.0,
    ),
}
"""Ranks that are told to choose what the dry run of rank 0 states."""


def measured(plans: list[tuple[Setup, float]]) -> list[tuple[int, StepRecord]]:
    return [_measured(StatedRouting(setup, 0, imbalance)) for setup, imbalance in plans]


def _measured(stated: StatedRouting) -> tuple[int, StepRecord]:
    setup = stated.setup
    choices = torch.tensor(stated.choices)
    data = Synthetic(seed=0, vocab=setup.model.vocab, seq_len=setup.workload.seq_len)
    batches = batches_of(data, seed=0, setup=setup)

    def made() -> Trainer:
        trainer = Trainer(setup, Optimisation(), rank=dist.get_rank(), seed=0, device=torch.device("cpu"))
        trainer.work.replay, trainer.work.forced = defaultdict(lambda: choices), True
        return trainer

    def step(trainer: Trainer, number: int) -> None:
        trainer.recorder.counting = number == 1
        trainer.step(batches.batch(number, trainer.data_index))

    peak, trainer = largest_sum(made, step, of=1)
    counts, stage = recorded(trainer), trainer.coord.pipeline
    return peak, StepRecord(rank=dist.get_rank(), pipeline_rank=stage, memory={}, collectives=counts, flops={})


@pytest.fixture(scope="module")
def real() -> list[list[tuple[int, StepRecord]]]:
    return run_forked(measured, 4, list(REAL.values()), timeout_s=150)


@pytest.mark.parametrize("name", REAL)
def test_real_ranks_with_experts_do_what_the_dry_run_finds(name: str, real: list[list[tuple[int, StepRecord]]]) -> None:
    setup, imbalance = REAL[name]
    found = api.dryrun(setup, imbalance=imbalance, timeout_s=150)
    peak, record = real[0][list(REAL).index(name)]
    assert set(record.collectives) == set(found.fullest.run.collectives)
    assert abs(found.fullest.run.peak / peak - 1.0) < 0.01, f"dry {found.fullest.run.peak}, real {peak}"


def routing(line: str, model: ModelSpec, rank: int = 0, imbalance: float = 1.0) -> StatedRouting:
    return StatedRouting(setup_of(line, model), rank, imbalance)


def test_a_stated_routing_is_one_that_could_be() -> None:
    """Every token has different experts, and what all ranks send arrives: on the fullest, as much as stated."""
    for line, model, imbalance in (
        ("data=2,tensor=2,expert=4", QWEN, 1.7),
        ("data=2,expert=2", LITE, 1.0),
        ("context=2,tensor=2,expert=2,expert_tensor=2", DEEPSEEK, 1.3),
    ):
        stated = routing(line, model, 1, imbalance)
        assert model.experts is not None
        assert all(len(set(c)) == model.experts.top_k and max(c) < model.experts.count for c in stated.choices)
        ranks = range(stated.setup.plan.world)
        arrived = [stated.received(rank) for rank in ranks]
        assert sum(arrived) == sum(stated.sent(rank) for rank in ranks)
        assert stated.received(1) == max(arrived) == pytest.approx(imbalance * sum(arrived) / len(arrived), rel=0.02)
        loads = Counter(e for chosen in stated.choices for e in chosen)
        assert len(loads) == model.experts.count


def test_capacity_drops_what_finds_no_room() -> None:
    even, full = (routing("data=2,expert=2,capacity_factor=1.0", MIXTRAL, 0, f) for f in (1.0, 1.5))
    every = 64 * 2
    assert even.sent(0) == every
    assert full.received(0) == 2 * every // 2  # no more than were they even
    assert full.sent(0) == every - every // 4


def test_a_routing_that_cannot_be_is_refused() -> None:
    setup = setup_of("data=2,expert=2", MIXTRAL)
    for imbalance in (0.9, 2.1):
        with pytest.raises(Refused, match="E107"):
            api.dryrun(setup, imbalance=imbalance)
    with pytest.raises(Refused, match="no experts"):
        api.dryrun(setup_of("data=2", LLAMA), imbalance=1.5)


def test_the_verb_takes_an_imbalance() -> None:
    plan = ("--plan", "data=2,expert=2,microbatches=2", "--model", "tiny-moe", "--seq-len", "32")
    uneven = json.loads(CliRunner().invoke(main, ["dryrun", "--json", *plan, "--imbalance", "1.5"]).output)
    even = computed(make_setup(plan=plan[1], model="tiny-moe", seq_len=32), 0)
    assert uneven["imbalance"] == 1.5
    assert uneven["flops"] == uneven["model"]["flops"] > even.total_flops
    assert uneven["peak_gib"] * 2**30 > even.peak
