"""Train the same model with Shardsmith, raw PyTorch and, if asked, other frameworks, at the same layouts; compare.

    python benchmarks/bench.py                                the whole table: five interleaved repeats
    python benchmarks/bench.py --peers deepspeed,megatron     with other frameworks, in environments of their own
    python benchmarks/bench.py --layouts "data 2,tensor 2" --repeats 1

Every run is started afresh, one rank a process, one thread a rank, over gloo. Repeats go round all runs before
the next begins, so that a change in the load of the machine meets all alike; figures are medians, and ratios are
medians of the ratios to raw DDP at data 2 within one repeat.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from contest import HERE, LAYOUTS, OURS, REFERENCE, SYSTEMS, Layout, can, command
from envs import PEERS, build
from launch import Measured, RunFailed, run
from report import Figures, machine, summary, text_table, write_section
from setups import ours

from shardsmith.layout.check import check

Pair = tuple[str, Layout]


def main() -> int:
    chosen = _options()
    systems = ["torch", OURS, *chosen.peers]
    pythons = {name: build(name) if name in PEERS else Path(sys.executable) for name in systems}
    pairs, skipped = _pairs(systems, chosen.layouts)
    with tempfile.TemporaryDirectory(prefix="shardsmith-inputs-") as name:
        inputs = Path(name)
        subprocess.run([sys.executable, str(HERE / "make_inputs.py"), name, str(chosen.steps)], check=True)
        measured: dict[Pair, list[Measured]] = {pair: [] for pair in pairs}
        failed: dict[Pair, str] = {}
        for repeat in range(chosen.repeats):
            for system, layout in pairs:
                pair = (system, layout)
                if pair in failed:
                    continue
                words = command(
                    system, layout, pythons[system], inputs=inputs, steps=chosen.steps, warmup=chosen.warmup
                )
                extra = PEERS[system].run if system in PEERS else {}
                try:
                    measured[pair].append(run(words, world=layout.world, timeout_s=chosen.timeout, extra=extra))
                except RunFailed as error:
                    failed[pair] = str(error)
                    print(f"FAILED {system}, {layout.name}: {error}", file=sys.stderr)
                    continue
                last = measured[pair][-1]
                print(
                    f"repeat {repeat + 1}: {system:10} {layout.name:20} {last.cpu_s_per_step:6.2f} CPU-s a step, "
                    f"{last.anonymous_mib:5.0f} MiB",
                    file=sys.stderr,
                )
    return _finish(chosen, measured, skipped, failed)


def _finish(
    chosen: argparse.Namespace, measured: dict[Pair, list[Measured]], skipped: list[str], failed: dict[Pair, str]
) -> int:
    complete = {pair: runs for pair, runs in measured.items() if pair not in failed and runs}
    reference = next((p for p in complete if (p[0], p[1].name) == REFERENCE), None)
    if reference is None:
        print(f"{' at '.join(REFERENCE)} did not run: nothing to compare with", file=sys.stderr)
        return 1
    rows = [summary(system, layout, runs, complete[reference]) for (system, layout), runs in complete.items()]
    notes = [*skipped, *(f"{system}, {layout.name}: failed" for system, layout in failed)]
    figures = Figures(
        machine=machine(), repeats=chosen.repeats, steps=chosen.steps, warmup=chosen.warmup, rows=rows, notes=notes
    )
    print(text_table(figures))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(asdict(figures), indent=1) + "\n")
    if chosen.write is not None:
        write_section(chosen.write, figures)
    return 1 if failed else 0


def _pairs(systems: list[str], layouts: tuple[Layout, ...]) -> tuple[list[Pair], list[str]]:
    """What runs, layout by layout with all its systems side by side, and what is skipped and why."""
    pairs, skipped = [], []
    for layout in layouts:
        for system in systems:
            if not can(system, layout):
                continue
            faults = [f for f in check(ours(layout.plan), running=True) if f.severity == "error"]
            if system == OURS and faults:
                skipped.append(f"{OURS}, {layout.name}: refused ({faults[0].code}: {faults[0].message})")
                print(f"skipped {skipped[-1]}", file=sys.stderr)
                continue
            pairs.append((system, layout))
    return pairs, skipped


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=(), type=_peers, help=f"other frameworks: {', '.join(PEERS)}")
    parser.add_argument("--layouts", default=LAYOUTS, type=_layouts, help="names as in the table, with commas between")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="steps of a run, those of the warm-up included")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one run may take")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--write", type=Path, help="write the tables into this page, between its markers")
    chosen = parser.parse_args()
    if chosen.warmup >= chosen.steps:
        parser.error("--warmup leaves no step to measure")
    return chosen


def _peers(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in SYSTEMS or name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(PEERS)}")
    return names


def _layouts(text: str) -> tuple[Layout, ...]:
    """Layouts by name, and always the one that all is compared with."""
    by_name = {layout.name: layout for layout in LAYOUTS}
    wanted = [name.strip() for name in text.split(",")]
    unknown = [name for name in wanted if name not in by_name]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(by_name)}")
    return tuple(by_name[name] for name in dict.fromkeys([REFERENCE[1], *wanted]))


if __name__ == "__main__":
    sys.exit(main())
