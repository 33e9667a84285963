"""The fullest rank that the planner knows of is the fullest one, also where layers with and without experts mix."""

import random
from dataclasses import replace

import pytest

from shardsmith import api
from shardsmith.design.cost.estimate import estimate_plan
from shardsmith.design.cost.price import price
from shardsmith.design.cost.subject import Subject, make_subject
from shardsmith.design.planner.plans import setup_of
from shardsmith.design.planner.space import Space
from shardsmith.design.planner.tables import everything
from shardsmith.design.reports.plan_tables import rank_columns
from shardsmith.plan.plan import Plan
from shardsmith.plan.precision import precision
from shardsmith.specs.job import Workload
from shardsmith.specs.library import cluster_named, model_named


def mixed(layers: int, first_dense: int, ffn: int) -> Subject:
    """Layers without experts first; `ffn` says whether they or those with experts are the larger."""
    model = model_named("mixtral-8x7b")
    assert model.experts is not None
    model = model.with_(layers=layers, ffn=ffn, experts=replace(model.experts, first_dense=first_dense))
    work = Workload(seq_len=1024, global_batch=16, dtype="bfloat16")
    return make_subject(model, work, replace(cluster_named("h100"), nodes=1))


@pytest.mark.parametrize("ffn", [1024, 200_000])
@pytest.mark.parametrize(("layers", "first_dense"), [(16, 3), (17, 5), (11, 1), (8, 7)])
def test_no_rank_holds_more_than_the_decisive_ones(layers: int, first_dense: int, ffn: int) -> None:
    s = mixed(layers, first_dense, ffn)
    p = everything(Space(subject=s, world=8, fixed={"context": 1, "tensor": 1}))
    peaks = price(s, p, precision(Plan(), s.workload)).peak
    deep = [row for row in range(len(p)) if p.pipeline[row] > 2]
    for row in random.Random(0).sample(deep, 60):
        ranks = estimate_plan(s, setup_of(s, p, row, Plan())).memory
        fullest = max(ranks, key=lambda rank: rank.total)
        assert fullest.total <= peaks[row] * (1 + 1e-12), (layers, first_dense, ffn, fullest.pipeline_rank)


def test_deepseek_plans_with_dense_ranks_between_the_ends_fit() -> None:
    """Rank 1 of 32 has layers without experts only, and less to hold than rank 2."""
    ask = {"nodes": 32, "global_batch": 4096, "seq_len": 4096, "fix": ["context=1", "tensor=1", "pipeline=32"]}
    for choice in api.search("deepseek-v3", "h800", **ask).plans:  # type: ignore[arg-type]
        assert choice.estimate.peak <= 79.18 * 2**30
        assert max(rank.total for _, rank in rank_columns(choice.estimate.memory)) == choice.estimate.peak
