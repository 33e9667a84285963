"""`shardsmith convert SRC DST`."""

from __future__ import annotations

from pathlib import Path

import click

from shardsmith import api
from shardsmith.cli.common import Answer, verb
from shardsmith.units import counted, format_bytes

NAMES = {"hugging_face": "Hugging Face folder", "run": "folder of a run", "checkpoint": "checkpoint"}


@click.command("convert")
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@verb
def command(source: Path, target: Path) -> Answer:
    """Write the weights of folder SRC to the new folder DST in the other format.

    A Hugging Face folder (config.json, safetensors) becomes the folder of a run (model.toml,
    model.safetensors); the folder of a run, or a checkpoint, becomes a Hugging Face folder. One tensor is in
    memory at a time. The tokenizer's files go along. To train from weights, no conversion is needed: run.init
    in a job file names either folder.
    """
    found = api.convert(source, target)
    line = (
        f"{found.model}: {NAMES[found.source]} {source} -> {NAMES[found.target]} {target}, "
        f"{counted(found.tensors, 'tensor')}, {format_bytes(found.bytes)}"
    )
    if found.carried:
        line += ", with " + ", ".join(found.carried)
    data = {
        "tensors": found.tensors,
        "bytes": found.bytes,
        "model": found.model,
        "source": found.source,
        "target": found.target,
        "carried": list(found.carried),
    }
    return Answer(data=data, show=(line,))
