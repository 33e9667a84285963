"""Each row of the table of plans against one process, and proof that a broken engine would be caught."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from plans import GPT, TABLE, Row, row
from together import Together
from together import certified as certified_together

from shardsmith.engine.dataset.batches import Microbatch
from shardsmith.engine.models import initialise
from shardsmith.engine.parity.certificate import Certificate
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.train import step
from shardsmith.engine.train.stage_work import StageWork
from shardsmith.layout.facts import Shard
from shardsmith.plan.batch import batching
from shardsmith.plan.plan import Plan
from shardsmith.plan.stages import settled, stages, stages_per_rank
from shardsmith.schedule import orders
from shardsmith.specs.model import Weight

pytestmark = pytest.mark.ranks

CERTIFICATES = Together(TABLE)


def certified(found: Row) -> Certificate:
    (certificate,) = certified_together([found], 60.0)
    return certificate


@pytest.mark.parametrize("found", TABLE, ids=lambda found: found.name)
def test_plan_equals_one_process(found: Row) -> None:
    certificate = CERTIFICATES.holds(found)
    assert certificate.tolerance == {"float64": 1e-10, "float32": 2e-5}[found.setup.workload.dtype]


def plans(**degrees: int) -> list[Row]:
    """Rows in float64 whose degrees are exactly these, all others being 1."""
    asked = {"data": 1, "tensor": 1, "pipeline": 1} | degrees
    strict = [r for r in TABLE if r.setup.workload.dtype == "float64"]
    return [r for r in strict if all(getattr(r.setup.plan, axis) == degree for axis, degree in asked.items())]


def test_names_are_unique() -> None:
    assert [name for name, times in Counter(r.name for r in TABLE).items() if times > 1] == []


@pytest.mark.parametrize("tied", [False, True])
def test_the_table_has_every_axis_every_pair_and_the_triple(tied: bool) -> None:
    def has(**degrees: int) -> bool:
        return any(r.setup.model.tied is tied for r in plans(**degrees))

    for axis in ("data", "tensor", "pipeline"):
        assert all(has(**{axis: degree}) for degree in ((2, 3) if tied and axis == "data" else (2, 3, 4))), axis
    assert all(has(**dict.fromkeys(pair, 2)) for pair in combinations(("data", "tensor", "pipeline"), 2))
    assert has(data=2, tensor=2, pipeline=2)
    for degree in (2, 3, 4):
        assert {r.setup.plan.sequence_parallel for r in plans(tensor=degree)} == {False, True}


def test_the_table_has_every_schedule_at_each_shape() -> None:
    shapes: dict[str, set[tuple[int, int, int]]] = {}
    for r in TABLE:
        plan = r.setup.plan
        shape = (plan.pipeline, stages_per_rank(plan), batching(plan, r.setup.workload).microbatches)
        shapes.setdefault(plan.schedule, set()).add(shape)
    assert shapes.keys() == set(orders.names())
    for name, found in shapes.items():
        assert {p for p, _, _ in found} >= {2, 3, 4}, name
        assert any(m % p == 0 for p, _, m in found if p > 1), name
        assert any(m > p and m % p for p, _, m in found if p > 1), name
        assert any(m < p for p, _, m in found) or name == "dualpipe_v", name  # which needs 2P
    assert {v for _, v, _ in shapes["interleaved"]} >= {2, 3}


def test_the_table_has_uneven_and_empty_stages() -> None:
    counts = [[len(s.layers) for s in stages(settled(r.setup).plan, r.setup.model)] for r in TABLE]
    assert any(min(c) > 0 and len(set(c)) > 1 for c in counts)
    assert any(c[0] == 0 for c in counts)
    assert any(c[-1] == 0 for c in counts)


BROKEN = row("all collectives", "data=2,tensor=2,pipeline=2", GPT)
BROKEN_SP = row("all collectives sp", "data=2,tensor=2,pipeline=2,sequence_parallel=true", GPT)


@pytest.mark.parametrize(
    ("found", "purpose"),
    [
        (BROKEN, "embedding_forward"),
        (BROKEN, "layer_forward"),
        (BROKEN, "layer_backward"),
        (BROKEN, "head_backward"),
        (BROKEN, "loss_max"),
        (BROKEN, "loss_sums"),
        (BROKEN, "tied_embedding"),
        (BROKEN, "token_count"),
        (BROKEN_SP, "partial_gradients"),
        (BROKEN_SP, "tied_embedding"),
    ],
)
def test_a_left_out_sum_is_caught(monkeypatch: pytest.MonkeyPatch, found: Row, purpose: str) -> None:
    real = Group.all_reduce
    skipped = []

    def broken(self: Group, x: torch.Tensor, why: str, *args: object) -> torch.Tensor:
        if why == purpose:
            skipped.append(why)
            return x
        return real(self, x, why, *args)

    monkeypatch.setattr(Group, "all_reduce", broken)
    certificate = certified(found)
    assert not certificate.passed
    assert certificate.worst > 1e-4, "a missing sum is no rounding error"


def test_gradients_that_are_not_reduced_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "all_reduce_async", lambda self, x, purpose: None)
    assert not certified(BROKEN).passed


def test_a_wrong_factor_is_caught_in_the_first_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Group.all_reduce_async

    def averaged(self: Group, x: torch.Tensor, purpose: str) -> object:
        x /= self.size
        return real(self, x, purpose)

    monkeypatch.setattr(Group, "all_reduce_async", averaged)
    certificate = certified(row("a mean instead of a sum", "data=2"))
    assert certificate.grad_norm_error == pytest.approx(0.5)


def test_ranks_that_disagree_on_the_norm_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Group.all_reduce
    monkeypatch.setattr(
        Group, "all_reduce", lambda self, x, why, *args: x if why == "step_summary" else real(self, x, why, *args)
    )
    with pytest.raises(AssertionError, match="different losses or norms"):
        certified(row("no summary", "data=2"))


def test_an_error_of_a_billionth_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = step.clip_factor
    monkeypatch.setattr(step, "clip_factor", lambda *args: real(*args) * (1 + 1e-9))
    certificate = certified(row("slightly wrong", "data=2"))
    assert not certificate.passed
    assert 1e-10 < certificate.worst < 1e-8


def test_b10_labels_of_another_microbatch_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StageWork.begin

    def begin(self: StageWork, microbatches: list[Microbatch], *rest: Any, **named: Any) -> None:
        if any(stage.stage.head for stage in self.stages.values()):
            microbatches = [replace(m, labels=microbatches[-1].labels) for m in microbatches]
        real(self, microbatches, *rest, **named)

    monkeypatch.setattr(StageWork, "begin", begin)
    assert not certified(row("labels of the last microbatch", "pipeline=2,schedule=gpipe")).passed


def test_a34_other_initial_weights_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = initialise.initial_shard

    def per_rank(weight: Weight, shard: Shard, seed: int) -> torch.Tensor:
        return real(weight, shard, seed + shard.offsets[0])

    monkeypatch.setattr(initialise, "initial_shard", per_rank)
    assert not certified(row("seeds by rank", "tensor=2")).passed


def test_plan_defaults_are_what_an_empty_row_means() -> None:
    assert row("plain", "").setup.plan == Plan(microbatch=1, microbatches=3)
