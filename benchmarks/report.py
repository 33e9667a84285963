"""From measured runs to figures, and from figures to tables: on the terminal and in a page of the documentation."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from contest import LAYOUTS, REFERENCE, SYSTEMS, Layout
from launch import Step
from workload import GLOBAL_BATCH, MICROBATCH, SHAPE, TOKENS_PER_STEP


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one contestant did in one repeat: `steps` after the warm-up, `losses` of all steps."""

    steps: tuple[Step, ...]
    losses: tuple[float, ...]
    anonymous_mib: float


class Compared(NamedTuple):
    """A contestant, and the reference that took turns with it."""

    measured: Measured
    reference: Measured


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system at one layout: medians over all rounds; ratios are to the reference in the same round.

    `loss_error` is the largest difference from the reference's loss in any step.
    """

    system: str
    layout: str
    ranks: int
    cpu_s_per_step: float
    cpu_ratio: float
    tokens_per_s: float
    anonymous_mib: float
    memory_ratio: float
    loss_error: float
    cpu_ratios: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All rows of one benchmark, on which machine and how they were measured, and what is missing and why."""

    machine: str
    repeats: int
    steps: int
    warmup: int
    rows: list[Row]
    notes: list[str]


def summary(system: str, layout: Layout, found: Sequence[Compared]) -> Row:
    """The row of all repeats of one system at one layout."""
    rounds = [both for one in found for both in zip(one.measured.steps, one.reference.steps, strict=True)]
    losses = [both for one in found for both in zip(one.measured.losses, one.reference.losses, strict=True)]
    return Row(
        system=system,
        layout=layout.name,
        ranks=layout.world,
        cpu_s_per_step=statistics.median(step.cpu_s for step, _ in rounds),
        cpu_ratio=statistics.median(step.cpu_s / other.cpu_s for step, other in rounds),
        tokens_per_s=TOKENS_PER_STEP / statistics.median(step.seconds for step, _ in rounds),
        anonymous_mib=statistics.median(one.measured.anonymous_mib for one in found),
        memory_ratio=statistics.median(one.measured.anonymous_mib / one.reference.anonymous_mib for one in found),
        loss_error=max(abs(loss - other) for loss, other in losses),
        cpu_ratios=tuple(step.cpu_s / other.cpu_s for step, other in rounds),
    )


def joined(older: Figures, newer: Figures) -> Figures:
    """All rows of both, the newer one where both have a system at a layout; in the order of the layouts."""
    rows = {(row.layout, row.system): row for row in (*older.rows, *newer.rows)}
    places = [(layout.name, system) for layout in LAYOUTS for system in SYSTEMS]
    notes = list(dict.fromkeys([*older.notes, *newer.notes]))
    return replace(newer, rows=[rows[place] for place in places if place in rows], notes=notes)


def read(path: Path) -> Figures:
    """Figures from the file that `--json` wrote."""
    found = json.loads(path.read_text())
    rows = [Row(**{**row, "cpu_ratios": tuple(row["cpu_ratios"])}) for row in found["rows"]]
    return Figures(**{**found, "rows": rows})


def machine() -> str:
    """Day, machine with its load over 15 minutes, and versions, in words."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    torch = importlib.metadata.version("torch")
    cores = len(os.sched_getaffinity(0))
    day, load = datetime.date.today().isoformat(), os.getloadavg()[2]
    return f"{day}, {cores} cores ({cpu}, load {load:.0f}), torch {torch}, Python {platform.python_version()}"


def text_table(figures: Figures) -> str:
    """Every row with all its figures, for a terminal."""
    titles = f"{'CPU-s/step':>11}{'x DDP':>7}{'tokens/s':>10}{'MiB':>7}{'x DDP':>7}{'loss error':>12}"
    head = f"{'layout':22}{'system':12}{titles}"
    lines = [head, "-" * len(head)]
    lines += [
        f"{row.layout:22}{row.system:12}{row.cpu_s_per_step:11.2f}{row.cpu_ratio:7.2f}{row.tokens_per_s:10.0f}"
        f"{row.anonymous_mib:7.0f}{row.memory_ratio:7.2f}{row.loss_error:12.1e}"
        for row in figures.rows
    ]
    return "\n".join([*lines, *figures.notes])


def write_section(page: Path, name: str, text: str) -> None:
    """Put `text` between the markers of section `name` in `page`: a new section at its end where there are none."""
    begin, end = (f"<!-- {name}: {edge} -->" for edge in ("begin", "end"))
    whole = page.read_text() if page.exists() else "# Measured\n"
    if begin not in whole:
        whole = f"{whole.rstrip()}\n\n{begin}\n{end}\n"
    before, _, rest = whole.partition(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


def markdown(figures: Figures) -> str:
    """The section of a page: how it was measured, and a table each for CPU-seconds, memory and tokens a second."""
    by_layout = {row.layout: row.ranks for row in figures.rows}
    found = {(row.system, row.layout): row for row in figures.rows}
    systems = [name for name in SYSTEMS if any(row.system == name for row in figures.rows)]

    def table(shown: Callable[[Row], str]) -> str:
        lines = [f"| layout | ranks | rounds | {' | '.join(systems)} |", "|---|---|---|" + "---|" * len(systems)]
        for layout, ranks in by_layout.items():
            cells = [shown(found[s, layout]) if (s, layout) in found else "" for s in systems]
            rounds = min(len(row.cpu_ratios) for row in figures.rows if row.layout == layout)
            lines.append(f"| {layout} | {ranks} | {rounds} | {' | '.join(cells)} |")
        return "\n".join(lines)

    worst = max(row.loss_error for row in figures.rows)
    parts = [
        "## Training the same model with others",
        f"`benchmarks/bench.py`, {figures.machine}. A Llama of {SHAPE.layers} layers, hidden {SHAPE.hidden}, "
        f"{SHAPE.heads} heads and {SHAPE.kv_heads} key/value heads, FFN {SHAPE.ffn}, vocabulary {SHAPE.vocab}; "
        f"sequences of {SHAPE.seq_len}, {GLOBAL_BATCH} a step in microbatches of {MICROBATCH}; float32, AdamW, gloo, "
        f"one thread a rank. The systems take turns step by step; medians over all rounds after a warm-up, and "
        f"in brackets the ratio to {REFERENCE[0]}'s DDP at {REFERENCE[1].name} in the same round. "
        f"All train from the same weights on the same tokens: their losses differ by at most {worst:.0e}.",
        "CPU-seconds a step, summed over all ranks:",
        table(lambda row: f"{row.cpu_s_per_step:.2f} ({row.cpu_ratio:.2f})"),
        "Peak of anonymous memory, MiB summed over all ranks:",
        table(lambda row: f"{row.anonymous_mib:.0f} ({row.memory_ratio:.2f})"),
        "Tokens a second, which depends on what else the machine does and on how many ranks share its cores:",
        table(lambda row: f"{row.tokens_per_s:.0f}"),
        *(f"Not measured: {note}." for note in figures.notes),
    ]
    return "\n\n".join(parts)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
