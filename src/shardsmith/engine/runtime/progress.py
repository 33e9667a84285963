"""What each rank is doing, legible from outside even after it was killed: its step and the collectives it joined.

One small file a rank, written in place with one system call a note (microseconds) and never flushed to disk: the
page cache outlives the process. From the counts follows who kept the others waiting (`absent`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_STEP_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The last collective a rank joined in one group: the `number`-th there, an `operation` among `ranks`."""

    group: str
    ranks: tuple[int, ...]
    number: int
    operation: str


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far one rank came: `step` (None: none begun) and its last collective in each group."""

    step: int | None = None
    joined: tuple[Joined, ...] = ()

    def count(self, group: str, ranks: Sequence[int]) -> int:
        """Number of collectives joined in that group."""
        return next((j.number for j in self.joined if (j.group, j.ranks) == (group, tuple(ranks))), 0)


@dataclass
class _Notes:
    """The open file of this process; every group has its own place in it."""

    descriptor: int
    end: int = _STEP_BYTES
    places: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = field(default_factory=dict)
    counts: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    texts: dict[tuple[str, tuple[int, ...], str], bytes] = field(default_factory=dict)
    step: int | None = None


_notes: _Notes | None = None


def start_notes(folder: Path, rank: int) -> None:
    """From now on this process keeps its notes in `folder`; before that, notes are dropped."""
    global _notes
    stop_notes()
    path = _path(folder, rank)
    _notes = _Notes(descriptor=os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644))


def stop_notes() -> None:
    """Close the notes of this process; what was written stays."""
    global _notes
    if _notes is not None:
        os.close(_notes.descriptor)
        _notes = None


def at_step(step: int) -> None:
    """This rank begins `step`; a failure from here on names it."""
    if _notes is not None:
        _notes.step = step
        os.pwrite(_notes.descriptor, f"{step}\n".encode().rjust(_STEP_BYTES), 0)


def current_step() -> int | None:
    """The step this process said it is in."""
    return None if _notes is None else _notes.step


def joining(operation: str, *, group: str, ranks: Sequence[int]) -> None:
    """This rank is about to join one collective of `group` over the global `ranks`; call it before each of them.

    For one direction of point-to-point traffic, let both ends call it with the same group, such as "0 to 1".
    """
    if _notes is None:
        return
    key = (group, tuple(ranks))
    number = _notes.counts[key] = _notes.counts.get(key, 0) + 1
    text = _notes.texts.get((*key, operation))
    if text is None:
        record = {"group": group, "ranks": key[1], "operation": operation[:64], "number": 0}
        text = json.dumps(record, separators=(",", ":")).encode().removesuffix(b"0}")
        _notes.texts[(*key, operation)] = text
    line = b"%b%d}" % (text, number)
    if key not in _notes.places:
        # room for longer operation names (escaped at worst) and more digits than a run can count
        room = len(line) + 6 * 64 + 16
        _notes.places[key] = (_notes.end, room)
        _notes.end += room + 1
    offset, room = _notes.places[key]
    os.pwrite(_notes.descriptor, line.ljust(room) + b"\n", offset)


def read_progress(folder: Path, ranks: Sequence[int]) -> dict[int, Progress]:
    """How far each of `ranks` came by the notes in `folder`; a rank without notes has an empty Progress."""
    return {rank: _read(_path(folder, rank)) for rank in ranks}


def absent(progress: Mapping[int, Progress], waiting: int) -> dict[int, Joined]:
    """The ranks that kept `waiting` from going on, each with the collective it did not join.

    A rank behind in a group may itself wait for a third one, so the chain is followed to those that are
    behind and wait for nobody. Empty where all ranks joined everything that `waiting` joined.
    """
    roots: dict[int, Joined] = {}
    seen = {waiting}
    front = [waiting]
    while front:
        for rank, missed in _behind(progress, front.pop()).items():
            if rank in seen:
                continue
            seen.add(rank)
            if _behind(progress, rank):
                front.append(rank)
            else:
                roots[rank] = missed
    return roots


def _behind(progress: Mapping[int, Progress], rank: int) -> dict[int, Joined]:
    """Ranks that joined fewer collectives than `rank` in a group they share."""
    return {
        other: joined
        for joined in progress[rank].joined
        for other in joined.ranks
        if other in progress and progress[other].count(joined.group, joined.ranks) < joined.number
    }


def _read(path: Path) -> Progress:
    if not path.exists():
        return Progress()
    data = path.read_bytes()
    step = data[:_STEP_BYTES].strip(b" \0\n")
    joined = [Joined(**json.loads(line)) for line in data[_STEP_BYTES:].split(b"\n") if line.strip(b" \0")]
    return Progress(
        step=int(step) if step else None,
        joined=tuple(
            Joined(group=j.group, ranks=tuple(j.ranks), number=j.number, operation=j.operation) for j in joined
        ),
    )


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.progress"
