"""plan.toml and job.toml: reading (strictly, all faults at once), overrides, and writing.

A plan file has the tables `[model] [workload] [cluster] [plan]`, a job file also `[data] [optimisation]
[run]`. `[model]` is a preset (`preset = "llama3-8b"`) or a Hugging Face config (`hf = "folder"`, relative
to the file), either with keys of ModelSpec laid over it, or all keys of ModelSpec. `[cluster]` is a preset
with overrides, or all keys of ClusterSpec; left out, it is `local`. A job may name its plan file,
`plan = "plan.toml"`, instead of having the tables itself. All other paths are left as they are written.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tomli_w

from shardsmith.errors import Code, Fault, Refused, raise_errors
from shardsmith.plan.batch import Batching as Batching
from shardsmith.plan.batch import batching as batching
from shardsmith.plan.line import parse_plan_line as parse_plan_line
from shardsmith.plan.line import plan_table, value_of
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Job as Job
from shardsmith.plan.setup import Setup as Setup
from shardsmith.plan.setup import shown
from shardsmith.plan.stages import settled
from shardsmith.specs.cluster import ClusterSpec, cluster_faults
from shardsmith.specs.hf_config import from_hf_config
from shardsmith.specs.job import Data, Optimisation, Run, Workload
from shardsmith.specs.job_rules import job_faults
from shardsmith.specs.library import cluster_named, model_named
from shardsmith.specs.model import ModelSpec
from shardsmith.specs.model_rules import model_faults
from shardsmith.specs.parse import ALIASES, NOT_TOML, UNKNOWN_KEY, WRONG_VALUE, did_you_mean, parse_table, read_toml

T = TypeVar("T")

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

ONE_INPUT = Code(
    code="F203",
    title="either a plan file or a plan in one line",
    because="two plans would contradict each other, and without any there is nothing to look at",
)
NO_SECTION = Code(
    code="F204", title="missing table", because="model and workload have no default that would be right for everyone"
)
NOT_AN_OVERRIDE = Code(
    code="F208",
    title="not a section.key=value override",
    because="a key is known by its table, since several tables have keys of the same name",
)
CIRCLE = Code(
    code="F209",
    title="a plan file that leads back to itself",
    because="a file takes the plan of the file that it names, and a circle of names has none",
)
TWO_SOURCES = Code(
    code="F205", title="one thing stated in two places", because="one of the two would silently be ignored"
)

DEFAULT_MODEL = "tiny-llama"
DEFAULT_SEQ_LEN = 128
"""Tokens of a sequence for a plan in one line that does not say (less where the model's context is shorter)."""


@dataclass(kw_only=True)
class Tables:
    """The raw tables of one input while they are being put together, and where each key was written."""

    source: str
    folder: Path = Path()
    tables: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    fill: bool = False
    """Whether a workload that is not stated gets defaults (a plan in one line) or is a fault (a file)."""

    def put(self, section: str, key: str, value: Any, origin: str) -> None:
        """State one value, over whatever was there."""
        self.tables[section] = {**self.tables.get(section, {}), key: value}
        self.origins[f"{section}.{key}"] = origin

    def table(self, section: str) -> Any:
        """What stands under `section`; an empty table where nothing does."""
        return self.tables.get(section, {})

    def sources(self, section: str) -> dict[str, str]:
        """Where each key of `section` was written."""
        return {k.partition(".")[2]: o for k, o in self.origins.items() if k.startswith(section + ".")}


def read_setup(path: str | Path) -> Setup:
    """The setup of a plan or job file; raises `Refused` with all faults of the file at once."""
    return read_job(path).setup


def read_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """The job of a file, with `section.key=value` overrides laid over it; a plan file is a job of defaults.

    Raises `Refused` with all faults of files and overrides at once.
    """
    faults: list[Fault] = []
    tables = file_tables(path, faults)
    for text in overrides:
        _override(tables, text, faults)
    return job_of(tables, faults)


def loads(text: str, source: str = "text") -> Job:
    """The job that TOML `text` states: the inverse of `dumps`. Raises `Refused` with all faults at once."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NOT_TOML.refuse(f"{source} cannot be read as TOML: {error}") from error
    faults: list[Fault] = []
    return job_of(_tables_of(data, source, Path(), faults), faults)


def dumps(what: Setup | Job) -> str:
    """All that a setup or job says, as TOML that `loads` and `read_job` read back to an equal one."""
    setup = what.setup if isinstance(what, Job) else what
    parts: dict[str, Any] = {section: getattr(setup, section) for section in PLAN_SECTIONS}
    if isinstance(what, Job):
        parts |= {"data": what.data, "optimisation": what.optimisation, "run": what.run}
    return tomli_w.dumps({section: _without_none(asdict(part)) for section, part in parts.items()})


def make_setup(
    file: str | Path | None = None,
    *,
    plan: str | None = None,
    model: str | None = None,
    cluster: str | None = None,
    nodes: int | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    dtype: str | None = None,
    overrides: Sequence[str] = (),
) -> Setup:
    """The setup that a plan file, or a `plan` in one line, and the options of the command line state.

    Options go over what a file says, and `overrides` such as `plan.tensor=2` over both. Without a file the model is
    `tiny-llama`, the cluster `local`, a sequence `DEFAULT_SEQ_LEN` tokens, a microbatch one sequence and a step
    2 x pipeline microbatches.
    Raises `Refused` with all faults at once; F203 where file and `plan` are both given, or neither.
    """
    if (file is None) == (plan is None):
        given = () if file is None else (("file", str(file)), ("--plan", str(plan)))
        raise ONE_INPUT.refuse("give one plan", *given, hint="a plan.toml, or --plan tensor=2,pipeline=2")
    faults: list[Fault] = []
    if plan is not None:
        tables = Tables(source="--plan", fill=True)
        for key, value in plan_table(plan, "--plan", faults).items():
            tables.put("plan", key, value, "--plan")
    else:
        assert file is not None, "one of the two was given"
        tables = file_tables(file, faults)
    for section, name in (("model", model or (DEFAULT_MODEL if plan is not None else None)), ("cluster", cluster)):
        if name is not None:
            tables.tables[section] = {}
            tables.put(section, "preset", name, f"--{section}")
    options = {"cluster.nodes": nodes, "workload.seq_len": seq_len}
    options |= {"workload.global_batch": global_batch, "workload.dtype": dtype}  # type: ignore[dict-item]
    for option, value in options.items():
        if value is not None:
            section, _, key = option.partition(".")
            tables.put(section, key, value, "--" + key.replace("_", "-"))
    for text in overrides:
        _override(tables, text, faults)
    return job_of(tables, faults).setup


def file_tables(path: str | Path, faults: list[Fault], within: tuple[Path, ...] = ()) -> Tables:
    """The tables of a file, those of the plan file that it names included; `within` are the files that led here."""
    real = Path(os.path.realpath(path))  # unlike Path.resolve, no error where links run in a circle
    if real in within:
        chain = " -> ".join(str(file) for file in (*within, path))
        raise CIRCLE.refuse(f"{path} names itself as its plan", ("files", chain), hint="a [plan] table of its own")
    data = read_toml(path)
    tables = _tables_of(data, str(path), Path(path).parent, faults)
    named = tables.tables.get("plan")
    if not isinstance(named, str):
        return tables
    del tables.tables["plan"]
    inner = file_tables(tables.folder / named, faults, (*within, real))
    for section in tables.tables.keys() & inner.tables.keys():
        message = f"[{section}] stands in {path} and in the plan file that it names"
        values = ((str(path), f"[{section}]"), (inner.source, f"[{section}]"))
        faults.append(TWO_SOURCES.fault(message, *values, hint=f"keep one [{section}]"))
    tables.tables |= inner.tables
    tables.origins |= inner.origins
    # A relative `hf` belongs to the file that has it.
    tables.folder = inner.folder if "model" in inner.tables else tables.folder
    return tables


def _tables_of(data: Mapping[str, Any], source: str, folder: Path, faults: list[Fault]) -> Tables:
    tables = Tables(source=source, folder=folder)
    for section, table in data.items():
        if section not in SECTIONS:
            message, value = f"{source} has no table [{section}]", (source, f"[{section}]")
            faults.append(UNKNOWN_KEY.fault(message, value, hint=did_you_mean(section, SECTIONS)))
            continue
        tables.tables[section] = table
        if isinstance(table, Mapping):
            tables.origins |= {f"{section}.{key}": source for key in table}
    return tables


def _override(tables: Tables, text: str, faults: list[Fault]) -> None:
    """Lay one `section.key=value` over `tables`."""
    path, equals, value = text.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and key):
        hint = _placed(path.strip(), value) or "plan.tensor=2"
        faults.append(NOT_AN_OVERRIDE.fault(f"{text!r} is not section.key=value", ("--set", text), hint=hint))
        return
    if section not in SECTIONS:
        message = f"there is no table [{section}]"
        hint = _placed(key, value) or did_you_mean(section, SECTIONS)
        faults.append(UNKNOWN_KEY.fault(message, ("--set", text), hint=hint))
        return
    hints = {"preset": str, "hf": str, "nodes": int} | get_type_hints(SECTIONS[section])
    if isinstance(tables.table(section), Mapping):
        tables.put(section, key, value_of(value.strip(), hints.get(key, int)), "--set")


def _placed(key: str, value: str) -> str:
    """A hint that names the tables with a `key` of that name, or of the one it stands for; empty without any."""
    key = ALIASES.get(key, key)
    # a table of the run before one of the model, which is seldom changed
    places = [name for name in reversed(SECTIONS) if key in get_type_hints(SECTIONS[name])]
    return "did you mean " + " or ".join(f"{name}.{key}={value}" for name in places) + "?" if places else ""


def job_of(tables: Tables, faults: Iterable[Fault] = ()) -> Job:
    """The job that `tables` state. Raises `Refused` with `faults` and everything that is wrong in any table."""
    found = list(faults)
    model = _attempt(found, lambda: _model(tables))
    cluster = _attempt(found, lambda: _cluster(tables))
    plan = _attempt(found, lambda: _section(tables, "plan", Plan))
    if tables.fill and model and plan:
        _fill_workload(tables, model, plan)
    # Without model or plan the defaults of a one-line workload are unknown: what is there is still checked.
    skip = tables.fill and not (model and plan)
    workload = None if skip else _attempt(found, lambda: _workload(tables))
    data = _attempt(found, lambda: _section(tables, "data", Data))
    optimisation = _attempt(found, lambda: _section(tables, "optimisation", Optimisation))
    run = _attempt(found, lambda: _section(tables, "run", Run))
    if data and optimisation and run:
        found.extend(job_faults(data, optimisation, run, lambda key: tables.origins.get(key, "default")))
    if found:
        raise Refused(found)
    assert model, "a model that could not be read was reported"
    assert workload, "a workload that could not be read was reported"
    assert cluster, "a cluster that could not be read was reported"
    assert plan, "a plan that could not be read was reported"
    assert data and optimisation and run, "a table that could not be read was reported"  # noqa: PT018
    setup = Setup(
        model=model, workload=workload, cluster=cluster, plan=plan, source=tables.source, origins=dict(tables.origins)
    )
    return Job(setup=settled(setup), data=data, optimisation=optimisation, run=run)


def _attempt(faults: list[Fault], read: Callable[[], T]) -> T | None:
    """What `read` returns, or None with its faults added to `faults`."""
    try:
        return read()
    except Refused as refused:
        faults.extend(refused.faults)
        return None


def _section(tables: Tables, section: str, cls: type[T], table: Any = None) -> T:
    data = tables.table(section) if table is None else table
    return parse_table(cls, data, source=tables.source, section=section, sources=tables.sources(section))


def _workload(tables: Tables) -> Workload:
    if "workload" not in tables.tables:
        raise _missing(tables, "workload", "[workload] with seq_len = 128, global_batch = 8")
    return _section(tables, "workload", Workload)


def _fill_workload(tables: Tables, model: ModelSpec, plan: Plan) -> None:
    stated = tables.table("workload")
    batch = plan.data * (plan.microbatch or 1) * (plan.microbatches or 2 * plan.pipeline)
    for key, value in (("seq_len", min(model.context, DEFAULT_SEQ_LEN)), ("global_batch", batch)):
        if key not in stated:
            tables.put("workload", key, value, "default")


def _model(tables: Tables) -> ModelSpec:
    if "model" not in tables.tables:
        raise _missing(tables, "model", f'[model] with preset = "{DEFAULT_MODEL}"')
    table = tables.table("model")
    if not isinstance(table, Mapping):
        return _section(tables, "model", ModelSpec)
    rest = {k: v for k, v in table.items() if k not in ("preset", "hf")}
    preset, hf = (_text(tables, "model", key) for key in ("preset", "hf"))
    if preset is not None and hf is not None:
        values = [(tables.origins[f"model.{k}"], f"{k} = {shown(table[k])}") for k in ("preset", "hf")]
        raise TWO_SOURCES.refuse("[model] names a preset and a Hugging Face config", *values, hint="keep one")
    base: ModelSpec | None = None
    if preset is not None:
        base = model_named(preset)
    elif hf is not None:
        base = from_hf_config(hf if tables.origins["model.hf"] == "--set" else tables.folder / hf)
    if base is not None and not rest:
        return base
    merged = _without_none(asdict(base)) | rest if base else rest
    model = _section(tables, "model", ModelSpec, merged)
    raise_errors(model_faults(model, tables.source))
    return model


def _cluster(tables: Tables) -> ClusterSpec:
    table = tables.table("cluster")
    if not isinstance(table, Mapping):
        return _section(tables, "cluster", ClusterSpec)
    preset = _text(tables, "cluster", "preset")
    rest = {k: v for k, v in table.items() if k != "preset"}
    if preset is None and not rest.keys() <= {"nodes"}:
        cluster = _section(tables, "cluster", ClusterSpec)
    else:
        base = cluster_named(preset if preset is not None else "local")
        merged = _without_none(asdict(base)) | rest
        cluster = _section(tables, "cluster", ClusterSpec, merged)
    raise_errors(cluster_faults(cluster, tables.sources("cluster").get("nodes", tables.source)))
    return cluster


def _text(tables: Tables, section: str, key: str) -> str | None:
    value = tables.table(section).get(key)
    if value is None or isinstance(value, str):
        return value
    origin, said = tables.origins[f"{section}.{key}"], f"{key} = {shown(value)}"
    raise WRONG_VALUE.refuse(
        f"{said} in [{section}] is not allowed", (origin, said), hint=f"{key} takes text in quotes"
    )


def _missing(tables: Tables, section: str, hint: str) -> Refused:
    return NO_SECTION.refuse(
        f"{tables.source} has no [{section}]", (tables.source, f"no [{section}]"), hint=f"add {hint}"
    )


def _without_none(value: Any) -> Any:
    """`value` without keys of None, which TOML cannot write."""
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, (list, tuple)) else value
