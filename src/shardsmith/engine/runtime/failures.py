"""Which rank failed first, and of what: failures are written down by each rank and judged by the parent.

One failing rank breaks the connections of all the others, whose errors then say "connection closed" and hide the
cause. So every failure has a kind: `cause` (it happened here), `waiting` (a wait for another rank ran out) or
`consequence` (another rank went away). The first cause is reported; failing that, who kept the others waiting.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from shardsmith.engine.runtime import progress
from shardsmith.errors import Code, Fault, Refused

# A destructor of the parent's garbage may wait for a thread that only the parent has: a fork leaves it alone.
os.register_at_fork(after_in_child=gc.freeze)

Kind = Literal["cause", "waiting", "consequence"]

RANK_FAILED = Code(
    code="R201",
    title="a rank failed",
    because="ranks work in lock-step: when one stops, all are ended, and its own error is the one to read",
)
RANK_KILLED = Code(
    code="R202",
    title="a rank was killed",
    because="the process ended without an error of its own: the system (out of memory?) or a person ended it, "
    "or native code crashed",
)
RANK_ABSENT = Code(
    code="R203",
    title="a rank did not take part",
    because="every rank of a group must join each of its collectives in the same order; the others waited in vain",
)
RANK_UNFINISHED = Code(
    code="R204",
    title="ranks did not finish in time",
    because="no wait is without a bound",
)

STEP_BACK_S = 3.0
"""A rank that failed through another one stays this long, so that the parent meets the cause first."""

_OUTPUT_LINES = 10

_INPUT = ("F", "G1", "G2", "G3", "G4")
"""How codes begin that are about files and settings: all ranks meet such a fault alike, and none of them failed."""

_stacks: int | None = None
"""Descriptor of this rank's stack file."""

_WAITING = ("timed out waiting", "timeout(ms)", "wait timeout", "collective operation timeout", "timed out after")
_CONSEQUENCE = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "socket closed",
    "connectfullmesh failed",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "ncclremoteerror",
    "communicator was aborted",
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The error of one rank, as it wrote it down; `time` in seconds since the epoch, `faults` if it was a refusal."""

    rank: int
    kind: Kind
    type: str
    message: str
    traceback: str
    time: float
    step: int | None = None
    faults: tuple[Fault, ...] = ()


class RankFailed(Refused):
    """A run of several ranks ended because one failed; `rank` and `step` (None: unknown) say where."""

    def __init__(self, faults: Sequence[Fault], *, rank: int | None = None, step: int | None = None) -> None:
        super().__init__(faults)
        self.rank = rank
        self.step = step

    def __reduce__(self) -> Any:
        return _rank_failed, (self.faults, self.rank, self.step)


def kind_of(exception: BaseException) -> Kind:
    """Whether `exception` is a cause of its own, a wait that ran out, or the echo of another rank's end.

    Only errors of the communication library count as echoes (RuntimeError itself or a torch.distributed
    error), also where a rank raised something else `from` one.
    """
    at: BaseException | None = exception
    while at is not None:
        library = type(at) is RuntimeError or type(at).__module__.startswith(("torch.distributed", "torch._C"))
        text = str(at).lower()
        if library and any(mark in text for mark in _WAITING):
            return "waiting"
        if library and any(mark in text for mark in _CONSEQUENCE):
            return "consequence"
        at = at.__cause__
    return "cause"


def describe(rank: int, exception: BaseException) -> Failure:
    """The failure of this process, ready to be written down."""
    return Failure(
        rank=rank,
        kind=kind_of(exception),
        type=type(exception).__name__,
        message=str(exception),
        traceback="".join(traceback.format_exception(exception)),
        time=time.time(),
        step=progress.current_step(),
        faults=exception.faults if isinstance(exception, Refused) else (),
    )


def prepare_rank(folder: Path, rank: int, *, keep_terminal: bool) -> None:
    """Make this process a rank whose end can be understood from `folder`.

    SIGTERM and SIGINT end it at once, also inside native code, and leave its Python stack in `folder`; crashes do
    too. Output goes to `log_path(folder, rank)` unless `keep_terminal`.
    """
    progress.start_notes(folder, rank)
    if not keep_terminal:
        sys.stdout.flush()
        sys.stderr.flush()
        log = os.open(log_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # the parent's objects may point elsewhere (a test runner's capture); a rank writes to its own descriptors
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    global _stacks
    _stacks = os.open(_path(folder, rank, "stack"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    faulthandler.enable(file=_stacks, all_threads=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        handle(number, signal.SIG_DFL)


def handle(number: signal.Signals, handler: Any) -> Any:
    """Let `handler` take a signal, as `signal.signal` does; returns the handler before.

    In a prepared rank its Python stack is left in its folder all the same, before the handler runs.
    """
    if _stacks is not None:
        faulthandler.unregister(number)  # puts back what was there when it was registered
    before = signal.signal(number, handler)
    if _stacks is not None:
        faulthandler.register(number, file=_stacks, all_threads=True, chain=True)
    return before


def run_guarded(function: Callable[..., Any], args: Sequence[Any], folder: Path, rank: int) -> Any:
    """Call the function as `rank`; its error is written down in `folder` and ends the process with status 1.

    The process leaves without tearing down torch: destructors of broken connections can hang.
    """
    try:
        result = function(*args)
    except BaseException as exception:
        if isinstance(exception, SystemExit) and exception.code in (0, None):
            result = None
        else:
            _leave(describe(rank, exception), folder)
    _path(folder, rank, "done").touch()
    return result


def write_failure(failure: Failure, folder: Path) -> None:
    """Write it down whole or not at all."""
    path = _path(folder, failure.rank, "failure")
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(failure))
    partial.replace(path)


def log_path(folder: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return _path(folder, rank, "log")


def clear(folder: Path) -> None:
    """Remove what an earlier run left in `folder`, so that it is not taken for this one's."""
    for suffix in ("failure", "partial", "done", "stack", "progress", "log"):
        for path in folder.glob(f"rank*.{suffix}"):
            path.unlink(missing_ok=True)


