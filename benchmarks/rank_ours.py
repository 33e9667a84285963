"""One rank of Shardsmith: the engine's own Trainer under the plan given, fed with the common tokens."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
from inputs import batch
from meter import Meter
from setups import OPTIMISATION, ours
from workload import SEED

from shardsmith.engine.dataset.batches import Microbatch
from shardsmith.engine.runtime import environment, process, progress
from shardsmith.engine.train.step import Trainer

TIMEOUT_S = 600.0


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--plan", default="")
    arguments.add_argument("--inputs", type=Path, required=True)
    arguments.add_argument("--steps", type=int, required=True)
    arguments.add_argument("--warmup", type=int, required=True)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    here = process.start(environment.detect(), timeout_s=TIMEOUT_S, device="cpu")
    rank = here.environment.rank
    progress.start_notes(Path(os.environ.get("BENCH_NOTES", tempfile.gettempdir())), rank)
    setup = ours(chosen.plan)
    trainer = Trainer(setup, OPTIMISATION, rank=rank, seed=SEED, device=here.device, timeout_s=TIMEOUT_S)
    meter = Meter(chosen.warmup)
    for step in range(chosen.steps):
        progress.at_step(step)
        result = trainer.step(_microbatches(chosen.inputs, step, trainer.data_index, setup.plan.data))
        meter.step(result.loss)
    meter.done()
    process.stop()


def _microbatches(inputs: Path, step: int, data_rank: int, data: int) -> list[Microbatch]:
    return [
        Microbatch(index=index, samples=(), tokens=tokens, labels=labels, positions=torch.arange(tokens.shape[1])[None])
        for index, (tokens, labels) in enumerate(batch(inputs, step, data_rank, data))
    ]


if __name__ == "__main__":
    main()
