"""What a hint proposes mends its fault and raises no other error, over random plans that break several rules."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache

from shardsmith.layout.check import examine
from shardsmith.layout.cures import HINTS
from shardsmith.plan.file import make_setup, parse_plan_line
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.specs.cluster import ClusterSpec
from shardsmith.specs.library import cluster_named, model_named
from shardsmith.specs.model import ModelSpec

MODELS = ("tiny-llama", "tiny-moe", "qwen3-0.6b", "deepseek-v2-lite")
CLUSTERS = (("local", None), ("h100", 2))


@cache
def noun(name: str) -> ModelSpec:
    return model_named(name)


@cache
def cluster(name: str, nodes: int | None) -> ClusterSpec:
    return cluster_named(name, nodes)


def random_setup(rng: random.Random) -> Setup | None:
    """A plan of degrees that often clash with one another."""
    tensor, expert = rng.choice([1, 2, 2, 3, 4, 6, 8]), rng.choice([1, 1, 1, 2, 4])
    context = rng.choice([1, 1, 2, 4])
    plan = Plan(
        tensor=tensor,
        pipeline=rng.choice([1, 2, 2, 3, 4]),
        data=rng.choice([1, 2, 4]),
        context=context,
        ulysses=rng.choice([1, 2, 3, 4]) if context > 1 else 1,
        expert=expert,
        zero=rng.choice([0, 1, 3]),
        schedule=rng.choice(["one_f_one_b", "dualpipe_v", "dualpipe_v", "interleaved:2", "interleaved:3", "zb_v"]),
        microbatch=rng.choice([None, 1, 2]),
        microbatches=rng.choice([None, None, 2, 4]),
        sequence_parallel=rng.random() < 0.3,
        overlap=rng.choice([(), (), ("chunks",), ("half_microbatches",)]),
        replicate_kv=rng.random() < 0.2,
    )
    size = plan.data * (plan.microbatch or 1) * (plan.microbatches or rng.choice([2, 4, 6, 8]))
    base = make_setup(plan="data=1", model="tiny-llama", seq_len=rng.choice([96, 128, 120]), global_batch=size)
    setup = replace(base, plan=plan, model=noun(rng.choice(MODELS)), cluster=cluster(*rng.choice(CLUSTERS)))
    return setup if any(f.code in HINTS for f in examine(setup, cured=False).errors) else None


def proposals(setup: Setup, hint: str) -> list[Setup]:
    """Every setup that a hint proposes, as a person would read it."""
    found = []
    for part in re.split(r", or ", re.sub(r" \([^)]*\)", "", hint)):
        words = re.fullmatch(r"(\w+) = (?:one of )?(.*?)((?: (?:with|without|and) .*)?)", part)
        assert words, f"unreadable: {part!r} in {hint!r}"
        beside = re.findall(r"(with|without) (\w+)(?: = (\S+))?", words[3])
        for value in re.split(r", | or ", words[2]):
            changes = {words[1]: value} | {key: to if how == "with" else None for how, key, to in beside}
            found.append(changed(setup, changes))
    return found


def changed(setup: Setup, changes: dict[str, str | None]) -> Setup:
    plan, work = setup.plan, setup.workload
    for key, value in changes.items():
        if key == "global_batch":
            work = replace(work, global_batch=int(str(value)))
        else:
            plan = plan.with_(**{key: getattr(Plan() if value is None else parse_plan_line(f"{key}={value}"), key)})
    return replace(setup, plan=plan, workload=work)


def codes(setup: Setup) -> set[str]:
    return {fault.code for fault in examine(setup, cured=False).errors}


def test_what_a_hint_proposes_mends_its_fault_and_raises_no_error() -> None:
    rng, seen = random.Random(11), Counter[str]()
    while sum(seen.values()) < 300:
        setup = random_setup(rng)
        if setup is None:
            continue
        before = codes(setup)
        for fault in examine(setup).errors:
            if fault.code in HINTS:
                seen[fault.code] += 1
                worse = [s.plan for s in proposals(setup, fault.hint) if codes(s) - (before - {fault.code})]
                assert not worse, (str(setup.plan), setup.model.name, setup.cluster.name, fault.hint, worse)
    assert set(seen) == set(HINTS)


def test_a_rules_own_hint_is_tried_and_widened() -> None:
    """tensor = 4 leaves 2 of 8 heads to a rank, which 8 ranks cannot exchange."""
    setup = make_setup(plan="tensor=6,context=8,ulysses=8", model="tiny-llama", seq_len=96)
    hints = {fault.hint for fault in examine(setup).errors}
    assert hints == {"tensor = 4 with ulysses = 1 (tiny-llama allows 1, 2, 4)"}
    few = make_setup(plan="pipeline=2,schedule=dualpipe_v,microbatch=2", global_batch=4)
    (fault,) = examine(few).errors
    assert fault.hint == "microbatch = 1, or schedule = zb_v, or global_batch = 8"
