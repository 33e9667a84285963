"""Formulas against the simulation: step times of random legal plans by both.

    .venv/bin/python benchmarks/formulas.py --write docs/simulate.md

Both take their lengths from the same cost model; what differs is how they are put together.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from report import write_section

from shardsmith import make_setup, simulate
from shardsmith.design.cost.estimate import estimate
from shardsmith.errors import Refused
from shardsmith.layout.check import examine
from shardsmith.plan.batch import divisors
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.schedule import orders

MODELS = {
    "llama3-8b": ("h100", 2, 8192),
    "llama3-70b": ("h100", 16, 8192),
    "gpt3-175b": ("a100", 64, 2048),
    "llama3-405b": ("h100", 128, 8192),
    "mixtral-8x7b": ("a100", 8, 4096),
}
"""Cluster, nodes and sequence length of each model."""
PLAIN = ("gpipe", "one_f_one_b", "looped_bfs")
EACH = 60
"""Plans of a model."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="write the figures into this page, between its markers")
    chosen = parser.parse_args()
    rng = random.Random(chosen.seed)
    found: dict[str, list[float]] = {"plain": [], "other": [], "gathers": []}
    for name in MODELS:
        for setup in plans(name, rng):
            plan = setup.plan
            kind = "gathers" if plan.zero == 3 and plan.zero_gather == "per_pass" else "other"
            kind = "plain" if kind == "other" and plan.schedule in PLAIN else kind
            found[kind].append(simulate(setup, record=False).seconds / estimate(setup).step_time_s - 1.0)
    rows = (
        ("plain", ", ".join(f"`{name}`" for name in PLAIN)),
        ("other", ", ".join(f"`{name}`" for name in orders.names() if name not in PLAIN)),
        ("gathers", "ZeRO 3 that gathers in every pass, all schedules"),
    )
    lines = ["| plans | number | median difference | largest | within 5 % |", "|---|---|---|---|---|"]
    for kind, title in rows:
        off = [abs(difference) for difference in found[kind]]
        near = sum(each <= 0.05 for each in off)
        lines.append(f"| {title} | {len(off)} | {statistics.median(off):.1%} | {max(off):.1%} | {near} |")
    print("\n".join(lines))
    if chosen.write is not None:
        write_section(chosen.write, "formulas", "\n".join(lines))
    return 0


def plans(model: str, rng: random.Random) -> Iterator[Setup]:
    """Random legal plans of a model with a pipeline; memory is not looked at."""
    cluster, nodes, seq_len = MODELS[model]
    world, made = nodes * 8, 0
    while made < EACH:
        tensor = rng.choice([1, 2, 4, 8])
        pipeline = rng.choice([each for each in divisors(world // tensor) if 2 <= each <= 16])
        schedule = rng.choice(orders.names())
        zero = rng.choice([0, 1, 2, 3, 3])
        plan = Plan(
            tensor=tensor,
            pipeline=pipeline,
            data=world // tensor // pipeline,
            microbatch=rng.choice([1, 2]),
            microbatches=pipeline * rng.choice([1, 2, 4, 8]),
            schedule=schedule,
            stages_per_rank=rng.choice([2, 3, 4]) if schedule in ("interleaved", "looped_bfs") else None,
            zero=zero,
            zero_gather=rng.choice(["per_pass", "per_step"]) if zero >= 2 else "per_pass",
            recompute=rng.choice(["none", "selective", "full"]),
            sequence_parallel=tensor > 1 and rng.random() < 0.7,
            layers=rng.choice([None, "weighed"]),
        )
        batch = plan.data * (plan.microbatch or 1) * (plan.microbatches or 1)
        try:
            setup = make_setup(
                plan=str(plan),
                model=model,
                cluster=cluster,
                nodes=nodes,
                seq_len=seq_len,
                global_batch=batch,
                dtype="bfloat16",
            )
        except Refused:
            continue
        if not any(fault.severity == "error" and fault.code != "H404" for fault in examine(setup).faults):
            made += 1
            yield setup


if __name__ == "__main__":
    sys.exit(main())
