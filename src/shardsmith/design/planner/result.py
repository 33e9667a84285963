"""What a search answers: choices with their figures, rules followed or beaten, and what was looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardsmith.design.cost.estimate import Estimate
from shardsmith.design.targets import software_faults, target_named
from shardsmith.errors import Fault
from shardsmith.layout.capability import capability_faults
from shardsmith.layout.check import length_faults
from shardsmith.plan.setup import Setup
from shardsmith.specs.cluster import link_warnings

Verdict = Literal["followed", "beaten", "does not apply"]
Objective = Literal["fastest", "fewest", "cheapest"]


@dataclass(frozen=True, kw_only=True)
class RuleNote:
    """A rule of thumb beside a plan: whether the plan follows it, and by how much it wins.

    `other` is the best plan that does the opposite (None where none is legal and fits); `ratio` its step time over this
    plan's: above 1, this plan is faster.
    """

    rule: str
    verdict: Verdict
    text: str
    other: str | None = None
    ratio: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The note as plain JSON values."""
        return {
            "rule": self.rule,
            "verdict": self.verdict,
            "text": self.text,
            "other": self.other,
            "ratio": self.ratio,
        }


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """One change to a plan (`axis`: `before` -> `after`) and what becomes of it.

    `beside` names what else moves with it (`data = 1`): laid over the plan together they give `plan`. `ratio` is its
    step time over the plan's, `peak_gib` its fullest rank; where the change is illegal or does not fit, `reason` says
    so and the figures may be None.
    """

    axis: str
    before: str
    after: str
    plan: str
    ratio: float | None = None
    peak_gib: float | None = None
    reason: str = ""
    beside: tuple[str, ...] = ()

    @property
    def becomes(self) -> str:
        """The new value, and all that moves beside it: `8, data = 1`."""
        return ", ".join((self.after, *self.beside))

    def as_json(self) -> dict[str, Any]:
        """The neighbour as plain JSON values, without those it does not have."""
        return {key: value for key, value in vars(self).items() if value not in (None, "", ())}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One plan of the answer: its `setup`, what it costs, what binds, and rules it follows or beats."""

    setup: Setup
    estimate: Estimate
    rules: tuple[RuleNote, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    binds: str = ""

    def as_json(self) -> dict[str, Any]:
        """The choice as plain JSON values; the plan in its one-line form and as a table."""
        e = self.estimate
        return {
            "plan": str(self.setup.plan),
            "nodes": self.setup.cluster.nodes,
            "world": self.setup.plan.world,
            "step_time_s": e.step_time_s,
            "interval_s": list(e.interval_s),
            "tokens_per_s_per_gpu": e.tokens_per_s_per_gpu,
            "tflops_per_gpu": e.tflops_per_gpu,
            "mfu": e.mfu,
            "memory_gib": [rank.as_json() for rank in e.memory],
            "breakdown": dict(e.breakdown),
            "rules": [note.as_json() for note in self.rules],
            "neighbours": [neighbour.as_json() for neighbour in self.neighbours],
            "binds": self.binds,
        }


@dataclass(frozen=True, kw_only=True)
class Nearby:
    """`global_batch` sequences a step instead, with `faster` times as many a second under its best plan."""

    global_batch: int
    faster: float

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"global_batch": self.global_batch, "faster": self.faster}


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The answer of a search: `plans` ranked, best first, and what was looked at.

    `searched` counts legal plans that were weighed by placement: how many bytes each way to shard their states holds
    beside what the first rank keeps, and its least time under any schedule. `priced` are those whose own time and
    memory of every decisive rank were computed. `dismissed` counts legal plans in subspaces that a bound on layers
    ruled out before. `pareto` holds plans that no other beats in time, memory and devices at once: of
    those ranked, or of all on the numbers of nodes asked for. `robust` is the plan whose worst case over the
    prediction intervals is best. `assumptions` says in words what the figures rest on. `nearby` is a batch
    close to this one that would train faster, where one was found.
    """

    objective: Objective
    plans: tuple[Choice, ...]
    pareto: tuple[Choice, ...]
    robust: Choice
    searched: int
    priced: int
    dismissed: int
    seconds: float
    target: str
    assumptions: tuple[str, ...]
    totals: Mapping[str, float]
    nearby: Nearby | None = None

    @property
    def best(self) -> Choice:
        """The first of the plans."""
        return self.plans[0]

    @property
    def warnings(self) -> tuple[Fault, ...]:
        """What is odd about the cluster, what the best plan has that its software has not (X352), a sequence beyond the
        model's context, and what it counts but the engine cannot train yet, as `check` warns of it.
        """
        setup = self.best.setup
        asked = replace(setup, origins={"workload.seq_len": "--seq-len"})
        faults = [*software_faults(setup, target_named(self.target)), *length_faults(asked)]
        odd = link_warnings(setup.cluster, setup.cluster.name)
        return (*odd, *faults, *capability_faults(setup, running=False))

    def as_json(self) -> dict[str, Any]:
        """The answer as plain JSON values, with the keys that the verb promises."""
        return {
            "objective": self.objective,
            "plans": [choice.as_json() for choice in self.plans],
            "pareto": [choice.as_json() for choice in self.pareto],
            "robust": self.robust.as_json(),
            "searched": self.searched,
            "priced": self.priced,
            "dismissed": self.dismissed,
            "seconds": self.seconds,
            "target": self.target,
            "assumptions": list(self.assumptions),
            "totals": dict(self.totals),
            "nearby": self.nearby.as_json() if self.nearby else None,
            "warnings": [fault.as_json() for fault in self.warnings],
        }
