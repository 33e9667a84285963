"""What the folder of a run says about it: the job as it was run, and the tokenizer that its tokens belong to."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardsmith.engine.checkpoint.companions import GENERATION_FILE, TOKENIZER_FILE, carry
from shardsmith.engine.checkpoint.formats import RUN_FILE
from shardsmith.engine.dataset.indexed import Meta, read_meta
from shardsmith.engine.dataset.tokenizer import fingerprint
from shardsmith.plan.file import dumps
from shardsmith.plan.setup import Job
from shardsmith.specs.job import SYNTHETIC, Data

_BESIDE = ("cluster.", "data.tokenizer", "run.folder", "run.resume", "run.init", "run.overwrite", "run.timeline_step")
"""Keys that change nothing in what is computed."""


def write_record(job: Job, folder: Path) -> None:
    """Write run.toml, and the tokenizer's files where there are any: those of `run.init` if the data are in its ids."""
    name, meta = tokenizer_of(job.data)
    kept = replace(job, data=replace(job.data, tokenizer=name)) if name is not None else job
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_FILE).write_text(dumps(kept), encoding="utf-8")
    file = None if name is None else _file(Path(name))
    if job.run.init and (name is None or _same(file, Path(job.run.init) / TOKENIZER_FILE)):
        carry(Path(job.run.init), folder)
    elif file is not None and not _same(file, folder / TOKENIZER_FILE):
        shutil.copyfile(file, folder / TOKENIZER_FILE)
    if meta is not None and not (folder / GENERATION_FILE).exists():
        (folder / GENERATION_FILE).write_text(json.dumps({"eos_token_id": meta.eod}, indent=2) + "\n", encoding="utf-8")


def changes(job: Job, folder: Path) -> tuple[str, ...]:
    """What a run that goes on in `folder` states otherwise than before, as `section.key: before -> now`."""
    try:
        before = _flat(tomllib.loads((folder / RUN_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):  # written by a version that kept no record, or by hand
        return ()
    now = _flat(tomllib.loads(dumps(job)))
    keys = [key for key in sorted(before.keys() | now.keys()) if not key.startswith(_BESIDE)]
    return tuple(f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys if before.get(key) != now.get(key))


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, values in table.items() for key, value in values.items()}


def tokenizer_of(data: Data) -> tuple[str | None, Meta | None]:
    """What `open_tokenizer` calls the tokenizer of `data` (None: not known), and what is known of the tokens."""
    paths = [Path(path) for path in data.paths if path != SYNTHETIC]
    metas = [(path, meta) for path in paths if (meta := read_meta(path)) is not None]
    path, meta = metas[0] if metas else (None, None)
    if data.tokenizer is not None:
        return data.tokenizer, meta
    if meta is None or path is None or meta.tokenizer_file is None:
        return ("byte" if meta is not None and meta.tokenizer == "byte" else None), meta
    return str(path.parent / meta.tokenizer_file), meta


def _file(name: Path) -> Path | None:
    found = name / TOKENIZER_FILE if name.is_dir() else name
    return found if found.is_file() else None


def _same(file: Path | None, other: Path) -> bool:
    if file is None or not other.is_file():
        return False
    return fingerprint(file.read_bytes()) == fingerprint(other.read_bytes())
