"""The tensors of a folder of weights as a Source, whatever its format."""

from __future__ import annotations

from pathlib import Path

from shardsmith.engine.checkpoint.formats import format_of
from shardsmith.engine.checkpoint.hugging_face import read_hugging_face
from shardsmith.engine.checkpoint.run_folder import read_run
from shardsmith.engine.checkpoint.source import Source
from shardsmith.engine.checkpoint.whole import open_full


def open_weights(folder: Path, said: str = "SRC") -> Source:
    """The full tensors of `folder`, every one checked before the first is read.

    Raises `Refused`: no known format (F406), or unsound in the one it has (F110, F401 to F405; F502, F507).
    """
    kind = format_of(folder, said)
    if kind == "checkpoint":
        full = open_full(folder)
        return Source(model=full.model, dtypes=full.dtypes, read=full.read)
    return read_hugging_face(folder) if kind == "hugging_face" else read_run(folder)
