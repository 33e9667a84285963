"""Narrow computation with wide states: dtypes on every rank, master weights, loss scale, dtypes of reductions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardsmith.engine.dataset.batches import Synthetic, batches_of
from shardsmith.engine.train.norm import squared_norm
from shardsmith.engine.train.step import StepResult, Trainer
from shardsmith.plan.file import make_setup
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import ModelSpec

pytestmark = pytest.mark.ranks

MODEL = ModelSpec(
    name="llama", layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=24, vocab=29, context=16, init_std=0.2
)
OPTIMISATION = Optimisation(lr=3e-3)


def setup_of(line: str, dtype: str, model: ModelSpec = MODEL, microbatches: int = 2) -> Setup:
    plan = make_setup(plan=line).plan
    base = make_setup(plan=line, seq_len=8, global_batch=plan.data * microbatches, dtype=dtype)
    return replace(base, model=model)


class Run:
    """A trainer on its rank, fed with the same batch in every step."""

    def __init__(self, setup: Setup, optimisation: Optimisation = OPTIMISATION) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.trainer = Trainer(setup, optimisation, rank=rank, seed=0, device=torch.device("cpu"))
        source = Synthetic(seed=0, vocab=setup.model.vocab, seq_len=8)
        self.batch = batches_of(source, seed=0, setup=setup).batch(0, self.trainer.data_index)

    def step(self) -> StepResult:
        return self.trainer.step(self.batch)

    def owned(self) -> dict[str, torch.Tensor]:
        return {name: held.parameter.detach().clone() for name, held in self.trainer.held().items()}

    def counts(self) -> set[int]:
        """How many updates the optimiser has made, by its own states."""
        return {int(state["step"]) for state in self.trainer.optimizer.state.values()}


def _dtypes(setup: Setup) -> dict[str, set[torch.dtype]]:
    run = Run(setup)
    run.step()
    parts = run.trainer._all_data()
    moments = [t for s in run.trainer.optimizer.state.values() for k, t in s.items() if k != "step"]
    return {
        "weights": {p.dtype for p in run.trainer.parameters().values()}
        | {t.dtype for d in parts for t in d.stored.values()},
        "gradients": {b.flat.dtype for d in parts for b in d.buckets},
        "master": {p.dtype for d in parts for p in d.owned.values()},
        "moments": {t.dtype for t in moments},
        "messages": {run.trainer.wire.dtype},
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_c04_states_are_float32_on_every_rank(dtype: str, run_ranks: Callable[..., list[Any]]) -> None:
    narrow, wide = {getattr(torch, dtype)}, {torch.float32}
    want = {"weights": narrow, "messages": narrow, "gradients": wide, "master": wide, "moments": wide}
    for line in ("data=2,tensor=2,zero=1", "data=2,pipeline=2,zero=3", "data=4,replicate=2,zero=2"):
        for found in run_ranks(4, _dtypes, setup_of(line, dtype)):
            assert found == want, line


def test_the_plan_may_ask_for_narrow_states(run_ranks: Callable[..., list[Any]]) -> None:
    setup = setup_of("data=2,zero=1,grad_dtype=bfloat16,optimizer_dtype=bfloat16", "bfloat16")
    for found in run_ranks(2, _dtypes, setup):
        assert set().union(*found.values()) == {torch.bfloat16}


def _masters(setup: Setup) -> tuple[bool, int, int]:
    run = Run(setup)
    for _ in range(3):
        run.step()
    trainer = run.trainer
    trainer.check_replicas()
    rounded, finer, total = True, 0, 0
    for data in trainer._all_data():
        for name, owned in data.owned.items():
            stored = data.stored[name]
            rounded &= torch.equal(stored, owned.detach().to(stored.dtype))
            finer += int((owned.detach() != stored.float()).sum())
            total += stored.numel()
            if trainer.setup.plan.zero < 3:
                first = data.offsets[name]
                rounded &= torch.equal(data.parameters[name].data[first : first + len(stored)], stored)
    return rounded, finer, total


@pytest.mark.parametrize("line", ["data=2,zero=0", "data=2,zero=1", "data=2,zero=2", "data=2,zero=3,pipeline=2"])
def test_weights_are_their_master_copies_rounded(line: str, run_ranks: Callable[..., list[Any]]) -> None:
    setup = setup_of(line, "bfloat16")
    for rounded, finer, total in run_ranks(setup.plan.world, _masters, setup):
        assert rounded
        assert finer > 0.9 * total, "nearly every master weight has places that bfloat16 has not"


def _losses(setup: Setup, steps: int, optimisation: Optimisation = OPTIMISATION) -> list[float]:
    run = Run(setup, optimisation)
    return [run.step().loss for _ in range(steps)]


def test_ten_steps_in_bfloat16_follow_float32(run_ranks: Callable[..., list[Any]]) -> None:
    (wide,) = run_ranks(1, _losses, setup_of("microbatches=4", "float32", microbatches=4), 10)
    assert wide[-1] < 0.8 * wide[0], "ten steps on one batch learn something"
    for line in ("data=2,pipeline=2,zero=3", "data=2,tensor=2,zero=1", "data=2,zero=2,reduce_dtype=bfloat16"):
        setup = setup_of(line, "bfloat16")
        narrow = run_ranks(setup.plan.world, _losses, setup, 10)[0]
        assert narrow != wide
        assert narrow == pytest.approx(wide, rel=0.02), line


def test_levels_agree_bit_by_bit_in_bfloat16(run_ranks: Callable[..., list[Any]]) -> None:
    """Two ranks and one microbatch: one sum of two numbers, whoever takes it."""
    unclipped = Optimisation(lr=3e-3, clip=0.0)
    runs = [
        run_ranks(2, _losses, setup_of(f"data=2,zero={zero}", "bfloat16", microbatches=1), 5, unclipped)[0]
        for zero in (0, 1, 2, 3)
    ]
    assert runs[0] == runs[1] == runs[2] == runs[3]


@dataclass(frozen=True, kw_only=True)
class Overflow:
    skipped: list[bool]
    scales: list[float]
    counts: list[set[int]]
    unchanged: list[bool]
    losses: list[float]


def _overflow_once(setup: Setup) -> Overflow:
    """Five steps; in the third, the gradients of one layer are infinite, on the last rank alone."""
    run, world = Run(setup), dist.get_world_size()
    found = Overflow(skipped=[], scales=[], counts=[], unchanged=[], losses=[])
    for step in range(5):
        hook = None
        if step == 2 and dist.get_rank() == world - 1:
            block = next(iter(run.trainer.stages.values())).blocks()[0]
            hook = block.register_full_backward_pre_hook(lambda _, grads: (torch.full_like(grads[0], float("inf")),))
        before = run.owned()
        result = run.step()
        if hook is not None:
            hook.remove()
        after = run.owned()
        found.skipped.append(result.skipped)
        found.scales.append(run.trainer.scaler.scale)
        found.counts.append(run.counts())
        found.unchanged.append(all(torch.equal(before[name], after[name]) for name in before))
        found.losses.append(result.loss)
    run.trainer.check_replicas()
    return found


@pytest.mark.parametrize(
    "line", ["data=2", "data=2,zero=3,pipeline=2", "data=2,tensor=2,zero=1", "data=4,replicate=2,zero=2"]
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(line: str, run_ranks: Callable[..., list[Any]]) -> None:
    setup = setup_of(line, "float16")
    ranks = run_ranks(setup.plan.world, _overflow_once, setup)
    for found in ranks:
        assert found.skipped == [False, False, True, False, False]
        assert found.scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**15]
        assert found.counts == [{1}, {2}, {2}, {3}, {4}], "a skipped step is no update"
        assert found.unchanged == [False, False, True, False, False]
        assert found.losses == ranks[0].losses
        assert found.losses[3] == found.losses[2], "same batch, same weights"
        assert found.losses[4] < found.losses[0]


def _from_a_scale(setup: Setup, scale: float) -> tuple[list[bool], float, list[float], list[float]]:
    run = Run(setup)
    run.trainer.scaler.scale = scale
    results = [run.step() for _ in range(12)]
    made = [r for r in results if not r.skipped]
    return [r.skipped for r in results], run.trainer.scaler.scale, [r.loss for r in made], [r.grad_norm for r in made]


def test_a_scale_too_large_comes_down_by_itself(run_ranks: Callable[..., list[Any]]) -> None:
    setup = setup_of("data=2,zero=3", "float16")
    skipped, scale, losses, norms = run_ranks(2, _from_a_scale, setup, 2.0**24)[0]
    count = sum(skipped)
    assert 1 <= count <= 9
    assert skipped == [True] * count + [False] * (12 - count)
    assert scale == 2.0 ** (24 - count)
    plain, kept, usual, usual_norms = run_ranks(2, _from_a_scale, setup, 2.0**12)[0]
    assert (sum(plain), kept) == (0, 2.0**12)
    assert losses == pytest.approx(usual[: len(losses)], rel=2e-3)
    assert norms == pytest.approx(usual_norms[: len(norms)], rel=2e-2), "the norm is that of unscaled gradients"


def _gradients(setup: Setup) -> dict[str, torch.Tensor]:
    run = Run(setup, Optimisation(clip=0.0))
    run.step()
    return {n: g.float().clone() for d in run.trainer._all_data() for n, g in d.shard_gradients.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("line", ["data=2", "data=2,zero=1", "data=2,zero=2", "data=4,replicate=2,zero=3"])
def test_gradients_travel_in_the_dtype_of_the_plan(line: str, dtype: str, run_ranks: Callable[..., list[Any]]) -> None:
    exact, narrow = setup_of(line, "float32"), setup_of(f"{line},reduce_dtype={dtype}", "float32")
    world, places = exact.plan.world, {"bfloat16": 8, "float16": 11}[dtype]
    for wide, rounded in zip(run_ranks(world, _gradients, exact), run_ranks(world, _gradients, narrow), strict=True):
        error = sum(float((wide[n] - rounded[n]).square().sum()) for n in wide) ** 0.5
        size = sum(float(g.square().sum()) for g in wide.values()) ** 0.5
        assert 2.0 ** -(places + 3) < error / size < 2.0 ** -(places - 1), "rounded to that dtype, and only that"


def _norms() -> tuple[float, float]:
    ones, large = torch.ones(1000, dtype=torch.bfloat16), torch.full((100,), 60000.0, dtype=torch.float16)
    return squared_norm([ones, ones]).item(), squared_norm([large]).item()


def test_norms_of_narrow_gradients_are_taken_wide(run_ranks: Callable[..., list[Any]]) -> None:
    ((ones, large),) = run_ranks(1, _norms)
    assert ones == pytest.approx(2000.0, rel=1e-6)
    assert large == pytest.approx(100 * 60000.0**2, rel=1e-3)
