"""Layouts of published runs: among the best tenth of all combinations of degrees, or `check` says why not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardsmith import api
from shardsmith.cli.main import main
from shardsmith.design.cost.estimate import estimate
from shardsmith.design.cost.subject import Subject, make_subject
from shardsmith.design.planner.bounded import Bounded
from shardsmith.design.planner.plans import setup_of
from shardsmith.design.planner.space import Space
from shardsmith.plan.file import dumps
from shardsmith.plan.line import parse_plan_line
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import settled
from shardsmith.specs.job import Workload
from shardsmith.specs.library import cluster_named, model_named
from shardsmith.specs.model import ModelSpec
from shardsmith.units import GIB

GPT3 = model_named("gpt3-175b")
LLAMA = model_named("llama3-405b")


def gpt(hidden: int, heads: int, layers: int, vocab: int = 51200, kv_heads: int = 0) -> ModelSpec:
    sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads or heads, "head_dim": hidden // heads}
    return GPT3.with_(**sizes, ffn=4 * hidden, layers=layers, vocab=vocab, context=4096)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a published run trained, and its degrees.

    `had` is what its software could do, where that was less; `part` what is held to keep a search of a large space
    quick, with the same verdict as without.
    """

    model: ModelSpec
    nodes: int
    batch: int
    degrees: str
    cluster: str = "h100"
    seq_len: int = 4096
    target: str = "megatron-core"
    had: dict[str, Any] = field(default_factory=dict)
    part: dict[str, Any] = field(default_factory=dict)

    @property
    def subject(self) -> Subject:
        work = Workload(seq_len=self.seq_len, global_batch=self.batch, dtype="bfloat16")
        return make_subject(self.model, work, cluster_named(self.cluster).with_nodes(self.nodes), self.target)

    @property
    def limit(self) -> float:
        gib = cluster_named(self.cluster).device.memory_gib
        assert gib is not None
        return gib * GIB

    @property
    def held(self) -> dict[str, int]:
        return {key: int(value) for key, value in (pair.split("=") for pair in self.degrees.split(","))}

    def space(self, **fixed: Any) -> Space:
        """All plans; for software of its time those that it had: 1F1B, loops, one way to place ranks."""
        s = self.subject
        assert s.cluster.devices is not None
        space = Space(subject=s, world=s.cluster.devices, fixed={**self.had, **self.part, **fixed})
        return space.thin() if self.had else space


# Before 2022 there was neither sequence parallelism nor selective recomputation, nor ring attention, nor ZeRO beside a
# pipeline; Megatron-LM's runs recomputed everything.
OLD: dict[str, Any] = {"recompute": "full", "sequence_parallel": False, "context": 1, "zero": 0}
A100: dict[str, Any] = {"cluster": "a100", "seq_len": 2048}
MEGATRON: dict[str, Any] = {**A100, "target": "megatron-lm-classic", "had": OLD}
DEEPSPEED: dict[str, Any] = {**A100, "target": "megatron-deepspeed-classic", "had": OLD | {"zero": 1}}

