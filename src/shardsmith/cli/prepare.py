"""`shardsmith prepare INPUTS --out PREFIX`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shardsmith import api
from shardsmith.cli.common import Amount, Answer, verb
from shardsmith.units import counted, format_bytes, format_count

if TYPE_CHECKING:
    from shardsmith.engine.dataset.prepare import Prepared, Watch

SHOWN = 10
"""Skipped files named one by one; the JSON answer holds them all."""


@click.command("prepare")
@click.argument("inputs", nargs=-1, required=True)
@click.option("--out", "-o", required=True, metavar="PREFIX", help="Writes PREFIX.bin, PREFIX.idx and PREFIX.json.")
@click.option(
    "--tokenizer",
    default="byte",
    show_default=True,
    help="byte, bpe:VOCAB (trained on this text, saved as tokenizer.json beside the output), "
    "a tokenizer.json, or a folder with one.",
)
@click.option(
    "--glob",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Which files of a folder to read, by name or path below it; may be repeated. Default: endings of text files.",
)
@click.option("--eod", help="The end-of-document token of a BPE or tokenizer.json.", metavar="TOKEN")
@click.option("--limit-mb", type=Amount(), help="Read only the first so many 1e6 bytes.")
@click.option("--key", default="text", show_default=True, help="The key of the text in JSONL and Parquet records.")
@click.option(
    "--turn",
    metavar="TEMPLATE",
    help="How a message of a conversation is written, with {role} and {content}; \\n is a new line. Default: ChatML.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing output.")
@verb
def command(
    inputs: tuple[str, ...],
    out: str,
    tokenizer: str,
    patterns: tuple[str, ...],
    eod: str | None,
    limit_mb: float | None,
    key: str,
    turn: str | None,
    force: bool,
) -> Answer:
    """Turn the text of INPUTS (files, folders, quoted patterns) into a token file.

    A text file is one document; so is each line of a .jsonl and each row of a .parquet file, which hold text,
    prompt and response, or messages. Prompts are read but not learnt: PREFIX.mask.bin says so. Folders are read
    recursively, without hidden folders. The format is that of Megatron-LM's indexed dataset.
    """
    with _progress() as watch:
        found = api.prepare(
            inputs,
            out,
            tokenizer=tokenizer,
            patterns=patterns,
            eod=eod,
            limit_mb=limit_mb,
            key=key,
            turn=None if turn is None else turn.replace("\\n", "\n"),
            force=force,
            watch=watch,
        )
    return Answer(data=found.as_json(), show=(_table(found), *_notes(found)))


@contextmanager
def _progress() -> Iterator[Watch]:
    """A bar on stderr, which leaves stdout to the answer; drawn only where a person watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks: dict[str, int] = {}

        def watch(doing: str, read: int, total: int) -> None:
            if doing not in tasks:
                tasks[doing] = progress.add_task(doing, total=total)
            progress.update(tasks[doing], completed=read)  # type: ignore[arg-type]

        yield watch


def _table(found: Prepared) -> Table:
    meta = found.meta
    table = Table(show_header=False, box=None)
    table.add_row("documents", f"{meta.documents:,}")
    table.add_row("text", format_bytes(meta.bytes))
    rounded = f" ({format_count(meta.tokens)})" if meta.tokens >= 1000 else ""
    table.add_row("tokens", f"{meta.tokens:,}{rounded}")
    if meta.targets is not None:
        table.add_row("targets", f"{meta.targets:,} tokens are learnt, the others only read")
    table.add_row("bytes per token", f"{meta.bytes / meta.tokens:.2f}")
    table.add_row("vocabulary", f"{meta.vocab:,} ids, largest used {meta.max_id}, end of document {meta.eod}")
    table.add_row("tokenizer", meta.tokenizer)
    for kind, path in found.paths.items():
        table.add_row(kind, f"{path} ({format_bytes(path.stat().st_size)})")
    return table


def _notes(found: Prepared) -> list[str]:
    notes = []
    if found.asked_vocab is not None and found.meta.vocab < found.asked_vocab:
        notes.append(f"note: the text gave {found.meta.vocab} ids of the {found.asked_vocab} asked for")
    if found.replaced:
        notes.append(
            f"note: {counted(found.replaced, 'byte run')} in {counted(found.malformed, 'file')} "
            "not UTF-8: read as U+FFFD"
        )
    if found.empty:
        notes.append(f"note: left out {counted(found.empty, 'record')} without text")
    if found.skipped:
        notes.append(f"note: skipped {counted(len(found.skipped), 'file')}")
        notes.extend(f"  {skipped.path} {skipped.reason}" for skipped in found.skipped[:SHOWN])
    if len(found.skipped) > SHOWN:
        notes.append(f"  ... and {len(found.skipped) - SHOWN} more: --json names them all")
    return notes
