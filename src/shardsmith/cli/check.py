"""`shardsmith check FILE`, or `shardsmith check --plan tensor=2,pipeline=2`."""

from __future__ import annotations

from typing import Any

import click
from rich.console import RenderableType
from rich.table import Table

from shardsmith import api
from shardsmith.cli.common import OK, REFUSED, Answer, verb
from shardsmith.cli.inputs import plan_options
from shardsmith.errors import Refused
from shardsmith.layout.check import Checked, as_json
from shardsmith.plan.file import make_setup
from shardsmith.units import format_bytes


@click.command("check")
@verb
@plan_options
def command(**options: Any) -> Answer:
    """Check a plan FILE (or --plan) against model, workload and cluster: every fault at once."""
    try:
        checked = api.check(make_setup(**options))
    except Refused as refused:
        faults = {kind: [f.as_json() for f in refused.faults if f.severity == kind] for kind in ("error", "warning")}
        data = {"errors": faults["error"], "warnings": faults["warning"], "unknown": [], "memory_gib": []}
        return Answer(data=data | {"step_time_s": None, "better": []}, show=(str(refused),), exit_code=REFUSED)
    return Answer(data=as_json(checked), show=_show(checked), exit_code=REFUSED if checked.errors else OK)


def _show(checked: Checked) -> tuple[RenderableType, ...]:
    setup, parts = checked.setup, [str(fault) + "\n" for fault in (*checked.errors, *checked.warnings)]
    verdict = "refused" if checked.errors else "legal"
    counts = f"{_counted(len(checked.errors), 'error')}, {_counted(len(checked.warnings), 'warning')}"
    parts.append(f"{setup.model.name} on {setup.cluster.name}, {setup.plan.world} ranks: {verdict} ({counts})")
    parts.append(f"plan: {setup.plan or 'one rank'}")
    if not checked.memory:
        return tuple(parts)
    table = Table(title="states of a rank, by stage (activations come on top)", title_justify="left")
    for column in ("stage", "pipeline rank", "weights", "gradients", "optimiser (AdamW)", "all states"):
        table.add_column(column, justify="right")
    for m in checked.memory:
        sizes = (m.states.weights, m.states.gradients, m.states.optimizer, m.states.total)
        table.add_row(str(m.stage), str(m.pipeline_rank), *map(format_bytes, sizes))
    return (*parts, table)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