AMONG_THE_BEST = {
    # Narayanan et al. 2021, table 1, and GPT-3 as they trained it
    "megatron-1.7b": Run(model=gpt(2304, 24, 24), nodes=4, batch=512, degrees="tensor=1,pipeline=1", **MEGATRON),
    "megatron-3.6b": Run(model=gpt(3072, 32, 30), nodes=8, batch=512, degrees="tensor=2,pipeline=1", **MEGATRON),
    "megatron-145b": Run(model=gpt(12288, 96, 80), nodes=192, batch=2304, degrees="tensor=8,pipeline=8", **MEGATRON),
    "megatron-310b": Run(model=gpt(16384, 128, 96), nodes=240, batch=2160, degrees="tensor=8,pipeline=16", **MEGATRON),
    "megatron-530b": Run(model=gpt(20480, 128, 105), nodes=315, batch=2520, degrees="tensor=8,pipeline=35", **MEGATRON),
    "megatron-1t": Run(model=gpt(25600, 160, 128), nodes=384, batch=3072, degrees="tensor=8,pipeline=64", **MEGATRON),
    "gpt3-175b": Run(model=GPT3, nodes=128, batch=1536, degrees="tensor=8,pipeline=8", **MEGATRON),
    # Smith et al. 2022
    "mt-nlg-530b": Run(model=gpt(20480, 128, 105), nodes=280, batch=1920, degrees="tensor=8,pipeline=35", **DEEPSPEED),
    # BigScience 2022
    "bloom-176b": Run(
        model=gpt(14336, 112, 70, 250880), nodes=48, batch=2048, degrees="tensor=4,pipeline=12", **DEEPSPEED
    ),
    # NVIDIA 2024, the first of three stages that differ in data ranks
    "nemotron-4-340b": Run(
        model=gpt(18432, 96, 96, 256000, 8), nodes=192, batch=768, degrees="tensor=8,pipeline=12", part={"context": 1}
    ),
    # Recipes of NVIDIA's dgxc-benchmarking, v24.11 to v25.05
    "nemotron-340b": Run(
        model=gpt(18432, 96, 96, 256000, 8), nodes=128, batch=256, degrees="tensor=8,pipeline=8,context=1"
    ),
    "gpt3-175b-h100": Run(model=GPT3, nodes=128, batch=2048, seq_len=2048, degrees="tensor=4,pipeline=8,context=1"),
    "llama3-8b": Run(
        model=model_named("llama3-8b"), nodes=8, batch=1024, seq_len=8192, degrees="tensor=1,pipeline=1,context=2"
    ),
    "llama3-70b": Run(
        model=model_named("llama3-70b"), nodes=64, batch=1024, seq_len=8192, degrees="tensor=4,pipeline=4,context=2"
    ),
    "llama3.1-405b": Run(model=LLAMA, nodes=288, batch=1008, seq_len=8192, degrees="tensor=8,pipeline=9,context=2"),
    "grok1-314b": Run(
        model=model_named("mixtral-8x7b").with_(layers=64, hidden=6144, heads=48, vocab=128256),
        nodes=64,
        batch=1024,
        seq_len=8192,
        degrees="tensor=4,pipeline=8,context=2,expert=8",
        part={"expert_tensor": 1, "ulysses": 1},
    ),
    # Megatron-Core's documentation of mixtures of experts
    "mixtral-8x7b": Run(
        model=model_named("mixtral-8x7b"), nodes=8, batch=256, degrees="tensor=1,pipeline=4,context=1,expert=8"
    ),
    # DeepSeek-AI 2024
    "deepseek-v3": Run(
        model=model_named("deepseek-v3"),
        cluster="h800",
        nodes=256,
        batch=15360,
        degrees="tensor=1,pipeline=16,expert=64",
        # Of the whole space, 83 combinations are faster of 15,345 that fit: 0.5 %.
        part={"context": 1, "expert_tensor": 1},
    ),
}

EXPLAINED = {
    # Dubey et al. 2024, table 4: 8,192 tokens on 8,192 and 16,384 devices, then 131,072
    "llama3-405b-8k": (
        Run(model=LLAMA, nodes=1024, batch=2048, seq_len=8192, degrees="tensor=8,pipeline=16,context=1"),
        "context",
    ),
    "llama3-405b-16k": (
        Run(model=LLAMA, nodes=2048, batch=2048, seq_len=8192, degrees="tensor=8,pipeline=16,context=1"),
        "context",
    ),
    "llama3-405b-long": (
        Run(model=LLAMA, nodes=2048, batch=128, seq_len=131072, degrees="tensor=8,pipeline=16,context=16"),
        "context",
    ),
    "nemotron-15b": (
        Run(model=gpt(6144, 48, 32, 256000, 8), nodes=8, batch=256, degrees="tensor=4,pipeline=1,context=1"),
        "tensor",
    ),
    "megatron-7.5b": (
        Run(model=gpt(4096, 32, 36), nodes=16, batch=512, degrees="tensor=4,pipeline=1", **MEGATRON),
        "tensor",
    ),
    "megatron-18.4b": (
        Run(model=gpt(6144, 48, 40), nodes=32, batch=1024, degrees="tensor=8,pipeline=1", **MEGATRON),
        "tensor",
    ),
    "megatron-39.1b": (
        Run(model=gpt(8192, 64, 48), nodes=64, batch=1536, degrees="tensor=8,pipeline=2", **MEGATRON),
        "tensor",
    ),
    "megatron-76.1b": (
        Run(model=gpt(10240, 80, 60), nodes=128, batch=1792, degrees="tensor=8,pipeline=4", **MEGATRON),
        "tensor",
    ),
}


