"""How much of a forward pass is spent in collectives of the tensor axis: a real run of tensor 4 x pipeline 2.

    python benchmarks/tensor_share.py --write docs/measured.md

Eight forked ranks train the common model; every forward action and every collective inside it is timed on the clock,
so a rank that waits for others, or for a core, spends that time in the collective.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from report import machine, write_section
from setups import OPTIMISATION, ours
from workload import GLOBAL_BATCH, MICROBATCH, SEED, SHAPE

from shardsmith.engine.dataset.batches import Microbatch
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.engine.train.step import Trainer
from shardsmith.timeline import Span

PLAN = "tensor=4,pipeline=2"
RANKS = 8
TIMEOUT_S = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="steps that count, after one that does not")
    parser.add_argument("--write", type=Path, help="write the figure into this page, between its markers")
    chosen = parser.parse_args()
    found = run_forked(forwards, RANKS, chosen.steps, timeout_s=TIMEOUT_S, wait_s=TIMEOUT_S)
    shares = sorted(inside / whole for inside, whole in found)
    text = (
        "## Tensor-parallel collectives in a forward pass\n\n"
        f"`benchmarks/tensor_share.py`, {machine()}. The model of the benchmarks under `{PLAN}`, {RANKS} ranks, one "
        f"thread each, {chosen.steps} steps of {GLOBAL_BATCH // MICROBATCH} microbatches: "
        f"{statistics.median(shares):.0%} of the time of forward passes is spent in the tensor axis's collectives "
        f"({shares[0]:.0%} to {shares[-1]:.0%}, by rank), waiting for other ranks included. How much that is depends "
        "on the machine: here all ranks share its cores, and gloo sends through the loopback interface."
    )
    print(text)
    if chosen.write is not None:
        write_section(chosen.write, "tensor share", text)
    return 0


def forwards(steps: int) -> tuple[float, float]:
    """Seconds of this rank in tensor collectives of forward actions, and in forward actions as a whole."""
    setup = ours(PLAN)
    device = torch.device("cpu")
    trainer = Trainer(setup, OPTIMISATION, rank=dist.get_rank(), seed=SEED, device=device, timeout_s=TIMEOUT_S)
    batch = [_microbatch(index) for index in range(GLOBAL_BATCH // MICROBATCH)]
    trainer.step(batch)
    trainer.recorder.tracing = True
    for _ in range(steps):
        trainer.step(batch)
    return split(trainer.recorder.spans)


def split(spans: list[Span]) -> tuple[float, float]:
    """Seconds of tensor spans that lie in forward spans, and of forward spans."""
    passes = [span for span in spans if span.lane == "compute" and span.name.startswith("F")]
    calls = [span for span in spans if span.lane == "tensor"]
    inside = [call.seconds for f in passes for call in calls if f.start <= call.start and call.end <= f.end]
    return sum(inside), sum(span.seconds for span in passes)


def _microbatch(index: int) -> Microbatch:
    drawn = torch.randint(SHAPE.vocab, (MICROBATCH, SHAPE.seq_len + 1), generator=torch.Generator().manual_seed(index))
    positions = torch.arange(SHAPE.seq_len)[None]
    return Microbatch(index=index, samples=(), tokens=drawn[:, :-1], labels=drawn[:, 1:], positions=positions)


if __name__ == "__main__":
    sys.exit(main())
