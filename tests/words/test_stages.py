"""Which layers stand on which stage and rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardsmith.plan.file import make_setup
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import (
    even_layers,
    settled,
    stage_costs,
    stage_faults,
    stage_of_layer,
    stages,
    weighed_layers,
)
from shardsmith.specs.library import model_named
from shardsmith.specs.model import ModelSpec

TINY = model_named("tiny-llama")


def layers_of(plan: Plan, model: ModelSpec, rank: int) -> list[list[int]]:
    return [list(s.layers) for s in stages(plan, model) if s.rank == rank]


def setup(line: str, model: ModelSpec = TINY, seq_len: int = 128) -> Setup:
    base = make_setup(plan=line, seq_len=seq_len)
    return Setup(model=model, workload=base.workload, cluster=base.cluster, plan=base.plan, source="--plan")


def test_b05_remainders_go_to_the_first_stages() -> None:
    assert even_layers(30, 4) == (8, 8, 7, 7)
    assert even_layers(10, 3) == (4, 3, 3)


@given(layers=st.integers(1, 40), pipeline=st.integers(1, 8))
def test_b05_every_layer_stands_exactly_once(layers: int, pipeline: int) -> None:
    found = stages(Plan(pipeline=pipeline), TINY.with_(layers=layers))
    assert [layer for s in found for layer in s.layers] == list(range(layers))
    assert max(len(s.layers) for s in found) - min(len(s.layers) for s in found) <= 1
    assert [s.embedding for s in found] == [True] + [False] * (pipeline - 1)
    assert [s.head for s in found] == [False] * (pipeline - 1) + [True]


@given(layers=st.integers(1, 40), pipeline=st.integers(1, 8), seq_len=st.sampled_from((128, 8192)))
def test_b05_weighed_splits_hold_every_layer_and_are_never_worse(layers: int, pipeline: int, seq_len: int) -> None:
    model = TINY.with_(layers=layers)
    best = weighed_layers(model, pipeline, seq_len)
    assert sum(best) == layers
    even = even_layers(layers, pipeline)
    assert max(stage_costs(model, best, seq_len)) <= max(stage_costs(model, even, seq_len))


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(total,)]
    return [(first, *rest) for first in range(total + 1) for rest in compositions(total - first, parts - 1)]


@settings(deadline=None)
@given(layers=st.integers(1, 8), pipeline=st.integers(1, 4), vocab=st.sampled_from((512, 8192, 65536)))
def test_weighed_layers_equal_brute_force(layers: int, pipeline: int, vocab: int) -> None:
    model = TINY.with_(layers=layers, vocab=vocab)
    best = max(stage_costs(model, weighed_layers(model, pipeline, 128), 128))
    assert best == pytest.approx(min(max(stage_costs(model, c, 128)) for c in compositions(layers, pipeline)))


def test_a31_interleaving_deals_chunks_round_robin() -> None:
    model = TINY.with_(layers=8)
    two = Plan(pipeline=2, schedule="interleaved", stages_per_rank=2)
    assert layers_of(two, model, 0) == [[0, 1], [4, 5]]
    assert layers_of(two, model, 1) == [[2, 3], [6, 7]]
    four = two.with_(stages_per_rank=4)
    assert layers_of(four, model, 0) == [[0], [2], [4], [6]]
    assert layers_of(four, model, 1) == [[1], [3], [5], [7]]
    assert stage_of_layer(four, model, 5).rank == 1


def test_explicit_layers_may_leave_the_ends_to_embedding_and_head() -> None:
    plan = Plan(pipeline=4, layers=(0, 2, 2, 0))
    assert [s.layers for s in stages(plan, TINY)] == [(), (0, 1), (2, 3), ()]
    assert not stage_faults(setup(str(plan)))


def test_all_faults_of_a_layer_list_come_at_once() -> None:
    faults = stage_faults(setup("pipeline=2,layers=1+0+2"))
    assert [f.code for f in faults] == ["P302", "P303", "P304"]
    assert "adds up to 3, but tiny-llama has 4 layers" in faults[1].message
    assert all("layers = 2+2" in f.hint for f in faults)


def test_more_stages_than_layers_offers_neighbours() -> None:
    (fault,) = stage_faults(setup("pipeline=6"))
    assert fault.code == "P301"
    assert "6 x 1 = 6 stages for 4 layers" in fault.message
    assert fault.hint == "pipeline = 4, or layers = 0+1+1+1+1+0 (embedding and head on stages of their own)"
    (fault,) = stage_faults(setup("pipeline=2,schedule=interleaved,stages_per_rank=3"))
    assert fault.hint.startswith("pipeline = 1, or stages_per_rank = 2")


def test_a_heavy_head_is_pointed_out_with_both_numbers() -> None:
    model = model_named("llama3-8b")
    (fault,) = stage_faults(setup("pipeline=8", model, 8192))
    assert (fault.code, fault.severity) == ("P305", "warning")
    best = weighed_layers(model, 8, 8192)
    assert best[-1] < 4
    costs = [max(stage_costs(model, c, 8192)) / 1e6 for c in (even_layers(32, 8), best)]
    assert "layers = " + "+".join(map(str, best)) in fault.message
    assert all(f"{cost:.4g}" in fault.message for cost in costs)
    assert costs[1] < 0.98 * costs[0]
    assert not stage_faults(setup("pipeline=2", TINY))


def test_weighed_layers_become_numbers_once_the_workload_is_known() -> None:
    model = model_named("llama3-8b")
    asked = setup("pipeline=8", model, 8192).with_plan(layers="weighed")
    plan = settled(asked).plan
    assert plan.layers == weighed_layers(model, 8, 8192)
    assert sum(len(s.layers) for s in stages(plan, model)) == 32
    assert not stage_faults(settled(asked))
    with pytest.raises(AssertionError, match="settle"):
        stages(asked.plan, model)
