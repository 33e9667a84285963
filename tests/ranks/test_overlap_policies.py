"""Overlap policies in a paced run: every product and every sum over tensor ranks lasts as long as it would elsewhere.

Products and sums are padded by sleeping, in proportion to their rows and bytes, so that two ranks on one core
behave like two devices on a slow link. What a policy hides is the time by which the step gets shorter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardsmith.engine.dataset.batches import Synthetic, batches_of
from shardsmith.engine.runtime import linear as products
from shardsmith.engine.runtime import overlapped
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.train.step import Trainer
from shardsmith.layout.collectives import collectives
from shardsmith.plan.file import make_setup
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import ModelSpec

pytestmark = [pytest.mark.ranks, pytest.mark.alone]

MODEL = ModelSpec(name="paced", layers=2, hidden=16, heads=4, kv_heads=4, head_dim=4, ffn=32, vocab=8, context=16)
SEQ_LEN, BATCH = 16, 2
SUM_S = 0.04
"""A sum over the tensor ranks of all rows of a microbatch."""
PRODUCT_S = 0.04
"""The product of all rows of a microbatch with one matrix."""
ATTEMPTS = 3
"""Steps of which the best counts: other work on the machine can only make one longer."""


def setup_of(overlap: str, sequence_parallel: bool) -> Setup:
    line = f"tensor=2,microbatch={BATCH},microbatches=1,sequence_parallel={str(sequence_parallel).lower()}"
    line += f",overlap={overlap}" if overlap else ""
    found = make_setup(plan=line, seq_len=SEQ_LEN, global_batch=BATCH)
    return Setup(model=MODEL, workload=found.workload, cluster=found.cluster, plan=found.plan)


class Slow:
    """A work that is over `seconds` after it was started, at the earliest."""

    def __init__(self, work: Any, seconds: float) -> None:
        self.work, self.until = work, time.monotonic() + seconds

    def wait(self) -> None:
        """Wait for both."""
        if self.work is not None:
            self.work.wait()
        time.sleep(max(0.0, self.until - time.monotonic()))


def slow_down(group: type[Group]) -> None:
    """Pad the collectives of layers, and all products."""
    whole = SEQ_LEN * BATCH * MODEL.hidden * 4

    def pad(blocking: str, larger: Callable[[Tensor, Any], int]) -> None:
        at_once, started = getattr(group, blocking), getattr(group, f"{blocking}_async")

        def slow(self: Group, x: Tensor, purpose: str, *rest: Any) -> Any:
            slow_work = Slow(None, seconds(self, x, purpose))
            out = at_once(self, x, purpose, *rest)
            slow_work.wait()
            return out

        def slow_start(self: Group, x: Tensor, purpose: str) -> Any:
            out = started(self, x, purpose)
            length = seconds(self, x, purpose)
            return (Slow(out[0], length), out[1]) if isinstance(out, tuple) else Slow(out, length)

        def seconds(self: Group, x: Tensor, purpose: str) -> float:
            return SUM_S * larger(x, self) / whole if purpose.startswith("layer_") else 0.0

        setattr(group, blocking, slow)
        setattr(group, f"{blocking}_async", slow_start)

    pad("all_reduce", lambda x, group: x.nbytes)
    pad("reduce_scatter", lambda x, group: x.nbytes)
    pad("all_gather", lambda x, group: x.nbytes * group.size)
    multiply, add = F.linear, products.add_product

    def slow_linear(x: Tensor, *rest: Any) -> Tensor:
        time.sleep(PRODUCT_S * x.shape[:-1].numel() / (SEQ_LEN * BATCH))
        return multiply(x, *rest)

    def slow_add(parameter: Tensor, grad: Tensor, entered: Tensor) -> None:
        time.sleep(PRODUCT_S * grad.shape[0] / (SEQ_LEN * BATCH))
        add(parameter, grad, entered)

    for module in (products, overlapped):  # whoever multiplies: whole, or by chunks that arrive
        module.F = SimpleNamespace(linear=slow_linear)  # type: ignore[assignment]
    products.add_product = slow_add


def shortest_steps(setups: list[Setup]) -> list[float]:
    """Seconds of the shortest paced step of each plan."""
    slow_down(Group)
    found = []
    for setup in setups:
        trainer = Trainer(
            setup, Optimisation(optimizer="sgd"), rank=dist.get_rank(), seed=0, device=torch.device("cpu")
        )
        batch = batches_of(Synthetic(seed=0, vocab=MODEL.vocab, seq_len=SEQ_LEN), seed=0, setup=setup).batch(0, 0)
        times = []
        for _ in range(ATTEMPTS):
            dist.barrier()
            start = time.monotonic()
            trainer.step(batch)
            times.append(time.monotonic() - start)
        found.append(min(times))
    return found


def targeted(policy: str, setup: Setup) -> float:
    """Seconds of the sums in the layers that `policy` is there to hide: backward ones, or all."""
    phases = ("layer_backward",) if policy == "weight_gradient" else ("layer_forward", "layer_backward")
    whole = SEQ_LEN * BATCH * MODEL.hidden * 4
    sizes = [c.bytes for c in collectives(setup, 0) if c.axis == "tensor" and c.purpose in phases and c.kind in SUMS]
    return SUM_S * sum(sizes) / whole


SUMS = ("all_reduce", "reduce_scatter")
RUNS = 2
"""A run in which other work kept the cores from every attempt is repeated."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_each_policy_hides_half_of_its_target(sequence_parallel: bool, run_ranks: Callable[..., list[Any]]) -> None:
    policies = ("weight_gradient", "chunks", "half_microbatches")
    setups = [setup_of(policy, sequence_parallel) for policy in ("", *policies)]
    targets = [targeted(policy, setups[0]) for policy in policies]
    for _ in range(RUNS):
        ranks = run_ranks(2, shortest_steps, setups, timeout=140)
        plain, *shorter = (max(times) for times in zip(*ranks, strict=True))
        hidden = [plain - seconds for seconds in shorter]
        for policy, seconds, target in zip(policies, hidden, targets, strict=True):
            print(f"{policy}: {seconds:.3f} s of {target:.3f} s hidden, step {plain:.3f}")
        missed = [p for p, seconds, target in zip(policies, hidden, targets, strict=True) if seconds < 0.5 * target]
        if not missed:
            return
    pytest.fail(f"hidden {hidden} of {targets} s: {', '.join(missed)}")
