"""The folders of checkpoints: each appears complete or not at all, and the newest complete one is found again.

`ROOT/step-00000012/` holds a folder a part (`weights/`, `optimizer/`), `state.json`, and last of all `complete`:
the sizes of all files. It is made as `ROOT/.step-00000012.partial` and renamed when it is complete, so whatever
has another name was never finished, and whatever does not have its sizes was damaged later.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardsmith.engine.checkpoint.record import RECORD_FILE, Record, write_record
from shardsmith.errors import Code, Fault
from shardsmith.units import counted

NO_CHECKPOINT = Code(
    code="F506",
    title="no complete checkpoint to resume from",
    because="resuming from a checkpoint that was named must not quietly start from the beginning",
)
TORN = Code(
    code="F507",
    title="checkpoint is not complete",
    because="a file that is missing or has another size was cut short, and its tensors would be stale or garbage",
)

LATER = Code(
    code="F509",
    title="the run's folder holds later checkpoints",
    because="two histories in one folder would mix: the next resume would take the later one, which is of the other",
)

MARK = "complete"
WEIGHTS, OPTIMIZER = "weights", "optimizer"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was chosen to resume from (None: nothing), and a warning for each newer one that was passed over."""

    folder: Path | None
    warnings: tuple[Fault, ...] = ()


def folder_of(root: Path, step: int) -> Path:
    """The checkpoint after `step` steps."""
    return root / f"step-{step:08}"


def begin(root: Path, step: int) -> Path:
    """An empty folder to make the checkpoint of `step` in; what killed saves have left is removed."""
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob(".step-*"):
        shutil.rmtree(stale)
    staging = root / f".{folder_of(root, step).name}.partial"
    staging.mkdir()
    return staging


def commit(staging: Path, final: Path, record: Record) -> None:
    """Write the record and, last, the mark into `staging`, and let it appear as `final` in one step."""
    write_record(staging, record)
    _sync(staging / RECORD_FILE)
    mark(staging)
    if final.exists():
        # of the same step, from an earlier attempt: out of the way, and gone once the new one stands
        final.rename(final.with_name(f".{final.name}.old"))
    staging.rename(final)
    _sync(final.parent)
    shutil.rmtree(final.with_name(f".{final.name}.old"), ignore_errors=True)


def mark(folder: Path) -> None:
    """Declare `folder` complete: write down the size of every file in it."""
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    partial = folder / f".{MARK}"
    partial.write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
    _sync(partial)
    partial.rename(folder / MARK)
    _sync(folder)


def prune(root: Path, keep: int) -> None:
    """Remove what is older than the newest `keep` complete checkpoints (0: remove nothing)."""
    sound = 0
    for folder in checkpoints(root) if keep else []:
        if sound < keep:
            sound += not damage(folder, (WEIGHTS, OPTIMIZER))
            continue
        # renamed first, so that a removal cut short leaves nothing that looks like a checkpoint
        doomed = folder.with_name(f".{folder.name}.old")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def later_faults(root: Path, step: int) -> list[Fault]:
    """A fault where `root` has a complete checkpoint of a later step than `step`, at which the run begins."""
    later = [path for path in checkpoints(root) if step_of(path) > step and not damage(path, (WEIGHTS,))]
    if not later:
        return []
    said = (("job", f"begins at step {step}"), (str(root), later[0].name))
    hint = 'run.resume = "auto" to go on from it; or another run.folder; or remove what is not wanted'
    return [LATER.fault(f"{later[0]} is later than the step at which this run begins", *said, hint=hint)]


def step_of(folder: Path) -> int:
    """The step of a checkpoint, by its name."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None, f"{folder} is not called a checkpoint"
    return int(match[1])


def checkpoints(root: Path) -> list[Path]:
    """All folders of `root` that are called checkpoints, newest first, whether sound or not."""
    return sorted((path for path in _folders(root) if _NAME.fullmatch(path.name)), key=step_of, reverse=True)


def damage(folder: Path, parts: Iterable[str]) -> list[str]:
    """What is wrong with the files of `folder` that belong to `parts` or to no part; empty for a sound checkpoint."""
    try:
        files: dict[str, int] = json.loads((folder / MARK).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return [f"it has no file {MARK}"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"its file {MARK} cannot be read: {error}"]
    wanted = {name: size for name, size in files.items() if "/" not in name or name.split("/")[0] in set(parts)}
    found = []
    for name, size in wanted.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != size:
            found.append(f"{name} has {counted(path.stat().st_size, 'byte')} instead of {size}")
    return found


def has_part(folder: Path, part: str) -> bool:
    """Whether anything of `part` is there; one that is wholly gone was taken away, not cut short."""
    return (folder / part).is_dir()


def newest(root: Path, parts: Sequence[str]) -> Found:
    """The newest checkpoint of `root` that is complete, as far as `parts` go, with a warning for each newer one."""
    warnings: list[Fault] = []
    for folder in checkpoints(root):
        # a part that was taken away is for the caller to judge: it must not be stepped over in silence
        wrong = damage(folder, [part for part in parts if has_part(folder, part)])
        if not wrong:
            return Found(folder=folder, warnings=tuple(warnings))
        message = f"{folder} is not complete and was passed over: {'; '.join(wrong[:3])}"
        warnings.append(Fault(code=TORN.code, severity="warning", message=message, because=TORN.because))
    return Found(folder=None, warnings=tuple(warnings))


def named(path: Path, parts: Sequence[str]) -> Found:
    """The checkpoint that `path` names: itself, or the newest complete one in it or in its `checkpoints`.

    Raises `Refused`: it is not complete (F507), or there is none (F506).
    """
    if (path / RECORD_FILE).is_file() or _NAME.fullmatch(path.name):
        wrong = damage(path, [part for part in parts if has_part(path, part)])
        if wrong:
            raise TORN.refuse(
                f"{path} is not complete: {'; '.join(wrong[:3])}", ("run.resume", str(path)), hint=_other(path.parent)
            )
        return Found(folder=path)
    for root in (path, path / "checkpoints"):
        found = newest(root, parts)
        if found.folder is not None:
            return found
    message = f"there is no complete checkpoint in {path}"
    hint = "a checkpoint, or the folder of a run that has saved some; or resume = auto, which may begin from the start"
    if any(path.glob("*.safetensors")):
        # weights alone are no checkpoint: there is no step and no optimiser to go on from
        message = f"{path} holds weights, but no complete checkpoint"
        hint = f'run.init = "{path}" begins a new run with these weights'
    raise NO_CHECKPOINT.refuse(message, ("run.resume", str(path)), hint=hint)


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _other(root: Path) -> str:
    sound = [path.name for path in checkpoints(root) if not damage(path, (WEIGHTS, OPTIMIZER))]
    return f"{sound[0]} beside it is complete" if sound else "there is no complete one beside it"


def _sync(path: Path) -> None:
    """Have the system write a file or the entries of a folder down."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
