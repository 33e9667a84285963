"""Safetensors files, written tensor by tensor and opened with every tensor checked.

A file is the length of its header (8 bytes), the header (JSON: dtype, shape and place of every tensor), and
the tensors one after another. As all shapes are known beforehand, the header is written first and no more
than one tensor need be in memory.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardsmith.errors import Code, Fault, Refused
from shardsmith.units import counted

NO_SHARD = Code(
    code="F401",
    title="a file of the checkpoint is missing",
    because="without it tensors would keep whatever values they start with, which shows only in what the model says",
)
NO_TENSOR = Code(
    code="F402",
    title="a tensor of the model is missing from the checkpoint",
    because="a tensor that is not read keeps whatever values it starts with",
)
SURPLUS = Code(
    code="F403",
    title="a tensor that the model does not have",
    because="a tensor that nothing reads means that the checkpoint belongs to another model than its config says",
)
OTHER_TENSOR = Code(
    code="F404",
    title="a tensor of another shape or dtype",
    because="the shape follows from the config, and weights are floating-point numbers of 16 bits or more",
)
UNREADABLE = Code(
    code="F405",
    title="file is not valid safetensors",
    because="a file that was cut short or is not safetensors holds no complete tensors",
)

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

CHUNK_BYTES = 16 * 2**20
"""Bytes of a tensor that are laid out for the file at a time, where it is not laid out so in memory."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a file to be: its name, dtype and shape there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the tensor in the file."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


def write_safetensors(path: Path, entries: Sequence[Entry], tensors: Iterable[Sequence[Tensor]]) -> None:
    """Write the file `path`, taking the tensors of `entries` one after another.

    Each tensor comes as pieces that stand side by side along its last dim. The file appears under its name
    only when it is complete.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        place = [start, start + entry.bytes]
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": place}
        start += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        source = iter(tensors)
        for entry in entries:
            # No name here (and no zip) holds the pieces: they are gone before the next ones are read.
            _write(file, entry, next(source))
        assert next(source, None) is None, f"more tensors for {path} than were announced"
    os.replace(partial, path)


def names_in(path: Path) -> list[str]:
    """Names of all tensors in the file `path`. Raises `Refused` for a file that is missing (F401) or unsound (F405)."""
    if not path.is_file():
        raise NO_SHARD.refuse(f"{path} is missing", (str(path.parent), f"no {path.name}"), hint="copy the folder again")
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        said = (str(path), f"{counted(path.stat().st_size, 'byte')}")
        raise UNREADABLE.refuse(f"{path} cannot be read: {error}", said, hint="copy the file again") from error


def _write(file: BinaryIO, entry: Entry, pieces: Sequence[Tensor]) -> None:
    """Write the rows of all pieces side by side, few at a time where they must be copied for it."""
    shape = (*pieces[0].shape[:-1], sum(p.shape[-1] for p in pieces))
    assert shape == entry.shape, f"{entry.name}: {shape} is not the shape {entry.shape} that was announced"
    assert all(p.dtype == entry.dtype for p in pieces), f"{entry.name} is not the {entry.dtype} that was announced"
    rows = entry.shape[0]
    if (len(pieces) == 1 and pieces[0].is_contiguous()) or len(entry.shape) == 1:
        step = rows
    else:
        step = max(1, CHUNK_BYTES * rows // entry.bytes)
    for at in range(0, rows, step):
        part = [p if step == rows else p[at : at + step] for p in pieces]
        chunk = part[0] if len(part) == 1 else torch.cat(part, -1)
        file.write(chunk.detach().cpu().contiguous().view(torch.uint8).numpy().data)


class Opened:
    """The safetensors files of one checkpoint, each opened once; `where` says which file holds which tensor."""

    def __init__(self, folder: Path, where: Mapping[str, str]) -> None:
        self.folder, self.where = folder, where
        self._files: dict[str, Any] = {}

    def tensor(self, name: str) -> Tensor:
        """One tensor."""
        tensor: Tensor = self._file(self.where[name]).get_tensor(name)
        return tensor

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        """Indices [start, stop) of a tensor's last dim."""
        tensor: Tensor = self._file(self.where[name]).get_slice(name)[..., start:stop]
        return tensor

    def faults(self, file: str) -> list[Fault]:
        """Why `file` cannot be read, and which tensors it lacks; empty for a sound one."""
        path = self.folder / file
        names = [name for name, place in self.where.items() if place == file]
        if not path.is_file():
            said = (str(self.folder), f"no {file}")
            message = f"{file} is missing, and with it {counted(len(names), 'tensor')}, {names[0]} the first"
            return [NO_SHARD.fault(message, said, hint="copy or download the folder again")]
        try:
            held = set(names_in(path))
        except Refused as refused:
            return list(refused.faults)
        return [
            NO_TENSOR.fault(f"{file} lacks {name}, which the index places there", (str(path), f"no {name}"))
            for name in names
            if name not in held
        ]

    def entry(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape of a tensor, and its dtype as the file says it."""
        piece = self._file(self.where[name]).get_slice(name)
        return tuple(piece.get_shape()), str(piece.get_dtype())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor that was checked."""
        return DTYPES[self.entry(name)[1]]

    def tensor_faults(self, name: str, shape: tuple[int, ...]) -> list[Fault]:
        """What is wrong with a tensor that should have `shape`."""
        found, dtype = self.entry(name)
        said = (str(self.folder / self.where[name]), f"{name}: {dtype} {list(found)}")
        if found != shape:
            message = f"{name} is {list(found)}, but the model's config makes it {list(shape)}"
            return [OTHER_TENSOR.fault(message, said, hint="give the config that these weights were saved with")]
        if dtype not in DTYPES:
            message = f"{name} is stored as {dtype}"
            hint = "a checkpoint in " + ", ".join(DTYPES)
            return [OTHER_TENSOR.fault(message, said, hint=hint)]
        return []

    def _file(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(self.folder / file, framework="pt")
        return self._files[file]
