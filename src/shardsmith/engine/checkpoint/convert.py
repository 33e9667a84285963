"""Conversion between folders of weights: which format a folder has, and the other one written beside it."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardsmith.engine.checkpoint import hugging_face, run_folder
from shardsmith.engine.checkpoint.safetensors_file import Opened, names_in
from shardsmith.errors import Code

NO_FORMAT = Code(
    code="F406",
    title="folder is in no format that can be converted",
    because="a Hugging Face folder has a config.json, the folder of a run has a model.toml, each beside its weights",
)
NOT_EMPTY = Code(
    code="F407",
    title="destination is not empty",
    because="files of another model would stand beside the new ones and could be read as theirs",
)

Format = Literal["hugging_face", "run"]


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion wrote: tensors as the destination counts them, and their bytes."""

    source: Format
    target: Format
    model: str
    tensors: int
    bytes: int


def format_of(folder: Path) -> Format:
    """Which format `folder` has. Raises `Refused` (F406) where it has none or both."""
    found: list[Format] = []
    if (folder / hugging_face.CONFIG_FILE).is_file():
        found.append("hugging_face")
    if (folder / run_folder.MODEL_FILE).is_file():
        found.append("run")
    if len(found) == 1:
        return found[0]
    files = (hugging_face.CONFIG_FILE, run_folder.MODEL_FILE)
    message = f"{folder} holds {'both' if found else 'neither'} {files[0]} {'and' if found else 'nor'} {files[1]}"
    raise NO_FORMAT.refuse(message, ("SRC", str(folder)), hint="a Hugging Face model folder, or the folder of a run")


def convert(source: Path, target: Path) -> Converted:
    """Write the weights of folder `source` to the new folder `target` in the other format.

    One tensor is in memory at a time, so a model of any size converts in the memory of its largest tensor.
    The folder appears only when it is complete. Raises `Refused` for a source that is in no known format
    (F406) or unsound (F401 to F405), and for a target that holds files already (F407).
    """
    kind = format_of(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise NOT_EMPTY.refuse(f"{target} exists and is not empty", ("DST", str(target)), hint="name a new folder")
    read = hugging_face.read_hugging_face if kind == "hugging_face" else run_folder.read_run
    write = run_folder.write_run if kind == "hugging_face" else hugging_face.write_hugging_face
    found = read(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write(found, staging)
        staging.chmod(0o755)  # a temporary folder is private
        staging.replace(target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    tensors, size = _measure(target)
    return Converted(
        source=kind,
        target="run" if kind == "hugging_face" else "hugging_face",
        model=found.model.name,
        tensors=tensors,
        bytes=size,
    )


def _measure(folder: Path) -> tuple[int, int]:
    """Number and bytes of all tensors in the safetensors files of `folder`, as they were written."""
    count = size = 0
    for file in sorted(folder.glob("*.safetensors")):
        names = names_in(file)
        opened = Opened(folder, dict.fromkeys(names, file.name))
        for name in names:
            numel = opened.dtype(name).itemsize
            for dim in opened.entry(name)[0]:
                numel *= dim
            count, size = count + 1, size + numel
    return count, size
