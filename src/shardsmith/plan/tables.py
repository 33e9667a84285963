"""Tables: what one input states, before it is read strictly; values laid over it, `section.key=value`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardsmith.errors import Code, Fault
from shardsmith.plan.line import value_of
from shardsmith.plan.plan import Plan
from shardsmith.specs.cluster import ClusterSpec
from shardsmith.specs.job import Data, Optimisation, Run, Workload
from shardsmith.specs.model import ModelSpec
from shardsmith.specs.parse import ALIASES, UNKNOWN_KEY, did_you_mean, field_types, type_at

SECTIONS: dict[str, type[Any]] = {
    "model": ModelSpec,
    "workload": Workload,
    "cluster": ClusterSpec,
    "plan": Plan,
    "data": Data,
    "optimisation": Optimisation,
    "run": Run,
}
PLAN_SECTIONS = ("model", "workload", "cluster", "plan")

NOT_AN_OVERRIDE = Code(
    code="F208",
    title="not a section.key=value override",
    because="a key is known by its table, since several tables have keys of the same name",
)


@dataclass(kw_only=True)
class Tables:
    """The raw tables of one input while they are being put together, and where each key was written."""

    source: str
    folder: Path = Path()
    tables: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    target: Any = None
    """Software that the plan was found for (`target = "NAME"` above all tables)."""
    fill: bool = False
    """Whether a workload that is not stated gets defaults (a plan in one line) or is a fault (a file)."""
    nested: dict[str, Any] = field(default_factory=dict)
    """Values inside tables of tables (`cluster.levels.0.latency_us`), to be laid over what a preset states."""

    def put(self, section: str, key: str, value: Any, origin: str) -> None:
        """State one value, over whatever was there."""
        self.tables[section] = {**self.tables.get(section, {}), key: value}
        self.origins[f"{section}.{key}"] = origin
        self.nested = {k: v for k, v in self.nested.items() if not k.startswith(f"{section}.{key}.")}

    def table(self, section: str) -> Any:
        """What stands under `section`; an empty table where nothing does."""
        return self.tables.get(section, {})

    def sources(self, section: str) -> dict[str, str]:
        """Where each key of `section` was written."""
        return {k.partition(".")[2]: o for k, o in self.origins.items() if k.startswith(section + ".")}

    def inner(self, section: str) -> dict[str, Any]:
        """The nested values of `section` by their keys (`levels.0.latency_us`)."""
        return {k.partition(".")[2]: v for k, v in self.nested.items() if k.startswith(section + ".")}

    def laid(self, section: str, table: Any) -> Any:
        """`table`, which stands under `section`, with its nested values laid over. Raises `Refused` (F101)."""
        for key, value in self.inner(section).items():
            table = _laid(table, tuple(key.split(".")), value, (section,))
        return table

    def override(self, text: str, faults: list[Fault]) -> None:
        """Lay one `section.key=value` over the tables; what is none goes to `faults`.

        A key may lead further in: `cluster.device.memory_gib`, `cluster.levels.0.latency_us` (places count from 0).
        """
        path, equals, value = text.partition("=")
        section, dot, key = path.strip().partition(".")
        if not (equals and dot and all(key.split("."))):
            hint = _placed(path.strip(), value) or "plan.tensor=2"
            faults.append(NOT_AN_OVERRIDE.fault(f"{text!r} is not section.key=value", ("--set", text), hint=hint))
            return
        if section not in SECTIONS:
            message = f"there is no table [{section}]"
            hint = _placed(key, value) or did_you_mean(section, SECTIONS)
            faults.append(UNKNOWN_KEY.fault(message, ("--set", text), hint=hint))
            return
        names = {"preset": str, "hf": str, "nodes": int}
        kind = names[key] if key in names else type_at(SECTIONS[section], key.split("."))
        read = value_of(value.strip(), int if kind is None else kind)
        if "." in key:
            self.nested[f"{section}.{key}"] = read
            self.origins[f"{section}.{key}"] = "--set"
        elif isinstance(self.table(section), Mapping):
            self.put(section, key, read, "--set")


def _laid(node: Any, path: tuple[str, ...], value: Any, within: tuple[str, ...]) -> Any:
    """`node` with `value` at `path`; `within` are the keys that lead to `node`, its section first."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    here, said = ".".join(within[1:]), ("--set", ".".join((*within, *path)))
    if isinstance(node, Mapping):
        inner = node.get(step)
        return {**node, step: _laid({} if inner is None else inner, rest, value, (*within, step))}
    if not isinstance(node, (list, tuple)):
        message = f"[{within[0]}] has no key {'.'.join((*within[1:], *path))}: {here} is one value"
        raise UNKNOWN_KEY.refuse(message, said, hint=f"{within[0]}.{here}=...")
    if not step.isdigit() or int(step) >= len(node):
        names = [f"{here}.{at}{_named(one)}" for at, one in enumerate(node)]
        message = f"[{within[0]}] has no {here}.{step}"
        hint = "one of " + ", ".join(names) if names else f"{here} is empty here: a file can state it"
        raise UNKNOWN_KEY.refuse(message, said, hint=hint)
    at = int(step)
    return [*node[:at], _laid(node[at], rest, value, (*within, step)), *node[at + 1 :]]


def _named(one: Any) -> str:
    return f" ({one['name']})" if isinstance(one, Mapping) and "name" in one else ""


def _placed(key: str, value: str) -> str:
    """A hint that names the tables with a `key` of that name, or of the one it stands for; empty without any."""
    key = ALIASES.get(key, key)
    # a table of the run before one of the model, which is seldom changed
    places = [name for name in reversed(SECTIONS) if key in field_types(SECTIONS[name])]
    return "did you mean " + " or ".join(f"{name}.{key}={value}" for name in places) + "?" if places else ""
