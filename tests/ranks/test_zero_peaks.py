"""Peaks of memory at each ZeRO level, counted from every allocation of one rank on a process group that moves nothing.

Works keep their buffers until they are dropped, as those of gloo and NCCL do, so that what the engine forgets
to let go shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardsmith.engine.dataset.batches import Synthetic, batches_of
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.train.stage_work import StageWork
from shardsmith.engine.train.step import Trainer
from shardsmith.layout.axes.data import IN_FLIGHT, states
from shardsmith.layout.shards import rank_states
from shardsmith.plan.file import make_setup
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Optimisation
from shardsmith.specs.library import cluster_named
from shardsmith.specs.model import ModelSpec, layer_weights, parameter_count, weights

pytestmark = pytest.mark.ranks

SEQ_LEN = 2
LOCAL = cluster_named("local")
MODEL = ModelSpec(
    name="layered", layers=8, hidden=64, heads=2, kv_heads=2, head_dim=32, ffn=128, vocab=8, context=8, init_std=0.1
)
"""Equal layers that hold nearly everything, on sequences so short that activations hardly count."""

UNIT = 4 * sum(w.numel for w in layer_weights(MODEL, 0))
LARGEST = 4 * max(w.numel for w in weights(MODEL))
BUCKET_MB = UNIT / 2**20


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of tensors: the largest sum while the trainer was built, in forward passes and in a step; the sum after."""

    build: int
    forward: int
    step: int
    after: int


