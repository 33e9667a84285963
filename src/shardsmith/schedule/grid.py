"""Text grids: a row per pipeline rank, a column per slot. Drawn from an order, or read from a file.

The format, for reading and for writing:

    # a comment
    rank 0: F0 F1 .  .  B0 =  B1 =
    rank 1: .  F0 B0 =  F1 B1 =  .

A row per rank; the label `rank N:` may be left out. Cells are separated by blanks, and each is one slot:
`F0` is the forward of microbatch 0 (kinds F, B, I, W), `.` is idle, `=` continues the action before it.
Where ranks hold one stage each, the stage is the row; otherwise every cell says `F2.0`, stage.microbatch.
Microbatches are numbered from 0 or from 1. In a file, slots are real: an action must not start before
its inputs have ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, lcm
from pathlib import Path
from typing import NamedTuple

from shardsmith.errors import Fault, raise_errors
from shardsmith.schedule.check import check, listing
from shardsmith.schedule.ir import Action, Kind, Order, needs
from shardsmith.schedule.play import Played
from shardsmith.schedule.rules import GRID_CELL, GRID_FILE, IMPOSSIBLE

IDLE, GOES_ON = ".", "="
CELL = re.compile(r"([FBIW])(\d{1,6})(?:\.(\d{1,6}))?")
LABEL = re.compile(r"rank\s+(\d+)\s*:")

WIDEST = 12
"""Columns that one action may take before columns follow events instead of the clock."""


class Drawing(NamedTuple):
    """A grid as cells: `rows[rank][column]`; `column` is the time of one column, None where not to scale."""

    rows: tuple[tuple[str, ...], ...]
    column: Fraction | None

    def text(self) -> str:
        """The grid in the file format, columns aligned."""
        width = max((len(cell) for row in self.rows for cell in row), default=1)
        digits = len(str(len(self.rows) - 1))
        lines = (" ".join(cell.ljust(width) for cell in row).rstrip() for row in self.rows)
        return "\n".join(f"rank {rank:>{digits}}: {line}" for rank, line in enumerate(lines))


def whole(lengths: dict[Kind, Fraction]) -> tuple[dict[Kind, int], Fraction]:
    """`lengths` as whole multiples of their greatest common measure, and that measure."""
    common = lcm(*(length.denominator for length in lengths.values()))
    counts = {kind: int(length * common) for kind, length in lengths.items()}
    measure = gcd(*counts.values())
    return {kind: count // measure for kind, count in counts.items()}, Fraction(measure, common)


def draw(order: Order, played: Played, unit: Fraction = Fraction(1), first: int = 0) -> Drawing:
    """The grid of an order played in whole multiples of `unit`; microbatches are numbered from `first`.

    Columns are slots of `unit`. Where an action would take more than 12 of them, there is a column
    per moment at which anything starts or ends instead: order and overlaps hold, widths do not.
    """
    times = {int(t) for ends in (played.start, played.end) for t in ends.values()}
    to_scale = max(played.end[a] - played.start[a] for a in played.end) <= WIDEST
    cuts = list(range(max(times) + 1)) if to_scale else sorted(times | {0})
    column_at = {t: i for i, t in enumerate(cuts)}
    rows = []
    for actions in order.ranks:
        row = [IDLE] * (len(cuts) - 1)
        for action, begin, end in _cells(order, actions, played, column_at):
            row[begin:end] = [spell(action, order, first), *[GOES_ON] * (end - begin - 1)]
        rows.append(tuple(row))
    return Drawing(tuple(rows), unit if to_scale else None)


def _cells(
    order: Order, actions: tuple[Action, ...], played: Played, column_at: dict[int, int]
) -> Iterator[tuple[Action, int, int]]:
    """Each action with its first column and the one behind its last; the two of a pair share their columns."""
    seconds = {b for a, b in pairwise(actions) if a in order.pairs}
    for action, following in zip(actions, (*actions[1:], None), strict=True):
        begin, end = column_at[int(played.start[action])], column_at[int(played.end[action])]
        half = begin + max(1, (end - begin) // 3)
        if action in order.pairs and following is not None:
            yield action, begin, half
            yield following, half, end
        elif action not in seconds:
            yield action, begin, end


def spell(action: Action, order: Order, first: int = 0) -> str:
    """A cell: the stage is left out where every rank holds exactly the stage of its own number."""
    m = action.microbatch + first
    short = order.placement == tuple(range(order.pipeline))
    return f"{action.kind.value}{m}" if short else f"{action.kind.value}{action.stage}.{m}"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A grid read from `source`: its order, when each cell stands, and the number of its first microbatch."""

    source: str
    order: Order
    drawn: Played
    first: int

    def faults(self) -> list[Fault]:
        """What is wrong with the grid, the first impossible action (S013) by the clock of its own slots."""
        breaches = check(self.order, source=self.source, name=self._name)
        impossible = self._impossible()
        if impossible is None:
            return breaches
        return [impossible, *(f for f in breaches if f.code != IMPOSSIBLE.code)]

    def _name(self, action: Action) -> str:
        return spell(action, self.order, self.first)

    def _impossible(self) -> Fault | None:
        start, end = self.drawn.start, self.drawn.end
        rank_of = {action: rank for rank, actions in enumerate(self.order.ranks) for action in actions}
        for action in sorted(start, key=lambda a: (start[a], rank_of[a])):
            for one_of in needs(action, self.order.stages):
                there = [a for a in one_of if a in end]
                if any(end[a] <= start[action] for a in there):
                    continue
                here = f"rank {rank_of[action]}, slot {int(start[action])}: {self._name(action)}"
                if there:
                    on, until = rank_of[there[0]], int(end[there[0]])
                    awaited = f"{self._name(there[0])} on rank {on}"
                    stands = f"rank {on}, slot {int(start[there[0]])}: {self._name(there[0])}"
                    hint = f"{self._name(action)} can start in slot {until} at the earliest, when {awaited} has ended"
                else:
                    awaited = " or ".join(f"{self._name(a)} on rank {self.order.placement[a.stage]}" for a in one_of)
                    stands, hint = f"{awaited}: nowhere", f"draw {awaited} before it"
                return IMPOSSIBLE.fault(
                    f"{self._name(action)} on rank {rank_of[action]} in slot {int(start[action])} is impossible: "
                    f"it waits for {awaited}",
                    (self.source, here),
                    (self.source, stands),
                    hint=hint,
                )
        return None


