"""Models and clusters by name: presets that come with the package, and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomli_w

from shardsmith.errors import Code, raise_errors
from shardsmith.specs.cluster import ClusterSpec, cluster_faults
from shardsmith.specs.hf_config import from_hf_config
from shardsmith.specs.model import ModelSpec
from shardsmith.specs.model_rules import model_faults
from shardsmith.specs.parse import did_you_mean, parse_table, read_toml

UNKNOWN_MODEL = Code(
    code="M001",
    title="unknown model",
    because="a model is a preset, a TOML file, or a local Hugging Face folder or config.json",
)
UNKNOWN_CLUSTER = Code(
    code="H101",
    title="unknown cluster",
    because="a cluster is a preset or a TOML file; no device stands in for another",
)
PLAN_FILE = Code(
    code="F113",
    title="a plan or job file where a model or a cluster is wanted",
    because="such a file has tables of its own for model, cluster and plan; the verbs that take it read them all",
)


def model_names() -> tuple[str, ...]:
    """Names of all model presets, sorted."""
    return _names("models")


def cluster_names() -> tuple[str, ...]:
    """Names of all cluster presets, sorted."""
    return _names("clusters")


def model_named(name: str | Path) -> ModelSpec:
    """The model of a preset, a TOML file, a `config.json`, or a folder that holds one; never from a network.

    A TOML file has the field names of ModelSpec as keys, and may say where they come from (`origin`).
    Raises `Refused`: M001 for an unknown name (with close matches), F110 for a missing file, M201 for a
    hub name, and whatever is wrong inside the file.
    """
    text = str(name)
    if text in model_names():
        return _preset_model(text)
    if text.endswith(".toml"):
        return model_from_table(_one_spec(read_toml(name), text, "model"), source=text)
    # A path or hub name was meant where something is there, or there is a slash or a suffix.
    if Path(name).exists() or "/" in text or "\\" in text or text.endswith(".json"):
        return from_hf_config(name)
    raise UNKNOWN_MODEL.refuse(f"there is no model {text!r}", hint=did_you_mean(text, model_names()))


def model_from_table(data: Mapping[str, Any], *, source: str, section: str = "") -> ModelSpec:
    """The model that a table with the field names of ModelSpec (and perhaps `origin`) describes.

    Raises `Refused` with all faults of keys and values (F101 to F103), else of the model (M101 to M105).
    """
    spec = parse_table(ModelSpec, _without_origin(data), source=source, section=section)
    raise_errors(model_faults(spec, source))
    return spec


def model_toml(spec: ModelSpec) -> str:
    """`spec` as a TOML file that `model_named` reads again."""
    return tomli_w.dumps(_stated(asdict(spec)))


def _stated(table: Mapping[str, Any]) -> dict[str, Any]:
    """`table` without keys of None, which TOML cannot write."""
    return {
        key: _stated(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }


def model_origin(name: str) -> str:
    """Where the figures of model preset `name` come from."""
    return str(_preset("models", name)["origin"])


def cluster_named(name: str | Path, nodes: int | None = None) -> ClusterSpec:
    """The cluster of a preset or a TOML file, with `nodes` nodes where given.

    Raises `Refused`: H101 for an unknown name (with close matches), F110 for a missing file, and whatever
    is wrong inside the file or with that number of nodes.
    """
    text = str(name)
    if text in cluster_names():
        spec = cluster_from_table(_preset("clusters", text), source=f"preset {text}")
    elif text.endswith(".toml"):
        spec = cluster_from_table(_one_spec(read_toml(name), text, "cluster"), source=text)
    else:
        raise UNKNOWN_CLUSTER.refuse(f"there is no cluster {text!r}", hint=did_you_mean(text, cluster_names()))
    if nodes is None:
        return spec
    spec = spec.with_nodes(nodes)
    raise_errors(cluster_faults(spec, "nodes"))
    return spec


def cluster_toml(spec: ClusterSpec) -> str:
    """`spec` as a TOML file that `cluster_named` reads again."""
    table = asdict(spec)
    return tomli_w.dumps(_stated(table) | {"levels": [_stated(level) for level in table["levels"]]})


def cluster_from_table(data: Mapping[str, Any], *, source: str, section: str = "") -> ClusterSpec:
    """The cluster that a table with the field names of ClusterSpec describes.

    Raises `Refused` with all faults of keys and values (F101 to F103), else of the cluster (H102 to H104).
    """
    spec = parse_table(ClusterSpec, data, source=source, section=section)
    raise_errors(cluster_faults(spec, source))
    return spec


def _one_spec(data: dict[str, Any], source: str, kind: str) -> dict[str, Any]:
    """The table of a model or cluster file. Raises `Refused` (F113) where the file is a plan or a job."""
    tables = [name for name in ("model", "workload", "cluster", "plan") if name in data]
    if not tables:
        return data
    has = ", ".join(f"[{name}]" for name in tables)
    raise PLAN_FILE.refuse(
        f"{source} is a plan file, not a {kind}",
        (source, has),
        hint=f"a preset or a {kind} file here; shardsmith check {source} takes the plan",
    )


@cache
def _preset_model(name: str) -> ModelSpec:
    return model_from_table(_preset("models", name), source=f"preset {name}")


def _without_origin(data: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        return data
    return {key: value for key, value in data.items() if not (key == "origin" and isinstance(value, str))}


@cache
def _names(kind: str) -> tuple[str, ...]:
    folder = files("shardsmith.specs") / "presets" / kind
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def _preset(kind: str, name: str) -> dict[str, Any]:
    return read_toml(Path(str(files("shardsmith.specs") / "presets" / kind / f"{name}.toml")))