class _Holding:
    """A finished work that keeps what it worked on."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def wait(self) -> None:
        return None


def setup_of(line: str, layers: int = 8, microbatches: int = 2) -> Setup:
    plan = make_setup(plan=f"{line},bucket_mb={BUCKET_MB}").plan
    base = make_setup(plan=str(plan), seq_len=SEQ_LEN, global_batch=plan.data * microbatches)
    return replace(base, model=MODEL.with_(layers=layers), cluster=LOCAL)


@cache
def memory(setup: Setup, rank: int = 0) -> Memory:
    """What `rank` of `setup` holds in its third step, when nothing is done for the first time."""
    return run_forked(_memory, 1, setup, rank, join=False, timeout_s=100)[0]


def _memory(setup: Setup, rank: int) -> Memory:
    dist.init_process_group("fake", rank=rank, world_size=setup.plan.world, store=FakeStore())
    _let_works_hold_buffers()
    _mark_forward()
    batches = batches_of(Synthetic(seed=0, vocab=MODEL.vocab, seq_len=SEQ_LEN), seed=0, setup=setup)
    drawn = [batches.batch(step, 0) for step in range(3)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        with record_function("build"):
            trainer = Trainer(setup, Optimisation(), rank=rank, seed=0, device=torch.device("cpu"))
            trainer.wire.checking = False  # nobody is there to send headers
        for step, microbatches in enumerate(drawn):
            with record_function(f"step {step}"):
                trainer.step(microbatches)
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    spans = [(e.name(), e.start_ns(), e.end_ns()) for e in events if e.name() in ("build", "step 2", "forward")]
    steps = [span for span in spans if span[0] == "step 2"]
    forward = [span for span in spans if span[0] == "forward" and steps[0][1] <= span[1] <= steps[0][2]]
    build = [span for span in spans if span[0] == "build"]
    return Memory(
        build=_peak(changes, build),
        forward=_peak(changes, forward),
        step=_peak(changes, steps),
        after=sum(size for _, size in changes),
    )


def _peak(changes: list[tuple[int, int]], spans: list[tuple[str, int, int]]) -> int:
    total = peak = 0
    for at, size in changes:
        total += size
        if any(start <= at <= end for _, start, end in spans):
            peak = max(peak, total)
    return peak


def _let_works_hold_buffers() -> None:
    def gather(group: Group, x: Tensor, purpose: str) -> tuple[Any, Tensor]:
        if group.handle is None:
            return None, x
        out = x.new_zeros(x.numel() * group.size)
        return _Holding(x, out), out

    def scatter(group: Group, x: Tensor, purpose: str) -> tuple[Any, Tensor]:
        if group.handle is None:
            return None, x
        out = x.new_zeros(x.numel() // group.size)
        return _Holding(x, out), out

    def reduce(group: Group, x: Tensor, purpose: str) -> Any:
        return None if group.handle is None else _Holding(x)

    Group.all_gather_async, Group.reduce_scatter_async = gather, scatter  # type: ignore[method-assign]
    Group.all_reduce_async = reduce  # type: ignore[method-assign]


def _mark_forward() -> None:
    plain: Callable[..., Any] = StageWork._forward

    def marked(work: StageWork, *args: Any) -> Any:
        with record_function("forward"):
            return plain(work, *args)

    StageWork._forward = marked  # type: ignore[method-assign]


SCALARS = 4 * (9 * 8 + 3) + 1024
"""Step counts of AdamW, rotary frequencies, the losses of a step."""


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_ends_with_its_states_and_nothing_else(zero: int) -> None:
    setup = setup_of(f"data=2,zero={zero}")
    left = memory(setup).after - rank_states(setup, 0).total
    assert 0 <= left <= SCALARS


def test_c02_at_level_3_at_most_two_units_are_whole() -> None:
    """Beside them lives what this rank sends of the unit that is on its way."""
    for ranks in (2, 4):
        # One microbatch: no reduction of an earlier one is under way.
        setups = [setup_of(f"data={ranks},zero={zero}", microbatches=1) for zero in (0, 3)]
        whole, sharded = (memory(s).forward - rank_states(s, 0).total for s in setups)
        gathered = sharded - whole
        assert UNIT < gathered <= 2 * UNIT + UNIT / ranks, f"{gathered / UNIT:.2f} units"


def test_c02_states_and_single_unit_peak() -> None:
    """10^6 parameters with Adam on 2 ranks: 16.0 MB replicated, 8.0 MB sharded."""
    plain, sharded = (states(make_setup(plan=f"data=2,zero={zero}"), 10**6) for zero in (0, 3))
    assert (plain.total, sharded.total) == (16 * 10**6, 8 * 10**6)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_c02_peak_over_states_does_not_grow_with_layers(zero: int) -> None:
    """What is whole only for a while is a few units, however deep the model; activations are those of level 0."""
    beside = {}
    for layers in (8, 16):
        replicated, sharded = (setup_of(f"data=2,zero={z}", layers) for z in (0, zero))
        activations = memory(replicated).step - rank_states(replicated, 0).total
        beside[layers] = memory(sharded).step - rank_states(sharded, 0).total - activations
    assert beside[16] - beside[8] <= UNIT / 4
    # Two units of weights and what is sent of one; reductions under way, the one that fills, one layer's gradients.
    assert beside[16] <= (2 + 1 / 2) * UNIT + IN_FLIGHT * (1 + 1 / 2) * UNIT + 2 * UNIT, f"{beside[16] / UNIT:.2f}"


def test_c08_no_rank_ever_builds_the_whole_model() -> None:
    model = 4 * parameter_count(MODEL)
    setup = setup_of("data=2,zero=3")
    built = [memory(setup, rank).build - rank_states(setup, rank).gradients for rank in range(2)]
    assert sum(built) <= model + 2 * 2 * LARGEST, "at most one copy of the model over both ranks"
    assert sum(built) >= model
    staged = setup_of("data=2,pipeline=2,schedule=interleaved,zero=3")
    assert memory(staged).build - rank_states(staged, 0).gradients <= model / 4 + 3 * LARGEST


@pytest.mark.parametrize("zero", [0, 2])
def test_b16_memory_does_not_grow_with_microbatches(zero: int) -> None:
    found = [memory(setup_of(f"data=2,pipeline=2,zero={zero}", microbatches=m)) for m in (2, 4, 8)]
    few, some, many = (m.step for m in found)
    message = SEQ_LEN * MODEL.hidden * 4
    assert many - some <= 4 * message
    assert some - few <= 4 * message, "1F1B holds two microbatches on the first of two stages"
    held = setup_of("data=2,pipeline=2", microbatches=8)
    assert rank_states(held, 0).gradients == 4 * sum(prod(w.shape) for w in weights(MODEL)[: 1 + 4 * 9])
