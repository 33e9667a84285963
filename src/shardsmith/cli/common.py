"""What every verb shares: `--json`, errors as text or JSON, exit codes."""

from __future__ import annotations

import errno
import functools
import io
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Column, Table

from shardsmith.errors import Code, Fault, Refused

OK, REFUSED, USAGE, PREEMPTED = 0, 1, 2, 75
"""Exit codes: done; refused or failed; wrong usage (click's own); preempted and saved."""


FILE = Code(
    code="F801",
    title="a file that cannot be read or written",
    because="the operating system says no: the folder is not there, or its rights forbid it, or the disk is full",
)


class Amount(click.FloatRange):
    """A finite number above 0, or from 0 on with `zero`, and at most `most`: what is no number bounds nothing."""

    def __init__(self, *, most: float = 1e15, zero: bool = False) -> None:
        super().__init__(min=0.0, max=most, min_open=not zero)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """`value` as a float; nan is in no range, but compares as if it were."""
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{found} is not in the range {self._describe_range()}.", param, ctx)
        return float(found)


LEAST_FOLDED = 40
"""Characters of a column that breaks anywhere, such as a plan in one line."""
PATIENCE = Amount(most=30 * 86400.0)
"""Seconds that a person may wait for an answer, up to 30 days."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a verb found: `data` is the one JSON object, `show` what a person reads; a `silent` one is not printed."""

    data: dict[str, Any]
    show: tuple[RenderableType, ...]
    exit_code: int = OK
    silent: bool = False


def verb(function: Callable[..., Answer]) -> Callable[..., None]:
    """Give a click callback `--json` and coded errors; it returns an `Answer` instead of printing."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout; logs go to stderr.")
    @functools.wraps(function)
    def wrapper(*args: Any, as_json: bool, **kwargs: Any) -> None:
        # A terminal or file in another encoding shows `?` for what it has no sign for.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            answer = function(*args, **kwargs)
        except Refused as refused:
            if not refused.told:
                print_refusal(refused.faults, as_json=as_json)
            sys.exit(REFUSED)
        except OSError as error:
            print_refusal((_unwritten(error, "a file"),), as_json=as_json)
            sys.exit(REFUSED)
        try:
            print_answer(answer, as_json=as_json)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            print_refusal((_unwritten(error, "standard output"),), as_json=False)
            sys.exit(REFUSED)
        sys.exit(answer.exit_code)

    return wrapper


def _unwritten(error: OSError, what: str) -> Fault:
    path = str(error.filename) if error.filename is not None else what
    reason = error.strerror or str(error)
    return FILE.fault(f"{path}: {reason}", ("path", path), hint="a path that this user may read and write")


def print_answer(answer: Answer, *, as_json: bool) -> None:
    """What a verb found on stdout, as JSON or for a person. Raises `OSError` where stdout takes nothing more."""
    if as_json and not answer.silent:
        click.echo(json.dumps(answer.data, indent=1))
    elif not answer.silent:
        for item in answer.show:
            console = console_for(sys.stdout, width_of(item) if isinstance(item, Table) else 0)
            console.print(item, soft_wrap=isinstance(item, str))


def check_writable(*paths: Path | None) -> None:
    """Raise the `OSError` now that writing these files would raise after the work."""
    for path in paths:
        if path is None:
            continue
        there = next((folder for folder in path.parents if folder.exists()), Path())
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not there.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
        if not os.access(path if path.exists() else there, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def console_for(stream: Any, least: int = 0) -> Console:
    """A rich console that shows text as it is, at least `least` characters wide, and 160 where it is no terminal."""
    console = Console(file=stream, width=None if stream.isatty() else 160, markup=False, emoji=False, highlight=False)
    console.width = max(console.width, least)
    return console


def room_in(stream: Any) -> int:
    """Characters that a line has room for: those of a terminal; a file or a pipe has no end."""
    return console_for(stream).width if stream.isatty() else sys.maxsize


def width_of(table: Table) -> int:
    """Characters that a table needs so that no cell is cut: a terminal wraps what is wider, instead of hiding it."""

    def least(column: Column) -> int:
        cells = [str(cell) for cell in column.cells]
        words = cells if column.no_wrap or column.overflow == "fold" else " ".join(cells).split()
        widest = max(map(cell_len, words), default=0)
        return max(cell_len(str(column.header)), min(widest, LEAST_FOLDED) if column.overflow == "fold" else widest)

    return 1 + sum(3 + least(column) for column in table.columns)


def print_refusal(faults: tuple[Fault, ...], *, as_json: bool) -> None:
    """All faults: on stdout as `{"errors": [...], "warnings": [...]}` with `--json`, else on stderr as text."""
    if as_json:
        kinds = {"errors": "error", "warnings": "warning"}
        report = {key: [f.as_json() for f in faults if f.severity == kind] for key, kind in kinds.items()}
        click.echo(json.dumps(report, indent=1))
    else:
        click.echo("\n\n".join(str(f) for f in faults), err=True)
