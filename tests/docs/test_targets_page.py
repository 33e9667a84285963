"""docs/targets.md lists every target with what its file declares, and no other; the guide every key of a plan."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from shardsmith.design.targets.server import server_names
from shardsmith.design.targets.target import Target, target_named, target_names
from shardsmith.plan.plan import Plan

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "targets.md").read_text(encoding="utf-8")


def row(t: Target) -> str:
    """The line of the page's table for a target."""
    m = t.memory
    hidden = (t.overlap_tensor, t.overlap_data, t.overlap_shard, t.overlap_pipeline, t.overlap_expert)
    cells = (
        f"`{t.name}`",
        t.attention,
        f"{t.launches:g}",
        f"{t.reduce_bytes:g}",
        " / ".join(f"{share:g}" for share in hidden),
        ", ".join(f"`{name}`" for name in t.overlaps) or "none",
        t.selective,
        ", ".join(f"`{name}`" for name in t.schedules) or "no pipeline",
        f"{m.weights:g} + {m.gradients:g} + {m.states_sharded:g}",
    )
    return "| " + " | ".join(cells) + " |"


def test_the_table_of_targets_is_complete_and_true() -> None:
    written = [line for line in PAGE.splitlines() if re.match(r"\| `[\w.-]+` \|", line)]
    assert written == [row(target_named(name)) for name in target_names()]


def test_every_target_says_what_it_stands_for() -> None:
    said = dict(re.findall(r"^- `([\w.-]+)`: (.*)$", PAGE, re.MULTILINE))
    assert said == {name: target_named(name).origin for name in target_names()}
    assert all(f"`{name}`" in PAGE for name in server_names())


def test_the_guide_names_every_key_of_a_plan() -> None:
    table = (DOCS / "guide.md").read_text(encoding="utf-8").partition("Keys that the engine runs today")[2]
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?`) \|", table.partition("\n## ")[0], re.MULTILINE)))
    assert sorted(named) == sorted(field.name for field in fields(Plan))
