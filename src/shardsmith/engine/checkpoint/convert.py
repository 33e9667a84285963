"""Conversion between folders of weights: which format a folder has, and the other one written beside it."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shardsmith.engine.checkpoint.companions import carry, token_ids
from shardsmith.engine.checkpoint.formats import Format, format_of
from shardsmith.errors import Code

NOT_EMPTY = Code(
    code="F407",
    title="destination is not empty",
    because="files of another model would stand beside the new ones and could be read as theirs",
)


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion wrote: tensors as the destination counts them, their bytes, and what it took along."""

    source: Format
    target: Format
    model: str
    tensors: int
    bytes: int
    carried: tuple[str, ...]


def convert(source: Path, target: Path) -> Converted:
    """Write the weights of folder `source` to the new folder `target`: a run's where it is Hugging Face's, else theirs.

    One tensor is in memory at a time, so a model of any size converts in the memory of its largest tensor. The
    tokenizer's files are copied. The folder appears only when it is complete. Raises `Refused` for a source that is in
    no known format (F406) or unsound (F401 to F405, F502, F507), and for a target that holds files already (F407).
    """
    kind = format_of(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise NOT_EMPTY.refuse(f"{target} exists and is not empty", ("DST", str(target)), hint="name a new folder")
    # these bring torch, and what is refused above should be at once
    from shardsmith.engine.checkpoint.hugging_face import write_hugging_face
    from shardsmith.engine.checkpoint.open import open_weights
    from shardsmith.engine.checkpoint.run_folder import write_run

    found = open_weights(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        carried = carry(source, staging)
        if kind == "hugging_face":
            write_run(found, staging)
        else:
            write_hugging_face(found, staging, tokens=token_ids(staging, found.model.vocab))
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
        carried=carried,
    )


def _measure(folder: Path) -> tuple[int, int]:
    """Number and bytes of all tensors in the safetensors files of `folder`, as they were written."""
    from shardsmith.engine.checkpoint.safetensors_file import Opened, names_in

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
