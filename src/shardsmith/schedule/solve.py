"""A schedule made to measure: for given costs of every stage and a memory cap, by constraint programming.

Named schedules assume equal stages. Where stages differ (a large head, layers that do not divide), the best order
is another one; it is found here as a job-shop problem: every action is an interval, a rank performs one at a time,
an action follows what it needs, and two reservoirs hold what a rank keeps: microbatches between F and I, and between
I and W. The solver (CP-SAT of OR-tools) starts from the best named schedule that fits, so the result is never worse,
and reports a bound below which no order can go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Any

from shardsmith.errors import Code, Fault, Refused, raise_errors
from shardsmith.schedule.ir import Action, Kind, Order, needs
from shardsmith.schedule.orders import load, names
from shardsmith.schedule.play import Played, peak_live, play
from shardsmith.schedule.rules import size_faults
from shardsmith.schedule.study import Study
from shardsmith.units import counted

COSTS = Code(
    code="S030",
    title="unusable stage times",
    because="a schedule is made for one positive time a stage, in any unit, and every rank holds the same number",
)
CAP = Code(
    code="S031",
    title="a memory cap that no order can keep",
    because="a rank must hold at least one microbatch of one of its stages between F and I, and one between I and W",
)
NO_SOLVER = Code(
    code="S032",
    title="no solver installed",
    because="a schedule is made by a constraint solver, which the core does without",
)
TOO_LARGE = Code(
    code="S033",
    title="too many actions for a solver",
    because="the search grows with the square of a rank's actions, and a larger step repeats a small one's pattern",
)

MOST_ACTIONS = 600
FINEST = 1000
"""Slots into which the longest stage's pass is cut at most: times are rounded to whole slots."""


@dataclass(frozen=True, kw_only=True)
class Solved:
    """An order with the whole slots in which its actions run, each `unit` long.

    `bound` is a step time, in slots, that no order under the same cap can beat; `proven` says that this one reaches
    it. `named` is the best named schedule under the cap and `named_slots` its step time, None where none fits.
    """

    order: Order
    played: Played
    unit: Fraction
    bound: int
    named: str | None
    named_slots: int | None

    @property
    def proven(self) -> bool:
        """Whether no order is shorter."""
        return self.played.step_time <= self.bound

    @property
    def study(self) -> Study:
        """The order as `schedule` shows it: grid, bubble, peaks."""
        return Study(order=self.order, played=self.played, unit=self.unit, times=None, closed_form=None)

    def as_json(self) -> dict[str, Any]:
        """What the study says, and how good the order is; times in the unit of the stage times."""
        named = None if self.named_slots is None else float(self.named_slots * self.unit)
        return self.study.as_json() | {
            "bound": float(self.bound * self.unit),
            "proven": self.proven,
            "best_named": self.named,
            "best_named_step_time": named,
        }


def solve(
    stage_times: Sequence[Fraction],
    *,
    pipeline: int,
    microbatches: int,
    shares: tuple[Fraction, Fraction, Fraction] = (Fraction(1), Fraction(1), Fraction(1)),
    live: int | None = None,
    deferred: int | None = None,
    effort: float = 20.0,
    source: str = "asked",
) -> Solved:
    """The shortest order found for `stage_times` x `shares` (F, I, W), stages placed in a loop over the ranks.

    `live` caps the (stage, microbatch) pairs that a rank holds between F and I (default: what 1F1B holds, P times its
    stages), `deferred` those between I and W (default: the same). `effort` is the solver's deterministic time, about
    seconds: the same request gives the same order on every machine. Raises `Refused` (S002, S030 to S033).
    """
    raise_errors(_faults(stage_times, pipeline, microbatches, live, deferred, source))
    stages = len(stage_times)
    placement = tuple(stage % pipeline for stage in range(stages))
    live = stages if live is None else live
    deferred = live if deferred is None else deferred
    lengths, unit = _slots(stage_times, shares)
    start = _best_named(placement, microbatches, lengths, live, deferred)
    order, played, bound = _search(placement, microbatches, lengths, live, deferred, effort, start)
    named, slots = (None, None) if start is None else (start[0].name, int(start[1].step_time))
    return Solved(order=order, played=played, unit=unit, bound=bound, named=named, named_slots=slots)


def parse_stage_times(text: str, source: str = "asked") -> tuple[Fraction, ...]:
    """Stage times from text such as `1,1,1,1.5`; raises `Refused` (S030) where one is no number."""
    try:
        return tuple(Fraction(part.strip()) for part in text.split(","))
    except (ValueError, ZeroDivisionError):
        raise COSTS.refuse(f"{text!r} is not a list of numbers", (source, text), hint="1,1,1,1.5") from None


def _faults(
    times: Sequence[Fraction], pipeline: int, microbatches: int, live: int | None, deferred: int | None, source: str
) -> list[Fault]:
    faults = size_faults(pipeline=pipeline, microbatches=microbatches, source=source)
    if faults:
        return faults
    said = (source, f"stage times = {', '.join(f'{float(t):g}' for t in times)}")
    if not times or len(times) % pipeline:
        message = f"{counted(len(times), 'stage time')} for {counted(pipeline, 'rank')}"
        faults.append(COSTS.fault(message, said, (source, f"pipeline = {pipeline}"), hint=f"{pipeline} times"))
    if any(t <= 0 for t in times):
        faults.append(COSTS.fault("a stage time is not above 0", said, hint="leave the stage out"))
    for key, cap in (("live", live), ("deferred", deferred)):
        if cap is not None and cap < 1:
            faults.append(CAP.fault(f"{key} = {cap}", (source, f"{key} = {cap}"), hint=f"{key} = {max(len(times), 1)}"))
    actions = 3 * len(times) * microbatches
    if actions > MOST_ACTIONS:
        message = f"3 x {len(times)} stages x {microbatches} microbatches = {actions} actions, more than {MOST_ACTIONS}"
        hint = f"microbatches = {max(MOST_ACTIONS // (3 * max(len(times), 1)), 1)}"
        faults.append(TOO_LARGE.fault(message, (source, f"microbatches = {microbatches}"), hint=hint))
    return faults