def judge(
    folder: Path, world: int, *, exit_codes: Mapping[int, int], unfinished_after_s: float | None = None
) -> RankFailed:
    """What ended the ranks: the first cause, else who did not take part, else who did not finish.

    `exit_codes` are those of ranks that ended by themselves; negative: by that signal.
    """
    failures = _read_failures(folder, world)
    causes = sorted((f for f in failures.values() if f.kind == "cause"), key=lambda f: f.time)
    if causes:
        return _failed(causes[0], folder)
    for rank, code in sorted(exit_codes.items()):
        if rank not in failures and code != 0:
            return _ended(rank, code, folder)
    if failures:
        waiting = min(failures.values(), key=lambda f: (f.kind != "waiting", f.time))
        return _absent(waiting, failures, folder, world)
    assert unfinished_after_s is not None, "ranks were judged although none failed"
    return _unfinished(folder, world, unfinished_after_s)


def explain_here(rank: int, world: int, folder: Path, exception: BaseException) -> None:
    """Add to `exception` who did not take part, as far as the notes of all ranks in a shared `folder` tell."""
    missing = progress.absent(progress.read_progress(folder, range(world)), rank)
    if kind_of(exception) != "cause" and missing:
        exception.add_note("; ".join(_missed(other, joined) for other, joined in sorted(missing.items())))


def _rank_failed(faults: tuple[Fault, ...], rank: int | None, step: int | None) -> RankFailed:
    return RankFailed(faults, rank=rank, step=step)


