"""Bubbles that are measured: paced actions on real ranks idle as much as the closed form of their schedule says."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardsmith.engine.dataset.batches import Batches, Synthetic, batches_of
from shardsmith.engine.train.gather import measured_timeline
from shardsmith.engine.train.step import Trainer
from shardsmith.plan.file import make_setup
from shardsmith.plan.setup import Setup
from shardsmith.schedule import orders
from shardsmith.schedule.closed_form import ClosedForm
from shardsmith.schedule.ir import Kind
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import ModelSpec

pytestmark = [pytest.mark.ranks, pytest.mark.alone]

LENGTHS_S = (0.03, 0.08, 0.2)
"""Seconds of an F, a paced step each until one comes near enough; I and W take the same, a B both together.

Even the first is many times what an action computes, so ranks that share cores hardly meet. What hands a
message on takes about a millisecond, and more where other work shares the cores: the longer actions are
for such a machine.
"""

POINTS = 0.02
BUSY = 3.0
"""Processes that wait for each core, above which no time can be measured: a miss then says nothing of the schedule."""

TINY = ModelSpec(name="paced", layers=8, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=32, vocab=64, context=16)


def paced_setup(schedule: str, pipeline: int, microbatches: int) -> Setup:
    plan = f"pipeline={pipeline},schedule={schedule},microbatches={microbatches}"
    setup = make_setup(plan=plan, seq_len=16, global_batch=microbatches)
    return Setup(model=TINY, workload=setup.workload, cluster=setup.cluster, plan=setup.plan)


def closed_form(setup: Setup) -> ClosedForm | None:
    """What the schedule costs by formula, with F = I = W; None where no formula holds or the schedule is refused."""
    order = orders.load(setup.plan.schedule)
    assert setup.plan.microbatches is not None, "stated by the test"
    sizes = {
        "pipeline": setup.plan.pipeline,
        "microbatches": setup.plan.microbatches,
        "stages_per_rank": order.DEFAULT_STAGES_PER_RANK,
    }
    return None if order.faults(**sizes, source="") else order.closed_form(**sizes, F=1, I=1, W=1)


def expected(setup: Setup) -> float:
    """The idle share of a step by the closed form of its schedule."""
    form = closed_form(setup)
    assert form is not None, "only plans with a formula are measured"
    return form.bubble_of_step


def measured_share(setups: list[Setup]) -> list[float]:
    """For each setup, the idle share of its best paced step; on rank 0, nothing elsewhere."""
    return [_best_of(setup) for setup in setups]


def _best_of(setup: Setup) -> float:
    rank = dist.get_rank()
    trainer = Trainer(setup, Optimisation(), rank=rank, seed=0, device=torch.device("cpu"))
    source = Synthetic(seed=0, vocab=TINY.vocab, seq_len=setup.workload.seq_len)
    batches = batches_of(source, seed=0, setup=setup)
    trainer.step(batches.batch(0, 0))  # proves the shapes of messages, unpaced
    shares: list[float] = []
    for step, length in enumerate(LENGTHS_S, start=1):
        trainer.work.pace = {Kind.F: length, Kind.B: 2 * length, Kind.I: length, Kind.W: length}
        shares.append(_paced_step(trainer, batches, step))
        near = torch.tensor(float(rank == 0 and abs(shares[-1] - expected(setup)) < POINTS))
        dist.broadcast(near, src=0)
        if near:
            break
    return min(shares, key=lambda share: abs(share - expected(setup)))


def _paced_step(trainer: Trainer, batches: Batches, step: int) -> float:
    microbatches = batches.batch(step, 0)
    trainer.recorder.clear()
    trainer.recorder.tracing = True
    dist.barrier()
    trainer.step(microbatches)
    trainer.recorder.tracing = False
    timeline = measured_timeline(trainer, ("paced",))
    return 0.0 if timeline is None else timeline.idle_share()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("schedule", orders.names())
def test_measured_idle_share_is_the_closed_form(
    schedule: str, pipeline: int, run_ranks: Callable[..., list[Any]]
) -> None:
    sizes = (4, 8, 16) if schedule in ("gpipe", "one_f_one_b", "interleaved") else (8,)
    setups = [paced_setup(schedule, pipeline, m) for m in sizes]
    found = run_ranks(pipeline, measured_share, setups, timeout=240)[0]
    missed = [
        f"{setup.plan}: {share:.3f}, closed form {expected(setup):.3f}"
        for setup, share in zip(setups, found, strict=True)
        if abs(share - expected(setup)) >= POINTS
    ]
    print("; ".join(f"{s.plan}: {share:.3f} of {expected(s):.3f}" for s, share in zip(setups, found, strict=True)))
    if missed and os.getloadavg()[0] > BUSY * len(os.sched_getaffinity(0)):
        pytest.skip(f"the machine has other work (load {os.getloadavg()[0]:.0f}): {'; '.join(missed)}")
    assert not missed