def _slots(
    times: Sequence[Fraction], shares: tuple[Fraction, Fraction, Fraction]
) -> tuple[list[dict[Kind, int]], Fraction]:
    """Whole lengths of F, I, W and B of every stage, and the slot that they count."""
    exact = [[time * share for share in shares] for time in times]
    common = lcm(*(length.denominator for row in exact for length in row))
    counts = [[int(length * common) for length in row] for row in exact]
    measure = gcd(*(count for row in counts for count in row))
    unit = Fraction(measure, common)
    longest = max(max(row) for row in exact)
    if longest / unit > FINEST:
        unit = longest / FINEST
    found = [[max(1, round(length / unit)) for length in row] for row in exact]
    return [{Kind.F: f, Kind.I: i, Kind.W: w, Kind.B: i + w} for f, i, w in found], unit


def _best_named(
    placement: tuple[int, ...], microbatches: int, lengths: list[dict[Kind, int]], live: int, deferred: int
) -> tuple[Order, Played] | None:
    """The named schedule of this placement that is shortest under the cap, played with the lengths of each stage."""
    pipeline, found = max(placement) + 1, []
    each = len(placement) // pipeline
    for name in names():
        schedule = load(name)
        sizes = {"pipeline": pipeline, "microbatches": microbatches, "stages_per_rank": each}
        if (
            schedule.faults(**sizes, source="")
            or schedule.placement(pipeline=pipeline, stages_per_rank=each) != placement
        ):
            continue
        order = schedule.order(**sizes)
        peaks = peak_live(order)
        if order.asynchronous or max(p.activations for p in peaks) > live or max(p.deferred for p in peaks) > deferred:
            continue
        found.append((order, play(order, lambda a: lengths[a.stage][a.kind])))
    return min(found, key=lambda one: one[1].step_time, default=None)


def _search(
    placement: tuple[int, ...],
    microbatches: int,
    lengths: list[dict[Kind, int]],
    live: int,
    deferred: int,
    effort: float,
    start: tuple[Order, Played] | None,
) -> tuple[Order, Played, int]:
    model_of, solver_of, status_names = _solver()
    model = model_of()
    stages, kinds = len(placement), (Kind.F, Kind.I, Kind.W)
    actions = [Action(kind, s, m) for s in range(stages) for m in range(microbatches) for kind in kinds]
    horizon = sum(lengths[a.stage][a.kind] for a in actions)
    horizon = horizon if start is None else int(start[1].step_time)
    begins = {a: model.new_int_var(0, horizon, str(a)) for a in actions}
    ends = {a: begins[a] + lengths[a.stage][a.kind] for a in actions}
    length = model.new_int_var(0, horizon, "step")
    for action in actions:
        model.add(ends[action] <= length)
        for one_of in needs(action, stages):
            # Every backward is split here, so of two alternatives only I exists.
            model.add(ends[next(a for a in one_of if a in ends)] <= begins[action])
        if action.microbatch:  # microbatches are alike: let them go in their own order
            model.add(begins[action._replace(microbatch=action.microbatch - 1)] < begins[action])
    for rank in range(max(placement) + 1):
        mine = [a for a in actions if placement[a.stage] == rank]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(begins[a], lengths[a.stage][a.kind], f"{a} runs") for a in mine]
        )
        for first, last, cap in ((Kind.F, Kind.I, live), (Kind.I, Kind.W, deferred)):
            taken = [begins[a] if first is Kind.F else ends[a] for a in mine if a.kind is first]
            freed = [ends[a] for a in mine if a.kind is last]
            model.add_reservoir_constraint(taken + freed, [1] * len(taken) + [-1] * len(freed), 0, cap)
    model.minimize(length)
    if start is not None:
        for action, time in start[1].start.items():
            if action.kind is Kind.B:
                model.add_hint(begins[action._replace(kind=Kind.I)], int(time))
                after = int(time) + lengths[action.stage][Kind.I]
                model.add_hint(begins[action._replace(kind=Kind.W)], after)
            else:
                model.add_hint(begins[action], int(time))
    solver = solver_of()
    solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    if status not in status_names:
        message = f"nothing found with live = {live}, deferred = {deferred} within an effort of {effort:g}"
        raise Refused([CAP.fault(message, ("asked", f"live = {live}"), hint=f"live = {stages}, or more effort")])
    at = {a: int(solver.value(begin)) for a, begin in begins.items()}
    ranks = tuple(
        tuple(sorted((a for a in actions if placement[a.stage] == rank), key=lambda a: (at[a], a.kind is not Kind.W)))
        for rank in range(max(placement) + 1)
    )
    order = Order(name="solved", microbatches=microbatches, placement=placement, ranks=ranks)
    return order, play(order, lambda a: lengths[a.stage][a.kind]), int(-(-solver.best_objective_bound // 1))


def _solver() -> tuple[Any, Any, tuple[Any, ...]]:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise NO_SOLVER.refuse(
            "ortools is not installed", ("import", "ortools"), hint="pip install 'shardsmith[solve]'"
        ) from None
    return cp_model.CpModel, cp_model.CpSolver, (cp_model.OPTIMAL, cp_model.FEASIBLE)
