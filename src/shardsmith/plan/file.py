"""plan.toml and job.toml: reading (strictly, all faults at once), overrides, and writing.

A plan file has the tables `[model] [workload] [cluster] [plan]`, a job file also `[data] [optimisation]
[run]`. `[model]` is a preset (`preset = "llama3-8b"`) or a Hugging Face config (`hf = "folder"`, relative
to the file), either with keys of ModelSpec laid over it, or all keys of ModelSpec. `[cluster]` is a preset
with overrides, or all keys of ClusterSpec; left out, it is `local`. A job may name its plan file,
`plan = "plan.toml"`, instead of having the tables itself. Above the tables `target = "NAME"` names the
software that the plan was found for. All other paths are left as they are written.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from shardsmith.errors import Code, Fault, Refused, raise_errors
from shardsmith.plan.batch import Batching as Batching
from shardsmith.plan.batch import batching as batching
from shardsmith.plan.line import parse_plan_line as parse_plan_line
from shardsmith.plan.line import plan_table
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Job as Job
from shardsmith.plan.setup import Setup as Setup
from shardsmith.plan.setup import shown
from shardsmith.plan.stages import settled
from shardsmith.plan.tables import PLAN_SECTIONS, Tables
from shardsmith.plan.tables import SECTIONS as SECTIONS
from shardsmith.specs.cluster import ClusterSpec, cluster_faults
from shardsmith.specs.hf_config import from_hf_config
from shardsmith.specs.job import Data, Optimisation, Run, Workload
from shardsmith.specs.job_rules import job_faults
from shardsmith.specs.library import cluster_named, model_named
from shardsmith.specs.model import ModelSpec
from shardsmith.specs.model_rules import model_faults
from shardsmith.specs.parse import NOT_TOML, UNKNOWN_KEY, WRONG_VALUE, did_you_mean, parse_table, read_toml

T = TypeVar("T")

ONE_INPUT = Code(
    code="F203",
    title="either a plan file or a plan in one line",
    because="two plans would contradict each other, and without any there is nothing to look at",
)
NO_SECTION = Code(
    code="F204", title="missing table", because="model and workload have no default that would be right for everyone"
)
NOT_HERE = Code(
    code="F210",
    title="an override of what is not given",
    because="a search is asked about a model and a cluster; plan and workload have options of their own",
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
        tables.override(text, faults)
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
    above = {} if setup.target is None else {"target": setup.target}
    if isinstance(what, Job):
        parts |= {"data": what.data, "optimisation": what.optimisation, "run": what.run}
    return tomli_w.dumps(above | {section: _without_none(asdict(part)) for section, part in parts.items()})


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
    named = DEFAULT_MODEL if model is None and plan is not None else model
    for section, name in (("model", named), ("cluster", cluster)):
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
        tables.override(text, faults)
    return job_of(tables, faults).setup


def make_specs(
    model: str, cluster: str, *, nodes: int | None = None, overrides: Sequence[str] = ()
) -> tuple[ModelSpec, ClusterSpec]:
    """A model and a cluster by name (preset, TOML file, Hugging Face folder), with `overrides` laid over them.

    Raises `Refused` with all faults at once; F210 for an override of another table.
    """
    faults: list[Fault] = []
    tables = Tables(source="options")
    tables.put("model", "preset", model, "--model")
    tables.put("cluster", "preset", cluster, "--cluster")
    if nodes is not None:
        tables.put("cluster", "nodes", nodes, "--nodes")
    for text in overrides:
        section = text.partition("=")[0].strip().partition(".")[0]
        if section in SECTIONS and section not in ("model", "cluster"):
            message = f"--set {text}: only model and cluster have values here"
            hint = "--fix for fields of the plan, options such as --seq-len for the workload"
            faults.append(NOT_HERE.fault(message, ("--set", text), hint=hint))
            continue
        tables.override(text, faults)
    found = _attempt(faults, lambda: _model(tables)), _attempt(faults, lambda: _cluster(tables))
    raise_errors(faults)
    assert found[0], "a model that could not be read was reported"
    assert found[1], "a cluster that could not be read was reported"
    return found[0], found[1]


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
    tables.target = tables.target or inner.target
    tables.tables |= inner.tables
    tables.origins |= inner.origins
    # A relative `hf` belongs to the file that has it.
    tables.folder = inner.folder if "model" in inner.tables else tables.folder
    return tables


def _tables_of(data: Mapping[str, Any], source: str, folder: Path, faults: list[Fault]) -> Tables:
    tables = Tables(source=source, folder=folder)
    for section, table in data.items():
        if section == "target":
            tables.target = _text_of(table, source, faults)
            continue
        if section not in SECTIONS:
            message, value = f"{source} has no table [{section}]", (source, f"[{section}]")
            faults.append(UNKNOWN_KEY.fault(message, value, hint=did_you_mean(section, SECTIONS)))
            continue
        tables.tables[section] = table
        if isinstance(table, Mapping):
            tables.origins |= {f"{section}.{key}": source for key in table}
    return tables


def _text_of(value: Any, source: str, faults: list[Fault]) -> str | None:
    """The software that a file names."""
    if isinstance(value, str):
        return value
    said, hint = f"target = {value}", 'target = "megatron-core", text in quotes'
    faults.append(WRONG_VALUE.fault(f"{said} is not allowed", (source, said), hint=hint))
    return None


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
        model=model,
        workload=workload,
        cluster=cluster,
        plan=plan,
        target=tables.target,
        source=tables.source,
        origins=dict(tables.origins),
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
    data = tables.laid(section, tables.table(section) if table is None else table)
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
    if base is not None and not rest and not tables.inner("model"):
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
    cluster = _with_origins(cluster, tables.inner("cluster"))
    raise_errors(cluster_faults(cluster, tables.source, tables.sources("cluster")))
    return cluster


def _with_origins(cluster: ClusterSpec, stated: Iterable[str]) -> ClusterSpec:
    """`cluster` whose device and links say which of their figures were laid over, by keys such as `levels.0.size`."""
    laid: dict[str, list[str]] = {}
    for key in stated:
        part, _, figure = key.rpartition(".")
        part = part.removesuffix(".peak_tflops")
        if figure != "origin":
            laid.setdefault(part, []).append(figure)

    def told(origin: str, part: str) -> str:
        return f"{origin}; --set: {', '.join(laid[part])}" if part in laid else origin

    device = replace(cluster.device, origin=told(cluster.device.origin, "device"))
    levels = (replace(link, origin=told(link.origin, f"levels.{at}")) for at, link in enumerate(cluster.levels))
    return replace(cluster, device=device, levels=tuple(levels))


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
