"""No plan is better than a bound says: models of few layers, odd numbers of devices, limits that few plans keep."""

from dataclasses import replace

import numpy as np
import pytest

from shardsmith.design.cost.layouts import COLUMNS
from shardsmith.design.cost.price import price
from shardsmith.design.cost.subject import make_subject
from shardsmith.design.planner.bounded import DECIDING_DEGREES, INSIDE, Bounded
from shardsmith.design.planner.found import Found
from shardsmith.design.planner.least import first_rank_bytes, frame_bytes
from shardsmith.design.planner.space import DEGREES, Space
from shardsmith.design.planner.tables import Frames, distinct, everything
from shardsmith.specs.job import Workload
from shardsmith.specs.library import cluster_named, model_named

# model, changes, cluster, devices a node, nodes, global batch, sequence, target, fixed fields
CASES = {
    "one long layer, of which full recomputation holds more": (
        *("llama3-8b", {"layers": 1}, "h100", 4, 1, 30, 32768, "megatron-lm-classic", {}),
    ),
    "a rank without a layer": ("mistral-7b", {"layers": 5}, "b200", 3, 4, 3, 6000, "megatron-lm-3", {}),
    "a tied matrix that stands once in a V": (
        *("qwen2.5-7b", {"layers": 7, "tied": True}, "h100", 4, 1, 60, 64, "megatron-core", {"schedule": "zb_v"}),
    ),
    "messages so small that a second call costs more": (
        *("tiny-llama", {"vocab": 151936}, "gb200", 4, 1, 9, 1, "torchtitan", {}),
    ),
    "inputs gathered in 8 bits over slow links": (
        *("llama3-405b", {"layers": 2}, "h100", 1, 4, 30, 6000, "shardsmith:float8", {"recompute": "none"}),
    ),
    "experts behind a dense layer": (
        *("deepseek-v3", {"layers": 6}, "h200", 9, 1, 6, 32768, "megatron-deepspeed", {"microbatches": 1}),
    ),
}


def space_of(name: str) -> Space:
    model, changes, preset, each, nodes, batch, seq_len, target, fixed = CASES[name]
    cluster = cluster_named(preset)
    levels = (replace(cluster.levels[0], size=max(each, 2)), *cluster.levels[1:])
    cluster = replace(cluster, nodes=nodes, devices_per_node=each, levels=levels)
    work = Workload(seq_len=seq_len, global_batch=batch, dtype="bfloat16")
    s = make_subject(model_named(model).with_(**changes), work, cluster, target)
    return Space(subject=s, world=each * nodes, fixed=fixed)


@pytest.mark.parametrize("name", CASES)
def test_no_plan_holds_or_takes_less_than_its_bounds(name: str) -> None:
    space = space_of(name)
    s, search, p = space.subject, Bounded(space=space, limit=np.inf), everything(space)
    alone, each = price(s, p, search.kinds), np.arange(len(p))
    frames = Frames(layouts=p, shape=each, group=each, below=each * 1.0, bounds=each * 0.0)
    for size in (frame_bytes(s, p, search.kinds), first_rank_bytes(s, p, search.kinds)):
        assert (size <= alone.peak * (1 + 1e-12)).all()
    deciding = [getattr(p, column) for column in (*DECIDING_DEGREES, "microbatch", *INSIDE)]
    for seconds in (search._frame_bounds(frames), search._near_bounds(p, deciding)):
        assert (seconds <= alone.step.total * (1 + 1e-12)).all()


@pytest.mark.parametrize("name", CASES)
def test_room_for_some_recomputation_only_drops_no_plan_that_fits(name: str) -> None:
    space = space_of(name)
    p, kinds = everything(space), Bounded(space=space, limit=0.0).kinds
    alone, each = price(space.subject, p, kinds), np.arange(len(p))
    limit = float(np.median(alone.peak))
    search, found = Bounded(space=space, limit=limit), Found(best=np.full(len(p), np.inf), limit=limit)
    frames = Frames(layouts=p, shape=each, group=each, below=each * 1.0, bounds=each * 0.0)
    kept = search._tightened(replace(frames, bounds=search._frame_bounds(frames)), found)
    assert set(each[alone.peak <= limit]) <= set(kept.group)
    assert (np.diff(kept.bounds) >= 0).all()
    fits = alone.peak[kept.group] <= limit
    assert (kept.bounds[fits] <= alone.step.total[kept.group][fits] * (1 + 1e-12)).all()


@pytest.mark.parametrize("name", CASES)
def test_limits_that_few_plans_keep_have_the_answers_of_brute_force(name: str) -> None:
    space = space_of(name)
    p = everything(space)
    alone = price(space.subject, p, Bounded(space=space, limit=0.0).kinds)
    kind = distinct([getattr(p, degree) for degree in DEGREES]).place
    sizes = np.unique(alone.peak)
    assert Bounded(space=space, limit=0.0).leanest().limit == pytest.approx(sizes[0], rel=1e-12)
    for limit in (sizes[0] * 0.999, *(sizes[[0, len(sizes) // 50, len(sizes) // 3, -1]] * (1 + 1e-12))):
        fits, best = alone.peak <= limit, np.full(kind.max() + 1, np.inf)
        np.minimum.at(best, kind[fits], alone.step.total[fits])
        wanted = np.sort(best[np.isfinite(best)])[:4]
        found = Bounded(space=space, limit=limit, count=4).run()
        assert np.sort(found.best)[: len(wanted)] == pytest.approx(wanted, rel=1e-9)
        assert len(found.plans) >= len(wanted)
        assert bool(found.plans) == bool(len(wanted))
        assert found.priced <= found.searched
        assert found.searched + found.dismissed == len(p)


def test_usual_plans_are_plans_of_the_space_and_each_stands_once() -> None:
    model, cluster = model_named("llama3-8b").with_(layers=2), replace(cluster_named("h100"), nodes=1)
    levels = (replace(cluster.levels[0], size=2), *cluster.levels[1:])
    small = replace(cluster, devices_per_node=2, levels=levels)
    subject = make_subject(model, Workload(seq_len=64, global_batch=4, dtype="bfloat16"), small)
    space = Space(subject=subject, world=2, fixed={"schedule": "interleaved"})
    usual, whole = (
        list(zip(*(getattr(p, name).tolist() for name in COLUMNS), strict=True))
        for p in (everything(space.thin()), everything(space))
    )
    assert usual
    assert len(usual) == len(set(usual))
    assert set(usual) <= set(whole)
