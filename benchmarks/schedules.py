"""CPU-seconds of every pipeline schedule at the same work, as ratios to 1F1B.

    python benchmarks/schedules.py
    python benchmarks/schedules.py --pipeline 4 --steps 6

All schedules stand ready as processes of their own and take turns, a step each, so that a change in the load of the
machine meets all alike. Waiting costs no CPU-seconds, so bubbles do not show: what shows is the work that a schedule
adds, more messages, more stages, split backwards.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import race
from contest import HERE, OURS, Layout, Pair
from launch import Contestant
from workload import GLOBAL_BATCH, MICROBATCH

from shardsmith.schedule import orders


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    chosen = parser.parse_args()
    pairs: dict[str, Pair] = {
        name: (OURS, Layout(name=name, pipeline=chosen.pipeline))
        for name in orders.names()
        if not _refused(name, chosen.pipeline)
    }
    failed: dict[Pair, str] = {}
    with tempfile.TemporaryDirectory(prefix="shardsmith-inputs-") as folder:
        subprocess.run([sys.executable, str(HERE / "make_inputs.py"), folder, str(chosen.steps)], check=True)
        contestants = {
            pair: Contestant(_command(name, chosen, Path(folder)), world=chosen.pipeline, timeout_s=600.0)
            for name, pair in pairs.items()
        }
        measured = race(contestants, failed, steps=chosen.steps, warmup=chosen.warmup)
    base = measured[pairs["one_f_one_b"]].steps
    print(f"| schedule, {chosen.pipeline} ranks | CPU-s a step | of 1F1B | MiB |\n|---|---|---|---|")
    for name, pair in pairs.items():
        if pair in measured:
            steps = measured[pair].steps
            ratio = statistics.median(one.cpu_s / other.cpu_s for one, other in zip(steps, base, strict=True))
            seconds = statistics.median(step.cpu_s for step in steps)
            print(f"| `{name}` | {seconds:.2f} | {ratio:.3f} | {measured[pair].anonymous_mib:.0f} |")
    return 1 if failed else 0


def _refused(name: str, pipeline: int) -> bool:
    schedule = orders.load(name)
    sizes = {"pipeline": pipeline, "microbatches": GLOBAL_BATCH // MICROBATCH}
    return bool(schedule.faults(**sizes, stages_per_rank=schedule.DEFAULT_STAGES_PER_RANK, source="benchmarks"))


def _command(name: str, chosen: argparse.Namespace, inputs: Path) -> list[str]:
    plan = f"--plan=pipeline={chosen.pipeline},schedule={name}"
    steps = [f"--steps={chosen.steps}", f"--warmup={chosen.warmup}"]
    return [sys.executable, str(HERE / "rank_ours.py"), plan, f"--inputs={inputs}", *steps]


if __name__ == "__main__":
    sys.exit(main())
