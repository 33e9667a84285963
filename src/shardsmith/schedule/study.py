"""Study: what a schedule costs, played with given action times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from shardsmith.errors import Fault, Refused, raise_errors
from shardsmith.schedule.closed_form import ClosedForm
from shardsmith.schedule.grid import Drawing, draw, whole
from shardsmith.schedule.grid_file import GridFile
from shardsmith.schedule.ir import Kind, Order
from shardsmith.schedule.orders import load
from shardsmith.schedule.play import Live, Played, peak_live, play, weight_versions
from shardsmith.schedule.rules import TIMES, TOO_MANY, UNSTATED

T = TypeVar("T")

MOST_PLACES = 1_000_000
"""Ranks x actions in a row (idle places included) that are still played: some seconds of work."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Lengths of F, I and W of one microbatch through all stages of a rank, in any unit; B is I + W."""

    F: Fraction = Fraction(1)
    I: Fraction = Fraction(1)
    W: Fraction = Fraction(1)

    def per_stage(self, stages_per_rank: Fraction) -> dict[Kind, Fraction]:
        """Lengths of one action of one stage, where a rank holds `stages_per_rank` equal stages."""
        whole_rank = {Kind.F: self.F, Kind.B: self.I + self.W, Kind.I: self.I, Kind.W: self.W}
        return {kind: length / stages_per_rank for kind, length in whole_rank.items()}


def parse_times(text: str, source: str = "asked") -> Times:
    """Times from text such as `F=1,I=1,W=1` or `F=1,B=2` (B is split evenly); what is left out is 1.

    Raises `Refused` (S004) with everything that is wrong.
    """
    faults: list[Fault] = []
    found: dict[str, Fraction] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in ("F", "B", "I", "W") or key in found:
            reason = "stated twice" if key in found else "not one of F, B, I, W"
            faults.append(TIMES.fault(f"{key!r} is {reason}", (source, text), hint="F=1,I=1,W=1 or F=1,B=2"))
            continue
        try:
            found[key] = Fraction(value)
        except (ValueError, ZeroDivisionError):
            faults.append(TIMES.fault(f"{key} = {value!r} is not a number", (source, text), hint=f"{key}=1"))
            continue
        if not Fraction(1, 10**9) <= found[key] <= 10**9:
            message = f"{key} = {value} is not a length between 1e-9 and 1e9"
            faults.append(TIMES.fault(message, (source, text), hint=f"{key}=1"))
    if "B" in found and found.keys() & {"I", "W"}:
        faults.append(TIMES.fault("B is I + W: state B, or its halves", (source, text), hint="F=1,I=1,W=1 or F=1,B=2"))
    raise_errors(faults)
    half = found["B"] / 2 if "B" in found else Fraction(1)
    return Times(F=found.get("F", Fraction(1)), I=found.get("I", half), W=found.get("W", half))


@dataclass(frozen=True, kw_only=True)
class Study:
    """A legal order with the times at which its actions run; `played` counts in multiples of `unit`.

    `times` is None where the actions stand as a file draws them, each cell one slot of length 1.
    `first` is the number that the grid gives to microbatch 0 (a file may count from 1).
    """

    order: Order
    played: Played
    unit: Fraction
    times: Times | None
    closed_form: ClosedForm | None
    first: int = 0

    @property
    def step_time(self) -> Fraction:
        """From the first start to the last end, in the unit of the times."""
        return Fraction(self.played.step_time) * self.unit

    @property
    def bubble_of_step(self) -> float:
        """Idle share of ranks x step time, 0 to 1."""
        return float(1 - Fraction(self.played.busy) / Fraction(self.played.step_time * self.order.pipeline))

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over computing time: how much longer the step is than without any wait."""
        return float(Fraction(self.played.step_time * self.order.pipeline) / Fraction(self.played.busy) - 1)

    @property
    def peak_live(self) -> tuple[Live, ...]:
        """Per rank, the most (stage, microbatch) pairs held: whole activations, and deferred weight gradients."""
        return peak_live(self.order)

    def drawing(self) -> Drawing:
        """The grid."""
        return draw(self.order, self.played, self.unit, self.first)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; `grid` is text in the format of grid files."""
        drawing = self.drawing()
        return {
            "schedule": self.order.name,
            "pipeline": self.order.pipeline,
            "microbatches": self.order.microbatches,
            "placement": list(self.order.placement),
            "step_time": float(self.step_time),
            "bubble_of_step": self.bubble_of_step,
            "bubble_over_ideal": self.bubble_over_ideal,
            "peak_live": [list(peak) for peak in self.peak_live],
            "asynchronous": self.order.asynchronous,
            "weight_versions": [list(versions) for versions in weight_versions(self.order)],
            "grid": drawing.text(),
            "column_time": None if drawing.column is None else float(drawing.column),
            "closed_form": self.closed_form and self.closed_form.as_json(),
        }


