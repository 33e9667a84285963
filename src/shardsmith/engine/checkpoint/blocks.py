"""Blocks: the part of a full tensor that one rank holds, written and read by torch's distributed checkpoint (DCP).

A tensor is addressed by its global name and its logical shape, which no padding and no layout changes. A rank
brings a rectangle of it: `offsets` and a local tensor. DCP records all rectangles, so any other cut reads what
it overlaps. An empty rectangle is legal; it is neither written nor read.

Only DCP's planner interface is used, as it is since torch 2.5; its handling of DTensor and of nested state
dicts is not.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardsmith.engine.checkpoint.record import NOT_READ, NOT_WRITTEN

_METADATA = ".metadata"
_HARMLESS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
"""Modules whose classes the metadata of a checkpoint consists of; anything else in a pickle is refused."""
_HARMLESS_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("collections", "OrderedDict"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """This rank's part of a full tensor of `shape`: `tensor`, which starts at `offsets`.

    Of the ranks that hold the same part, one has it `owned`: it writes it. Loading fills `tensor` in place on all.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor
    owned: bool = True

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """The rectangle as DCP names it; none where it is empty."""
        if self.tensor.numel() == 0:
            return []
        return [ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.tensor.size())]


def whole_block(tensor: Tensor) -> Block:
    """All of a tensor as one block."""
    return Block(shape=tuple(tensor.shape), offsets=(0,) * tensor.dim(), tensor=tensor)


def write_blocks(folder: Path, blocks: Mapping[str, Block], group: dist.ProcessGroup | None = None) -> None:
    """Write all ranks' owned `blocks` into `folder`, a file a rank; every rank of `group` calls this.

    Without a process group the blocks of this process are all there are. Every element of a tensor must be
    owned exactly once. Raises `Refused` (F501) on all ranks where one of them fails.
    """
    writer = FileSystemWriter(folder)
    try:
        with _quiet():
            save(dict(blocks), storage_writer=writer, planner=BlockWriter(), process_group=group, no_dist=_alone(group))
    except CheckpointException as error:
        raise NOT_WRITTEN.refuse(
            f"{folder} could not be written: {_reasons(error)}", hint="see that the disk has room and may be written"
        ) from None


def read_blocks(folder: Path, blocks: Mapping[str, Block], group: dist.ProcessGroup | None = None) -> None:
    """Fill the tensors of `blocks` from `folder`, whatever cut it was written in; every rank of `group` calls this.

    Raises `Refused` (F502) on all ranks where one of them fails: a tensor that is missing or of another shape.
    """
    try:
        with _quiet():
            load(
                dict(blocks),
                storage_reader=BlockStorage(folder),
                planner=BlockReader(),
                process_group=group,
                no_dist=_alone(group),
            )
    except CheckpointException as error:
        raise NOT_READ.refuse(
            f"{folder} could not be read: {_reasons(error)}", hint="resume from another checkpoint"
        ) from None


def stored_tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Full shape and dtype of every tensor in `folder`, by name, and nothing read. Raises `Refused` (F502)."""
    try:
        metadata = BlockStorage(folder).read_metadata()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise NOT_READ.refuse(f"{folder / _METADATA} cannot be read: {error}") from error
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


class BlockWriter(DefaultSavePlanner):
    """Plans what this rank writes of a mapping of names to blocks."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """One write an owned block."""
        self.plan = SavePlan([_write(name, block) for name, block in self.state_dict.items() if _written(block)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The tensor behind a write."""
        tensor: Tensor = self.state_dict[index.fqn].tensor
        return tensor.detach()


class BlockReader(DefaultLoadPlanner):
    """Plans what this rank reads into a mapping of names to blocks."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the blocks as they are."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Reads of whatever written rectangles each block overlaps."""
        assert self.metadata is not None, "the planner was set up with metadata"
        items = []
        for name, block in self.state_dict.items():
            entry = self.metadata.state_dict_metadata.get(name)
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"there is no tensor {name}")
            if tuple(entry.size) != block.shape:
                raise ValueError(f"{name} is {tuple(entry.size)} there, not {block.shape}")
            items += create_read_items_for_chunk_list(name, entry, block.chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor that a read fills."""
        tensor: Tensor = self.state_dict[index.fqn].tensor
        return tensor.detach()


class BlockStorage(FileSystemReader):
    """A folder of DCP files whose metadata may hold metadata only: unpickling it runs no code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the folder holds. Raises OSError or pickle.UnpicklingError."""
        found = _Unpickler(io.BytesIO((Path(self.path) / _METADATA).read_bytes())).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"{type(found).__name__} is no metadata")
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = None
        if module in _HARMLESS or (module, name) in _HARMLESS_NAMES:
            found = super().find_class(module, name)
        elif module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype | torch.layout):
            found = value
        if found is None or (module in _HARMLESS and not isinstance(found, type)):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into the metadata of a checkpoint")
        return found


def _written(block: Block) -> bool:
    return block.owned and block.tensor.numel() > 0


def _write(name: str, block: Block) -> WriteItem:
    (chunk,) = block.chunks
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk, properties=TensorProperties(dtype=block.tensor.dtype), size=torch.Size(block.shape)
        ),
    )


def _alone(group: dist.ProcessGroup | None) -> bool:
    return group is None


def _reasons(error: CheckpointException) -> str:
    """The error of each rank that failed, the first three of them."""
    found = [f"rank {rank}: {_short(cause)}" for rank, (cause, _) in sorted(error.failures.items())]
    return "; ".join([*found[:3], *["..."] * (len(found) > 3)])


def _short(cause: BaseException) -> str:
    return f"{type(cause).__name__}: {cause}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that one process alone is saving, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
