"""Whole tensors of a checkpoint, read and written by one process without a process group."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from shardsmith.engine.checkpoint.blocks import BlockReader, BlockStorage, BlockWriter, stored_tensors, whole_block
from shardsmith.engine.checkpoint.record import Record, plain, read_record
from shardsmith.engine.checkpoint.store import TORN, WEIGHTS, commit, damage
from shardsmith.specs.model import ModelSpec, stored_weights

FILE_BYTES = 2**30
"""Tensors are written together until a file holds this much; so much is in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class FullWeights:
    """The full tensors of a checkpoint of `model`, read one at a time; `dtypes` says what they will be."""

    folder: Path
    model: ModelSpec
    dtypes: Mapping[str, torch.dtype]
    metadata: Metadata

    def read(self, name: str) -> Tensor:
        """One full tensor, on the CPU."""
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), f"{name} is a tensor"
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        storage, planner = BlockStorage(self.folder / WEIGHTS), BlockReader()
        storage.set_up_storage_reader(self.metadata, True)
        planner.set_up_planner({name: whole_block(tensor)}, self.metadata, True)
        storage.read_data(planner.create_local_plan(), planner).wait()
        return tensor

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for weight in stored_weights(self.model):
            yield weight.name, self.read(weight.name)


def open_full(folder: Path) -> FullWeights:
    """The weights of the checkpoint in `folder`, checked before the first is read.

    Raises `Refused`: not complete (F507), not readable (F502).
    """
    wrong = damage(folder, (WEIGHTS,))
    if wrong:
        raise TORN.refuse(f"{folder} is not complete: {'; '.join(wrong[:3])}", (str(folder), wrong[0]))
    model = read_record(folder).spec
    stored = stored_tensors(folder / WEIGHTS)
    return FullWeights(
        folder=folder,
        model=model,
        dtypes={name: dtype for name, (_, dtype) in stored.items()},
        metadata=BlockStorage(folder / WEIGHTS).read_metadata(),
    )


def read_full(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and full tensor of every weight in a checkpoint, in the order of the forward pass, one at a time.

    Raises `Refused` as `open_full`.
    """
    return iter(open_full(folder))


def write_full(folder: Path, tensors: Iterable[tuple[str, Tensor]], *, model: ModelSpec) -> None:
    """Write the checkpoint `folder` of full `tensors`, which are taken one after another: the start of a run.

    They must be exactly the weights of `model`. The folder appears only when it is complete.
    """
    assert not folder.exists(), f"{folder} exists"
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    (staging / WEIGHTS).mkdir(parents=True)
    writer = FileSystemWriter(staging / WEIGHTS)
    writer.set_up_storage_writer(True)
    plans: list[SavePlan] = []
    results = []
    for batch in _batches(tensors):
        planner = BlockWriter()
        planner.set_up_planner({name: whole_block(tensor) for name, tensor in batch.items()})
        plan = writer.prepare_local_plan(planner.create_local_plan())
        # each batch is written as by a rank of its own, which gives it a file of its own
        plans.append(writer.prepare_global_plan([*([SavePlan([])] * len(plans)), plan])[-1])
        results.append(writer.write_data(plans[-1], planner).wait())
    _, metadata = create_default_global_save_plan(plans)
    writer.finish(metadata, results)
    found = {name: shape for name, (shape, _) in stored_tensors(staging / WEIGHTS).items()}
    expected = {weight.name: weight.shape for weight in stored_weights(model)}
    assert found == expected, f"not the tensors of {model.name}: {sorted(set(found.items()) ^ set(expected.items()))}"
    commit(staging, folder, Record(step=0, updates=0, samples=0, model=plain(model)))


def _batches(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    batch: dict[str, Tensor] = {}
    for name, tensor in tensors:
        batch[name] = tensor
        if sum(t.numel() * t.element_size() for t in batch.values()) >= FILE_BYTES:
            yield batch
            batch = {}
    if batch:
        yield batch