def study(
    name: str,
    *,
    pipeline: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    times: str | None = None,
    source: str = "asked",
) -> Study:
    """Build schedule `name` and play it with `times` (default F=1,I=1,W=1), communication being free.

    A grid file (`file:PATH`) brings its own sizes, and its own slots where no times are given. Raises
    `Refused` with everything that is wrong with the request, or with the file.
    """
    faults: list[Fault] = []
    lengths = _gather(faults, lambda: parse_times(times or "F=1,I=1,W=1", source))
    schedule = _gather(faults, lambda: load(name))
    grid = schedule.grid if isinstance(schedule, GridFile) else None
    pipeline = grid.order.pipeline if grid and pipeline is None else pipeline
    microbatches = grid.order.microbatches if grid and microbatches is None else microbatches
    if schedule is not None and (pipeline is None or microbatches is None):
        missing = [key for key, value in (("pipeline", pipeline), ("microbatches", microbatches)) if value is None]
        hint = " ".join(f"--{key} 4" for key in missing)
        faults.append(UNSTATED.fault(f"{' and '.join(missing)} not stated", (source, f"schedule = {name}"), hint=hint))
    if schedule is None or pipeline is None or microbatches is None:
        raise Refused(faults)
    stages = schedule.DEFAULT_STAGES_PER_RANK if stages_per_rank is None else stages_per_rank
    sizes = {"pipeline": pipeline, "microbatches": microbatches, "stages_per_rank": stages}
    faults += schedule.faults(**sizes, source=source) or _size_fault(sizes, source)
    raise_errors(faults)
    assert lengths is not None, "bad times have been refused"
    if grid and times is None:
        return Study(
            order=grid.order, played=grid.drawn, unit=Fraction(1), times=None, closed_form=None, first=grid.first
        )
    order = schedule.order(**sizes)
    used = {action.kind for actions in order.ranks for action in actions}
    per_stage = lengths.per_stage(Fraction(order.stages, order.pipeline))
    slots, unit = whole({kind: length for kind, length in per_stage.items() if kind in used})
    return Study(
        order=order,
        played=play(order, slots),
        unit=unit,
        times=lengths,
        closed_form=schedule.closed_form(**sizes, F=lengths.F, I=lengths.I, W=lengths.W),
        first=grid.first if grid else 0,
    )


def _gather(faults: list[Fault], read: Callable[[], T]) -> T | None:
    """What `read` returns; where it refuses, None, and its faults join `faults`."""
    try:
        return read()
    except Refused as refused:
        faults += refused.faults
        return None


def _size_fault(sizes: dict[str, int], source: str) -> list[Fault]:
    places = 2 * sizes["pipeline"] * sizes["stages_per_rank"] * (sizes["microbatches"] + sizes["pipeline"])
    if places <= MOST_PLACES:
        return []
    counts = ", ".join(f"{key} = {value}" for key, value in sizes.items())
    message = f"{places:,} places for actions are more than {MOST_PLACES:,}"
    return [TOO_MANY.fault(message, (source, counts), hint="fewer microbatches or ranks")]
