"""Every plan for a model with experts against one process; plans of equal world run in the same processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from moe_plans import DEEPSEEK, MIXTRAL, MOE_TABLE, QWEN
from plans import Row, row
from together import Together, certified
from torch import Tensor

from shardsmith.engine.models import experts
from shardsmith.engine.runtime import dispatch
from shardsmith.engine.runtime.group import Group

pytestmark = pytest.mark.ranks

CERTIFICATES = Together(MOE_TABLE)


@pytest.mark.parametrize("found", MOE_TABLE, ids=lambda found: found.name)
def test_a16_a18_a_plan_with_experts_equals_one_process(found: Row) -> None:
    certificate = CERTIFICATES.holds(found)
    assert any(p.name.endswith("router.weight") for p in certificate.parameters)
    assert certificate.as_json()["expert_kernel"] in ("loop", "grouped_mm")


def test_the_table_has_expert_with_everything() -> None:
    assert [name for name, times in Counter(r.name for r in MOE_TABLE).items() if times > 1] == []
    strict = [r.setup for r in MOE_TABLE if r.setup.workload.dtype == "float64"]
    plans = [s.plan for s in strict if s.plan.expert > 1]
    axes = ("data", "tensor", "pipeline", "context")
    for axis in axes:
        assert any(getattr(p, axis) > 1 for p in plans), axis
    for first, second in combinations(axes, 2):
        assert any(getattr(p, first) > 1 and getattr(p, second) > 1 for p in plans), (first, second)
    assert any((p.data, p.context, p.tensor, p.expert) == (2, 2, 2, 4) for p in plans)
    assert {p.zero for p in plans} == {0, 1, 2, 3}
    assert {p.recompute for p in plans} == {"none", "selective", "full"}
    assert {s.model.experts.balance for s in strict if s.model.experts is not None} == {"aux_loss", "bias"}
    single = [r.setup for r in MOE_TABLE if r.setup.workload.dtype == "float32"]
    assert any((s.plan.pipeline, s.plan.tensor, s.plan.expert) == (2, 2, 2) for s in single)


def _no_counts(self: Group, x: Tensor, why: str, *args: object) -> Tensor:
    return x if why == "sequence_counts" else REAL_ALL_REDUCE(self, x, why, *args)


def _no_partial(self: Group, x: Tensor, why: str, *args: object) -> Tensor:
    return x if why == "partial_gradients" else REAL_ALL_REDUCE(self, x, why, *args)


def _no_loads(self: Group, x: Tensor, why: str, *args: object) -> Tensor:
    return x if why == "expert_loads" else REAL_ALL_REDUCE(self, x, why, *args)


def _averaged(rows: Tensor, weights: Tensor, route: dispatch.Route) -> Tensor:
    return REAL_COMBINE(rows, weights, route) / 2


def _in_local_order(chosen: Tensor, count: int, room: int) -> Tensor:
    return REAL_IN_ROOM(chosen.flip(0), count, room).flip(0)


REAL_ALL_REDUCE, REAL_COMBINE, REAL_IN_ROOM = Group.all_reduce, dispatch.combine, experts.in_room


@pytest.mark.parametrize(
    ("owner", "name", "broken", "line", "model"),
    [
        (Group, "all_reduce", _no_counts, "tensor=2,expert=2", MIXTRAL),
        (Group, "all_reduce", _no_partial, "tensor=2,expert=2", MIXTRAL),
        (Group, "all_reduce", _no_loads, "data=2,expert=2", DEEPSEEK),
    ],
)
def test_a_left_out_sum_is_caught(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Callable[..., Any], line: str, model: Any
) -> None:
    monkeypatch.setattr(owner, name, broken)
    (certificate,) = certified([row("broken", line, model)])
    assert not certificate.passed
    assert certificate.worst > 1e-5


def test_a16_gradients_that_grow_with_expert_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Group.exchange_async

    def doubled(self: Group, x: Tensor, sent: Any, received: Any, purpose: str, *, payload: int) -> Any:
        work, out = real(self, x, sent, received, purpose, payload=payload)
        if purpose == "combine_backward":
            assert work is not None, "several ranks"
            work.wait()
            out *= self.size
            return None, out
        return work, out

    monkeypatch.setattr(Group, "exchange_async", doubled)
    (certificate,) = certified([row("expert gradients times 2", "data=2,expert=2", MIXTRAL)])
    assert not certificate.passed


def test_flips_are_counted_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = experts.Router.forward

    def noisy(self: experts.Router, x: Tensor, replayed: Tensor | None = None) -> Any:
        scored, own = real(self, x, replayed)
        if replayed is None:
            return scored, own
        worst = scored.shares.argmin(-1, keepdim=True)
        return scored, torch.cat((worst, own[:, 1:]), 1)

    monkeypatch.setattr(experts.Router, "forward", noisy)
    (certificate,) = certified([row("other choices", "data=2,expert=2", QWEN, dtype="float32")])
    assert certificate.passed, certificate.summary()
    assert certificate.routing_flips > 100
    assert certificate.as_json()["routing_flips"] == certificate.routing_flips
