"""Hugging Face model folders: `config.json`, safetensors in one file or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardsmith.engine.checkpoint.companions import TokenIds
from shardsmith.engine.checkpoint.formats import CONFIG_FILE, WEIGHTS_FILE
from shardsmith.engine.checkpoint.safetensors_file import (
    NO_TENSOR,
    SURPLUS,
    UNREADABLE,
    Entry,
    Opened,
    names_in,
    write_safetensors,
)
from shardsmith.engine.checkpoint.source import Source
from shardsmith.errors import Fault, raise_errors
from shardsmith.specs.hf_config import from_hf_config
from shardsmith.specs.hf_names import HFTensor, Turned, hf_tensors, located
from shardsmith.specs.hf_write import to_hf_config
from shardsmith.specs.parse import NO_FILE

INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""Tensors go into another file where one file would grow beyond this."""


def read_hugging_face(folder: Path) -> Source:
    """The weights of a Hugging Face folder, every tensor checked before the first is read.

    Raises `Refused` with all that is wrong: files or tensors that the index or the config names and that are
    not there (F401, F402), tensors of no model (F403), of another shape or dtype (F404), unreadable files (F405).
    """
    spec = from_hf_config(folder)
    where = _index(folder)
    opened = Opened(folder, where)
    raise_errors([fault for file in dict.fromkeys(where.values()) for fault in opened.faults(file)])
    found, surplus = located(where, spec)
    tensors = hf_tensors(spec)
    faults = [_missing(folder, tensor) for tensor in tensors if tensor.name not in found]
    faults += [
        SURPLUS.fault(f"{spec.name} has no tensor {name}", (str(folder / where[name]), name)) for name in surplus
    ]
    for tensor in tensors:
        if tensor.name in found:
            faults += opened.tensor_faults(found[tensor.name], tensor.shape)
    raise_errors(faults)
    holders: dict[str, list[HFTensor]] = {}
    for tensor in tensors:
        for part in tensor.parts:
            holders.setdefault(part.name, []).append(tensor)

    def read(name: str) -> Tensor:
        pieces = [_part(opened, found[tensor.name], tensor, name) for tensor in holders[name]]
        return pieces[0] if holders[name][0].expert is None else torch.stack(pieces)

    dtypes = {name: opened.dtype(found[held[0].name]) for name, held in holders.items()}
    return Source(model=spec, dtypes=dtypes, read=read)


def write_hugging_face(
    source: Source, folder: Path, *, shard_bytes: int = SHARD_BYTES, tokens: TokenIds | None = None
) -> None:
    """Write `source` into the existing `folder` as `from_pretrained` reads it; the config comes last, with `tokens`.

    The index is built from the files as they were written. A tied head is not written: the config says that
    it is tied. Raises `Refused` (M205) for a model that no Hugging Face type computes.
    """
    pairs = [(tensor, _entry(source, tensor)) for tensor in hf_tensors(source.model)]
    shards = _shards(pairs, shard_bytes)
    names = [WEIGHTS_FILE]
    if len(shards) > 1:
        names = [f"model-{at:05}-of-{len(shards):05}.safetensors" for at in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, [entry for _, entry in shard], _pieces(source, [t for t, _ in shard]))
    if len(shards) > 1:
        held = {tensor: name for name in names for tensor in names_in(folder / name)}
        index = {"metadata": {"total_size": sum(e.bytes for _, e in pairs)}, "weight_map": dict(sorted(held.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    dtype = str(source.dtypes["embedding.weight"]).removeprefix("torch.")
    config = to_hf_config(source.model, dtype=dtype) | dict(tokens or {})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def _index(folder: Path) -> Mapping[str, str]:
    """Which file of `folder` holds which tensor: by its index, or all in the one file."""
    index, single = folder / INDEX_FILE, folder / WEIGHTS_FILE
    if index.is_file():
        try:
            where: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise UNREADABLE.refuse(f"{index} has no weight_map that can be read: {error!r}") from error
        return where
    if not single.is_file():
        message = f"there is no {WEIGHTS_FILE} and no {INDEX_FILE} in {folder}"
        raise NO_FILE.refuse(message, hint="weights are read from safetensors only: a .bin file may run code")
    return dict.fromkeys(names_in(single), WEIGHTS_FILE)


def _missing(folder: Path, tensor: HFTensor) -> Fault:
    parts = ", ".join(part.name for part in tensor.parts)
    return NO_TENSOR.fault(f"no file of {folder} holds {tensor.name}", (str(folder), f"no {tensor.name} ({parts})"))


def _part(opened: Opened, stored: str, tensor: HFTensor, name: str) -> Tensor:
    """One of our tensors out of theirs."""
    if len(tensor.parts) == 1:
        whole = opened.tensor(stored)
        if tensor.turned is not None:
            return _ordered(whole, tensor.turned, inverse=False)
        return whole.t() if tensor.transposed else whole
    assert tensor.transposed or len(tensor.shape) == 1, f"{stored}: parts stand side by side in the last dim"
    start = 0
    for part in tensor.parts:
        if part.name == name:
            break
        start += part.shape[0]
    columns = opened.columns(stored, start, start + part.shape[0])
    return columns.t() if tensor.transposed else columns


def _entry(source: Source, tensor: HFTensor) -> Entry:
    return Entry(name=tensor.name, dtype=source.dtypes[tensor.parts[0].name], shape=tensor.shape)


def _pieces(source: Source, tensors: Sequence[HFTensor]) -> Iterator[list[Tensor]]:
    """Pieces of each tensor in turn, as they stand side by side in the file."""
    stacked: tuple[str, Tensor] | None = None  # the experts of one matrix follow one another
    for tensor in tensors:
        name = tensor.parts[0].name
        if tensor.expert is not None:
            if stacked is None or stacked[0] != name:
                stacked = name, source.read(name)
            yield [stacked[1][tensor.expert]]
        elif tensor.turned is not None:
            yield [_ordered(source.read(name), tensor.turned, inverse=True)]
        else:
            yield [source.read(p.name).t() if tensor.transposed else source.read(p.name) for p in tensor.parts]


def _ordered(x: Tensor, turned: Turned, *, inverse: bool) -> Tensor:
    """Rows of `x` with rotary channels as halves, from neighbours; the `inverse` of it."""
    rest, pairs = x.unflatten(0, (-1, turned.group)).split((turned.first, turned.group - turned.first), 1)
    pairs = pairs.unflatten(1, (2, -1) if inverse else (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((rest, pairs), 1).flatten(0, 1)


def _shards(pairs: Sequence[tuple[HFTensor, Entry]], limit: int) -> list[list[tuple[HFTensor, Entry]]]:
    """Tensors by file, in order; a file closes before it would grow beyond `limit` bytes."""
    shards: list[list[tuple[HFTensor, Entry]]] = [[]]
    filled = 0
    for pair in pairs:
        if shards[-1] and filled + pair[1].bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(pair)
        filled += pair[1].bytes
    return shards
