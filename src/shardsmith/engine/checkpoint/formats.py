"""What a folder of weights is, by its files. Needs no torch, so that a wrong folder is refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from shardsmith.engine.checkpoint import store
from shardsmith.engine.checkpoint.record import RECORD_FILE
from shardsmith.errors import Code

NO_FORMAT = Code(
    code="F406",
    title="folder holds no weights in a known format",
    because="a Hugging Face folder has a config.json, the folder of a run has a model.toml, each beside its weights; "
    "a checkpoint has a state.json",
)

CONFIG_FILE = "config.json"
"""The model, in a Hugging Face folder."""
MODEL_FILE = "model.toml"
"""The model, in the folder of a run."""
RUN_FILE = "run.toml"
"""The job as it was run, every value stated."""
WEIGHTS_FILE = "model.safetensors"
"""All full tensors, where they are in one file: of a run under the model's own names."""

Format = Literal["hugging_face", "run", "checkpoint"]
MARKS: dict[Format, str] = {
    "hugging_face": CONFIG_FILE,
    "run": MODEL_FILE,
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
