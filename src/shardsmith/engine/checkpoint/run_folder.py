"""The folder of a run: its final weights in `model.safetensors`, under our own names, and `model.toml`."""

from __future__ import annotations

from pathlib import Path

from shardsmith.engine.checkpoint.formats import MODEL_FILE, WEIGHTS_FILE
from shardsmith.engine.checkpoint.safetensors_file import NO_TENSOR, SURPLUS, Entry, Opened, names_in, write_safetensors
from shardsmith.engine.checkpoint.source import Source
from shardsmith.errors import raise_errors
from shardsmith.specs.library import model_named, model_toml
from shardsmith.specs.model import stored_weights


def read_run(folder: Path) -> Source:
    """The weights of a run, every tensor checked before the first is read.

    Raises `Refused` with all that is wrong: a missing file (F110, F401), tensors that are missing (F402), of
    no model (F403), of another shape or dtype (F404), an unreadable file (F405).
    """
    model = model_named(folder / MODEL_FILE)
    held = names_in(folder / WEIGHTS_FILE)
    expected = {weight.name: weight.shape for weight in stored_weights(model)}
    opened = Opened(folder, dict.fromkeys(held, WEIGHTS_FILE))
    file = str(folder / WEIGHTS_FILE)
    faults = [NO_TENSOR.fault(f"{file} lacks {name}", (file, f"no {name}")) for name in expected if name not in held]
    faults += [SURPLUS.fault(f"{model.name} has no {name}", (file, name)) for name in held if name not in expected]
    faults += [f for name, shape in expected.items() if name in held for f in opened.tensor_faults(name, shape)]
    raise_errors(faults)
    return Source(model=model, dtypes={name: opened.dtype(name) for name in expected}, read=opened.tensor)


def write_run(source: Source, folder: Path) -> None:
    """Write `source` into the existing `folder`; each file appears complete or not at all."""
    entries = [Entry(name=w.name, dtype=source.dtypes[w.name], shape=w.shape) for w in stored_weights(source.model)]
    write_safetensors(folder / WEIGHTS_FILE, entries, ([source.read(entry.name)] for entry in entries))
    (folder / MODEL_FILE).write_text(model_toml(source.model))