def _leave(failure: Failure, folder: Path) -> NoReturn:
    write_failure(failure, folder)
    if failure.kind != "cause":
        time.sleep(STEP_BACK_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _read_failures(folder: Path, world: int) -> dict[int, Failure]:
    paths = {rank: _path(folder, rank, "failure") for rank in range(world)}
    return {rank: pickle.loads(path.read_bytes()) for rank, path in paths.items() if path.exists()}


def _failed(failure: Failure, folder: Path) -> RankFailed:
    where = f"rank {failure.rank} failed" + _in_step(failure.step)
    faults = failure.faults or (
        RANK_FAILED.fault(
            f"{where}: {failure.type}: {failure.message}\n{_indent(failure.traceback)}",
            hint=_log_hint(folder, failure.rank),
        ),
    )
    if failure.faults and not failure.faults[0].code.startswith(_INPUT):
        faults = (replace(faults[0], message=f"{where}: {faults[0].message}"), *faults[1:])
    return RankFailed(faults, rank=failure.rank, step=failure.step)


def _ended(rank: int, code: int, folder: Path) -> RankFailed:
    step = progress.read_progress(folder, [rank])[rank].step
    how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with status {code}"
    crash = _stack(folder, rank)
    message = f"rank {rank} {how}{_in_step(step)}" + (f"\n{_indent(crash)}" if crash else "")
    return RankFailed([RANK_KILLED.fault(message, hint=_log_hint(folder, rank))], rank=rank, step=step)


def _absent(waiting: Failure, failures: Mapping[int, Failure], folder: Path, world: int) -> RankFailed:
    missing = progress.absent(progress.read_progress(folder, range(world)), waiting.rank)
    lines = [_missed(rank, joined) + _state(folder, rank) for rank, joined in sorted(missing.items())]
    # without notes on collectives, those that have no error of their own are the ones to look at
    suspects = sorted(missing) or [rank for rank in range(world) if rank not in failures]
    if not missing:
        lines = [f"rank {rank} has no error of its own" + _state(folder, rank) for rank in suspects]
    if not lines:
        lines = ["all ranks failed in the same way: " + ", ".join(f"rank {rank}" for rank in sorted(failures))]
    message = "\n".join(lines) + f"\nrank {waiting.rank} waited in vain: {waiting.type}: {waiting.message}"
    rank = suspects[0] if suspects else waiting.rank
    fault = RANK_ABSENT.fault(f"{message}\n{_indent(waiting.traceback)}", hint=_log_hint(folder, rank))
    return RankFailed([fault], rank=rank, step=waiting.step)


def _unfinished(folder: Path, world: int, after_s: float) -> RankFailed:
    late = [rank for rank in range(world) if not _path(folder, rank, "done").exists()]
    lines = [f"{len(late)} of {world} ranks had not finished after {after_s:g} s"]
    lines += [f"rank {rank}{_state(folder, rank)}" for rank in late]
    step = progress.read_progress(folder, late)[late[0]].step if late else None
    return RankFailed([RANK_UNFINISHED.fault("\n".join(lines))], rank=late[0] if late else None, step=step)


def _missed(rank: int, joined: progress.Joined) -> str:
    which = f"{joined.operation} number {joined.number} of group {joined.group} {list(joined.ranks)}"
    return f"rank {rank} did not join {which}"


def _state(folder: Path, rank: int) -> str:
    if _path(folder, rank, "done").exists():
        return ": it had already returned"
    stack = _stack(folder, rank)
    return f": it was at\n{_indent(stack)}" if stack else ""


def _stack(folder: Path, rank: int) -> str:
    path = _path(folder, rank, "stack")
    return path.read_text(errors="replace").strip() if path.exists() else ""


def _in_step(step: int | None) -> str:
    return "" if step is None else f" in step {step}"


def _log_hint(folder: Path, rank: int) -> str:
    path = log_path(folder, rank)
    lines = path.read_text(errors="replace").rstrip().splitlines() if path.exists() else []
    if not lines:
        return ""
    return f"rank {rank} had printed to {path}:\n" + _indent("\n".join(lines[-_OUTPUT_LINES:]))


def _indent(text: str) -> str:
    return "\n".join("  | " + line for line in text.rstrip().splitlines())


def _path(folder: Path, rank: int, suffix: str) -> Path:
    return folder / f"rank{rank}.{suffix}"
