"""Setup and Job: everything that is known before a plan is judged or a training run starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardsmith.plan.plan import Plan
from shardsmith.specs.cluster import ClusterSpec
from shardsmith.specs.job import Data, Optimisation, Run, Workload
from shardsmith.specs.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One model, one workload, one cluster and the plan that joins them.

    `target` names the software that the plan was found for, where that is not the usual one: prices follow it.
    `source` names where the plan was written (a file, or `--plan`); `origins` names the origin of
    single values (`"plan.tensor": "--set"`), where it is another one than `source`.
    """

    model: ModelSpec
    workload: Workload
    cluster: ClusterSpec
    plan: Plan
    target: str | None = None
    source: str = field(default="plan", compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def origin(self, key: str) -> str:
        """Where the value of `key`, such as `plan.tensor` or `model.heads`, was written."""
        section, _, name = key.partition(".")
        if key in self.origins:
            return self.origins[key]
        if section in ("model", "cluster"):
            return str(getattr(self, section).name)
        return "default" if section == "plan" and name not in self.plan.stated() else self.source

    def said(self, *keys: str) -> tuple[tuple[str, str], ...]:
        """For the values of a fault: where each key was written, and `tensor = 8`."""
        pairs = (key.partition(".")[::2] for key in keys)
        return tuple((self.origin(f"{s}.{k}"), f"{k} = {shown(getattr(getattr(self, s), k))}") for s, k in pairs)

    def with_plan(self, **changes: Any) -> Setup:
        """A copy whose plan has `changes` applied."""
        return replace(self, plan=self.plan.with_(**changes))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run: what is trained and how it is split (`setup`), on which data, with which optimiser."""

    setup: Setup
    data: Data = field(default_factory=Data)
    optimisation: Optimisation = field(default_factory=Optimisation)
    run: Run = field(default_factory=Run)


def shown(value: Any) -> str:
    """`value` as TOML writes it; a value that is not stated reads `not stated`."""
    return "not stated" if value is None else json.dumps(value)
