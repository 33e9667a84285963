"""What a run reports: a line of metrics a step, as JSON lines and for TensorBoard, written by rank 0."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimiser step: `loss` is the mean over all valid tokens of the step, `grad_norm` global and unclipped.

    `tokens` counts valid targets over all data ranks, `tokens_per_s` those of the whole world; `mfu` is
    None where the peak of the device is not known. `eval_loss` is the mean over the targets held out, None in
    steps without evaluation. `skipped` steps left the parameters alone; their loss or norm was not finite.

    With experts, else None: `aux_loss` and `z_loss` are means over layers and sequences before their coefficients,
    no part of `loss`; the first is 1 where loads are even. `expert_load_max` is the load of the fullest expert of any
    layer as a multiple of the mean, `expert_load_min` that of the emptiest; `dropped` the share of choices for which
    an expert had no room.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    mfu: float | None
    step_time_s: float
    lr: float
    eval_loss: float | None = None
    skipped: bool = False
    aux_loss: float | None = None
    z_loss: float | None = None
    expert_load_max: float | None = None
    expert_load_min: float | None = None
    dropped: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; what is not a finite number, which JSON cannot say, is None."""
        values = asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


class MetricsWriter:
    """Writes `metrics.jsonl` (flushed a line at a time) and, if asked, TensorBoard event files in `folder`.

    Of an earlier run in `folder`, the steps before `first` stay and later ones go: a run that resumes there
    computes them again.
    """

    def __init__(self, folder: Path, *, tensorboard: bool, first: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        kept = _lines_before(folder / "metrics.jsonl", first)
        self._lines: IO[str] = (folder / "metrics.jsonl").open("w", encoding="utf-8")
        self._lines.writelines(kept)
        self._lines.flush()
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first or None)

    def write(self, metrics: StepMetrics) -> None:
        """Append one step."""
        values = metrics.as_json()
        self._lines.write(json.dumps(values) + "\n")
        self._lines.flush()
        if self._board is not None:
            for name, value in values.items():
                if name not in ("step", "skipped") and value is not None:
                    self._board.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        """Finish both files."""
        self._lines.close()
        if self._board is not None:
            self._board.close()


def _lines_before(path: Path, step: int) -> list[str]:
    """The whole lines of an earlier run that belong to steps before `step`."""
    if step == 0 or not path.exists():
        return []
    whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("}\n")]
    return [line for line in whole if json.loads(line)["step"] < step]
