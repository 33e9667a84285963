"""What a folder of weights is, and its tensors as a Source whatever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from shardsmith.engine.checkpoint import hugging_face, run_folder, store
from shardsmith.engine.checkpoint.record import RECORD_FILE
from shardsmith.engine.checkpoint.source import Source
from shardsmith.engine.checkpoint.whole import open_full
from shardsmith.errors import Code

NO_FORMAT = Code(
    code="F406",
    title="folder holds no weights in a known format",
    because="a Hugging Face folder has a config.json, the folder of a run has a model.toml, each beside its weights; "
    "a checkpoint has a state.json",
)

Format = Literal["hugging_face", "run", "checkpoint"]
MARKS: dict[Format, str] = {
    "hugging_face": hugging_face.CONFIG_FILE,
    "run": run_folder.MODEL_FILE,
    "checkpoint": RECORD_FILE,
}
"""The file by which each format is known."""


def format_of(folder: Path, said: str = "SRC") -> Format:
    """Which format `folder`, named by `said`, has. Raises `Refused` (F406) where it has none or several."""
    found = [kind for kind, name in MARKS.items() if (folder / name).is_file()]
    if len(found) == 1:
        return found[0]
    message = f"{folder} holds neither " + " nor ".join(MARKS.values())
    if found:
        message = f"{folder} holds " + " and ".join(MARKS[kind] for kind in found)
    elif not folder.is_dir():
        message = f"there is no folder {folder}"
    hint = "a Hugging Face model folder, the folder of a run, or a checkpoint"
    if (last := store.newest(folder / "checkpoints", (store.WEIGHTS,)).folder) is not None:
        hint = f"that run has not ended; its newest checkpoint is {last}"
    raise NO_FORMAT.refuse(message, (said, str(folder)), hint=hint)


def open_weights(folder: Path, said: str = "SRC") -> Source:
    """The full tensors of `folder`, every one checked before the first is read.

    Raises `Refused`: no known format (F406), or unsound in the one it has (F110, F401 to F405; F502, F507).
    """
    kind = format_of(folder, said)
    if kind == "checkpoint":
        full = open_full(folder)
        return Source(model=full.model, dtypes=full.dtypes, read=full.read)
    return hugging_face.read_hugging_face(folder) if kind == "hugging_face" else run_folder.read_run(folder)
