"""docs/files.md names every key that cluster and model files take, with its default, and no other."""

import json
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path

from shardsmith.specs.cluster import ClusterSpec, Device, Link
from shardsmith.specs.library import cluster_names
from shardsmith.specs.model import Experts, Latent, ModelSpec, RopeScaling, YarnScaling

PAGE = (Path(__file__).parents[2] / "docs" / "files.md").read_text(encoding="utf-8")
CLUSTER = {"": ClusterSpec, "device.": Device, "levels.": Link}
MODEL = {"": ModelSpec, "experts.": Experts, "latent.": Latent, "rope_scaling.": RopeScaling}


def shown(field: Field[object]) -> str:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if default is MISSING:
        return "required"
    return "none" if default is None else f"`{json.dumps(default)}`"


def wanted(parts: dict[str, type]) -> dict[str, str]:
    """Keys with their defaults; a table that is needed has no row, as its keys have theirs."""
    return {
        prefix + field.name: shown(field)
        for prefix, cls in parts.items()
        for field in fields(cls)
        if prefix + field.name != "device"
    }


def written(section: str) -> dict[str, str]:
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", text, re.MULTILINE))


def test_every_key_of_a_cluster_file_and_no_other() -> None:
    assert written("Cluster files") == wanted(CLUSTER)


def test_every_key_of_a_model_file_and_no_other() -> None:
    yarn = {f"rope_scaling.{field.name}": shown(field) for field in fields(YarnScaling)}
    both = wanted(MODEL)
    assert written("Model files") == both | {key: value for key, value in yarn.items() if key not in both}
    required = {key.partition(".")[2] for key, value in yarn.items() if value == "required"}
    told = set(re.findall(r"^\| `rope_scaling\.(\w+)`.*yarn: required \|$", PAGE, re.MULTILINE))
    assert required == {"kind", *told}


def test_every_preset_of_a_cluster_is_named() -> None:
    named = PAGE.partition("is a preset (")[2].partition(")")[0]
    assert set(re.findall(r"`([\w.-]+)`", named)) == set(cluster_names())
