"""Train the same model with Shardsmith, raw PyTorch and, if asked, other frameworks, at the same layouts; compare.

    python benchmarks/bench.py                                the whole table: five interleaved repeats
    python benchmarks/bench.py --peers deepspeed,megatron     with other frameworks, in environments of their own
    python benchmarks/bench.py --layouts "tensor 2" --repeats 1 --json figures.json --add      one layout more

At each layout all contestants and the reference (raw DDP at data 2) stand ready as processes of their own, one rank
a process, one thread a rank, over gloo, and take turns: one step of one, while all others wait and use nothing, then
one step of the next. So a change in the load of the machine meets all alike, and ratios are formed within a round of
turns. A repeat starts all processes afresh; figures are medians over the rounds of all repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from contest import HERE, LAYOUTS, OURS, REFERENCE, SYSTEMS, Layout, Pair, can, command
from envs import PEERS, build
from launch import Contestant, RunFailed, Step
from report import Compared, Figures, Measured, joined, machine, markdown, read, summary, text_table, write_section
from setups import ours

from shardsmith.layout.check import check


def main() -> int:
    chosen = _options()
    systems = ["torch", OURS, *chosen.peers]
    pythons = {name: build(name) if name in PEERS else Path(sys.executable) for name in systems}
    groups, skipped = _groups(systems, chosen.layouts)
    results: dict[Pair, list[Compared]] = {}
    failed: dict[Pair, str] = {}
    with tempfile.TemporaryDirectory(prefix="shardsmith-inputs-") as name:
        inputs = Path(name)
        subprocess.run([sys.executable, str(HERE / "make_inputs.py"), name, str(chosen.steps)], check=True)
        for repeat in range(chosen.repeats):
            for layout, group in groups.items():
                contestants = {
                    pair: Contestant(
                        command(*pair, pythons[pair[0]], inputs=inputs, steps=chosen.steps, warmup=chosen.warmup),
                        world=pair[1].world,
                        timeout_s=chosen.timeout,
                        extra=PEERS[pair[0]].run if pair[0] in PEERS else {},
                    )
                    for pair in dict.fromkeys([REFERENCE, *group])
                    if pair not in failed
                }
                measured = race(contestants, failed, steps=chosen.steps, warmup=chosen.warmup)
                for pair in group:
                    if pair in measured:
                        results.setdefault(pair, []).append(Compared(measured[pair], measured[REFERENCE]))
                        _tell(f"repeat {repeat + 1}, {layout.name}", pair, results[pair][-1])
    return _finish(chosen, results, skipped, failed)


def race(
    contestants: dict[Pair, Contestant], failed: dict[Pair, str], *, steps: int, warmup: int
) -> dict[Pair, Measured]:
    """Let all take turns, a step each, in an order that rotates; who fails is noted in `failed` and leaves.

    Raises `RunFailed` if it is the reference that fails.
    """
    with contextlib.ExitStack() as standing:
        racing = {pair: standing.enter_context(contestant) for pair, contestant in contestants.items()}
        taken: dict[Pair, list[Step]] = {pair: [] for pair in racing}
        memory: dict[Pair, float] = {}

        def turn(pair: Pair, action: Callable[[Contestant], None]) -> None:
            try:
                action(racing[pair])
            except RunFailed as error:
                if pair == REFERENCE:
                    raise
                failed[pair] = str(error)
                print(f"FAILED {pair[0]}, {pair[1].name}: {error}", file=sys.stderr)
                del racing[pair]

        for pair in list(racing):
            turn(pair, lambda contestant: contestant.wait_until_ready())
        for round_ in range(steps):
            order = list(racing)
            first = round_ % len(order)
            for pair in (*order[first:], *order[:first]):
                turn(pair, lambda contestant, pair=pair: taken[pair].append(contestant.step()))
        for pair in list(racing):
            turn(pair, lambda contestant, pair=pair: memory.update({pair: contestant.finish()}))
    return {
        pair: Measured(
            steps=tuple(taken[pair][warmup:]),
            losses=tuple(step.loss for step in taken[pair]),
            anonymous_mib=memory[pair],
        )
        for pair in racing
    }


def _tell(where: str, pair: Pair, result: Compared) -> None:
    row = summary(*pair, [result])
    print(
        f"{where}: {row.system:10} {row.cpu_s_per_step:6.2f} CPU-s a step ({row.cpu_ratio:.2f}), "
        f"{row.anonymous_mib:5.0f} MiB",
        file=sys.stderr,
    )


def _finish(
    chosen: argparse.Namespace, results: dict[Pair, list[Compared]], skipped: list[str], failed: dict[Pair, str]
) -> int:
    rows = [summary(*pair, found) for pair, found in results.items()]
    notes = [*skipped, *(f"{system}, {layout.name}: failed" for system, layout in failed)]
    figures = Figures(
        machine=machine(), repeats=chosen.repeats, steps=chosen.steps, warmup=chosen.warmup, rows=rows, notes=notes
    )
    if chosen.add and chosen.json.exists():
        figures = joined(read(chosen.json), figures)
    print(text_table(figures))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(asdict(figures), indent=1) + "\n")
    if chosen.write is not None:
        write_section(chosen.write, "benchmarks", markdown(figures))
    return 1 if failed else 0


def _groups(systems: list[str], layouts: tuple[Layout, ...]) -> tuple[dict[Layout, list[Pair]], list[str]]:
    """Who takes turns at each layout, and what is skipped and why."""
    groups: dict[Layout, list[Pair]] = {}
    skipped = []
    for layout in layouts:
        groups[layout] = [(system, layout) for system in systems if can(system, layout)]
        faults = [f for f in check(ours(layout.plan), running=True) if f.severity == "error"]
        if faults:
            groups[layout].remove((OURS, layout))
            skipped.append(f"{OURS}, {layout.name}: refused ({faults[0].code}: {faults[0].message})")
            print(f"skipped {skipped[-1]}", file=sys.stderr)
    return groups, skipped


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=(), type=_peers, help=f"other frameworks: {', '.join(PEERS)}")
    parser.add_argument("--layouts", default=LAYOUTS, type=_layouts, help="names as in the table, with commas between")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=7, help="steps of a repeat, those of the warm-up included")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one step, or a start, may take")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--add", action="store_true", help="keep what that file holds of other layouts and systems")
    parser.add_argument("--write", type=Path, help="write the tables into this page, between its markers")
    chosen = parser.parse_args()
    if chosen.add and chosen.json is None:
        parser.error("--add needs the file of --json")
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
    """Layouts by name."""
    by_name = {layout.name: layout for layout in LAYOUTS}
    wanted = [name.strip() for name in text.split(",")]
    unknown = [name for name in wanted if name not in by_name]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(by_name)}")
    return tuple(by_name[name] for name in dict.fromkeys(wanted))


if __name__ == "__main__":
    sys.exit(main())