def best_of(run: Run) -> tuple[Setup, float]:
    """The best plan with the degrees of a run, and its seconds."""
    found = Bounded(space=run.space(**run.held), limit=run.limit).run()
    return setup_of(run.subject, found.ranked()[0], 0, Plan()), float(found.best.min())


@pytest.mark.parametrize("name", AMONG_THE_BEST)
def test_a_published_layout_is_in_the_best_tenth(name: str) -> None:
    run = AMONG_THE_BEST[name]
    _, own = best_of(run)
    faster = Bounded(space=run.space(), limit=run.limit, count=10**9).run(own * (1 - 1e-9))
    # Of every combination the usual plans that need least: there are no fewer combinations that fit.
    small = {"microbatch": 1, "recompute": "full"}
    fit = Bounded(space=run.space(**small).thin(), limit=run.limit, count=10**9).run()
    assert len(fit.plans) >= 10
    assert len(faster.plans) <= 0.1 * len(fit.plans)


@pytest.mark.parametrize("name", EXPLAINED)
def test_of_any_other_check_says_why(name: str) -> None:
    """What binds, and the degree whose next step makes up for most of what the best of all plans is ahead."""
    run, axis = EXPLAINED[name]
    setup, own = best_of(run)
    found = api.check(setup, target=run.target, anew=True)
    assert found.estimate is not None
    assert found.estimate.step_time_s == pytest.approx(own, rel=1e-9)
    assert "GiB on pipeline rank" in found.binds
    same, nearest = found.anew[0].ratio, found.anew[1]
    assert nearest.axis == axis
    assert same is not None
    assert nearest.ratio is not None
    assert nearest.ratio < min(same, 1.0)
    plan = settled(replace(setup, plan=parse_plan_line(nearest.plan)))
    assert estimate(plan, run.target).step_time_s == pytest.approx(nearest.ratio * own, rel=1e-9)
    assert not [fault for fault in api.check(plan, target=run.target).faults if fault.severity == "error"]
    best = float(Bounded(space=replace(run, had={}).space(), limit=run.limit).run().best.min())
    assert own - nearest.ratio * own > 0.75 * (own - best)
    if run.model is LLAMA:
        # One sequence a rank leaves no room for its activations: without recomputation a quarter less time, and
        # gibibytes too many. Twice the context ranks make that room.
        assert any(n.reason.endswith("too many") for n in found.barred)


def test_the_verb_shows_why_not(tmp_path: Path) -> None:
    setup, _ = best_of(EXPLAINED["nemotron-15b"][0])
    path = tmp_path / "plan.toml"
    path.write_text(dumps(setup), encoding="utf-8")
    shown = CliRunner().invoke(main, ["check", str(path), "--explain"]).output
    assert setup.plan.tensor == 4
    assert "compute is" in shown
    assert "same degrees" in shown
    data = json.loads(CliRunner().invoke(main, ["check", str(path), "--explain", "--json"]).stdout)
    assert [n["axis"] for n in data["anew"]][:2] == ["same degrees", "tensor"]
    assert data["binds"] in shown.replace("\n", " ")
