"""What the settings of a run contradict, apart from its plan."""

from __future__ import annotations

import os
from pathlib import Path

from shardsmith.errors import Code, Fault
from shardsmith.specs.job import Run

BELOW_ZERO = Code(
    code="F510",
    title="a number of steps or checkpoints below 0",
    because="they are counts; 0 means never for save_every and all for keep",
)
NOTHING_TO_RESET = Code(
    code="F511",
    title="reset without resume",
    because="reset names what is not taken from a checkpoint, and none is read",
)


TWO_BEGINNINGS = Code(
    code="F513",
    title="a run that would begin in two ways",
    because="a run goes on from a checkpoint or begins with weights, and what its folder holds is for it to write",
)


NO_FOLDER = Code(
    code="F514",
    title="a run without a folder",
    because="checkpoints, metrics and weights of a run lie in a folder of its own, not among other files",
)


def run_faults(run: Run, source: str = "job") -> list[Fault]:
    """What is wrong with `run`."""
    faults = []
    for key in ("save_every", "keep"):
        value = getattr(run, key)
        if value < 0:
            faults.append(
                BELOW_ZERO.fault(f"{key} = {value} is below 0", (source, f"{key} = {value}"), hint=f"{key} = 0")
            )
    if run.reset and run.resume == "never":
        said = ((source, f"reset = {list(run.reset)}"), (source, 'resume = "never"'))
        faults.append(
            NOTHING_TO_RESET.fault("reset does nothing where nothing is resumed", *said, hint="leave reset out")
        )
    if run.init and run.resume not in ("auto", "never"):
        said = ((source, f'init = "{run.init}"'), (source, f'resume = "{run.resume}"'))
        hint = "init for the weights alone, resume to go on with step, optimiser and data"
        faults.append(TWO_BEGINNINGS.fault("init and resume both say what the run begins with", *said, hint=hint))
    if not run.folder.strip():
        hint = 'run.folder = "runs/first"'
        faults.append(NO_FOLDER.fault("run.folder is empty", (source, f'folder = "{run.folder}"'), hint=hint))
    elif (why := _unusable(Path(run.folder))) is not None:
        hint = "a folder that is there, or one that can be made"
        faults.append(NO_FOLDER.fault(why, (source, f'folder = "{run.folder}"'), hint=hint))
    if run.init and os.path.realpath(run.init) == os.path.realpath(run.folder):
        said = ((source, f'init = "{run.init}"'), (source, f'folder = "{run.folder}"'))
        hint = "another run.folder; or leave init out, to go on from the newest checkpoint there"
        faults.append(TWO_BEGINNINGS.fault("the run would overwrite the weights that it begins with", *said, hint=hint))
    return faults


def _unusable(folder: Path) -> str | None:
    """Why nothing can be written into `folder`, which is made where it is not there."""
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        return f"{place} is in the way: it is not a folder"
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} may not be written"
