"""CPU-seconds of a mixture of experts: experts placed on two ranks against two data ranks that hold them all.

    python benchmarks/experts.py --steps 8 --json experts.json

Both plans train the same model on the same tokens in the same two processes, a step of one and a step of the other in
turn, so a change in the load of the machine meets both alike. The model is the common one (`workload.py`) with 8 gated
experts, of which a token visits 2, in the place of each MLP; together they are as wide as the MLP was per token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from setups import MODEL, OPTIMISATION, ours
from workload import SEED, SHAPE

from shardsmith.engine.dataset.batches import Synthetic, batches_of
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.engine.train.step import Trainer
from shardsmith.specs.model import Experts

PLANS = {"data 2": "data=2", "data 2, expert 2": "data=2,expert=2"}
MIXTURE = MODEL.with_(name="bench-moe", experts=Experts(count=8, top_k=2, ffn=SHAPE.ffn // 2))
WARMUP = 2


def main() -> None:
    """Measure, print the medians, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each plan")
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    by_rank = run_forked(measured, 2, chosen.steps + WARMUP, timeout_s=chosen.timeout_s, wait_s=300.0)
    steps = {name: [sum(of) for of in zip(*(rank[name] for rank in by_rank), strict=True)][WARMUP:] for name in PLANS}
    everywhere, placed = steps.values()
    found = {
        "cpu_seconds_a_step": {name: statistics.median(of) for name, of in steps.items()},
        "expert_over_data": statistics.median(b / a for a, b in zip(everywhere, placed, strict=True)),
        "steps": chosen.steps,
    }
    print(json.dumps(found, indent=2))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found))


def measured(steps: int) -> dict[str, list[float]]:
    """CPU-seconds of this rank, all its threads, in each step of each plan."""
    runs = {}
    for name, line in PLANS.items():
        setup = replace(ours(line), model=MIXTURE)
        trainer = Trainer(setup, OPTIMISATION, rank=dist.get_rank(), seed=SEED, device=torch.device("cpu"))
        source = Synthetic(seed=SEED, vocab=SHAPE.vocab, seq_len=SHAPE.seq_len)
        runs[name] = trainer, batches_of(source, seed=SEED, setup=trainer.setup)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(steps):
        for name, (trainer, batches) in runs.items():
            microbatches = batches.batch(step, trainer.data_index)
            dist.barrier()
            start = time.process_time()
            trainer.step(microbatches)
            taken[name].append(time.process_time() - start)
    return taken


if __name__ == "__main__":
    main()