def read(path: str | Path) -> Grid:
    """The grid in file `path`; raises `Refused` with F301 (unreadable file) or F302 (unreadable cells)."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
        raise GRID_FILE.refuse(f"cannot read {str(path)!r}: {reason}", ("schedule", f"file:{path}")) from None
    return parse(text, source=str(path))


class Cell(NamedTuple):
    """One action as written: `stage` is None where the row says it."""

    kind: Kind
    stage: int | None
    microbatch: int
    rank: int
    start: int
    length: int


def parse(text: str, *, source: str) -> Grid:
    """The grid that `text` draws; `source` names it in messages. Raises `Refused` (F302) with every bad cell."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    faults: list[Fault] = []
    cells: list[Cell] = []
    rows = [(number, line) for number, line in enumerate(lines, 1) if line]
    for rank, (number, line) in enumerate(rows):
        cells.extend(_row(line, rank, f"{source}, line {number}", faults))
    raise_errors(faults)
    raise_errors(_numbering(cells, source))
    first = min(cell.microbatch for cell in cells)
    actions: list[list[Action]] = [[] for _ in rows]
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    placement: dict[int, int] = {}
    for cell in cells:
        stage = cell.rank if cell.stage is None else cell.stage
        action = Action(cell.kind, stage, cell.microbatch - first)
        actions[cell.rank].append(action)
        placement.setdefault(stage, cell.rank)
        start.setdefault(action, cell.start)
        end.setdefault(action, cell.start + cell.length)
    order = Order(
        name=f"file:{source}",
        microbatches=len({cell.microbatch for cell in cells}),
        placement=tuple(rank for _, rank in sorted(placement.items())),
        ranks=tuple(map(tuple, actions)),
    )
    return Grid(
        source=source,
        order=order,
        drawn=Played(start=start, end=end, busy=sum(cell.length for cell in cells)),
        first=first,
    )


def _row(line: str, rank: int, where: str, faults: list[Fault]) -> list[Cell]:
    label = LABEL.match(line)
    if label and int(label[1]) != rank:
        hint = "rows stand in the order of ranks, from 0"
        faults.append(GRID_CELL.fault(f"row {rank} is labelled rank {label[1]}", (where, label[0]), hint=hint))
    cells: list[Cell] = []
    gone_on = False  # whether `=` may stand here
    for slot, word in enumerate(line[label.end() if label else 0 :].split()):
        match = CELL.fullmatch(word)
        if word == GOES_ON and gone_on:
            cells[-1] = cells[-1]._replace(length=cells[-1].length + 1)
        elif match:
            stage, microbatch = (match[2], match[3]) if match[3] else (None, match[2])
            cells.append(Cell(Kind(match[1]), int(stage) if stage else None, int(microbatch), rank, slot, 1))
        elif word != IDLE:
            reason = "nothing goes on here" if word == GOES_ON else "not a cell"
            faults.append(GRID_CELL.fault(f"{word!r} in slot {slot} of rank {rank}: {reason}", (where, word)))
        gone_on = match is not None or (word == GOES_ON and gone_on)
    return cells


def _numbering(cells: list[Cell], source: str) -> list[Fault]:
    """Stages named in all cells or in none; stages and microbatches numbered without gaps."""
    if not cells:
        return [GRID_CELL.fault("no action in the grid", (source, "empty"), hint="rank 0: F0 B0")]
    named = [cell.stage is not None for cell in cells]
    if any(named) and not all(named):
        short = cells[named.index(False)]
        message = f"{short.kind.value}{short.microbatch} on rank {short.rank} does not say its stage, other cells do"
        return [GRID_CELL.fault(message, (source, "cells"), hint="write every cell as F<stage>.<microbatch>, or none")]
    faults = []
    stages = sorted({cell.rank if cell.stage is None else cell.stage for cell in cells})
    microbatches = sorted({cell.microbatch for cell in cells})
    for what, numbers, firsts in (("stage", stages, (0,)), ("microbatch", microbatches, (0, 1))):
        gaps = [a + 1 for a, b in pairwise(numbers) if b != a + 1]
        if numbers[0] not in firsts:
            message = f"the first {what} is {numbers[0]}, it must be {' or '.join(map(str, firsts))}"
            faults.append(GRID_CELL.fault(message, (source, f"{what} {numbers[0]}")))
        if gaps:
            message = f"no cell for {what} {listing(map(str, gaps))}, but for {what} {numbers[-1]}"
            faults.append(GRID_CELL.fault(message, (source, f"{what}s")))
    return faults
