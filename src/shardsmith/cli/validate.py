"""`shardsmith validate runs.csv`: accuracy of the cost model on measured runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.console import RenderableType
from rich.table import Table

from shardsmith import api
from shardsmith.cli.common import REFUSED, Answer, verb

if TYPE_CHECKING:
    from shardsmith.design.validation.report import Validation

CROSSES = ("none", "leave-one-group-out", "leave-one-source-out", "one-scalar-per-source")

NAMED = 4
"""Rows named for each reason why some were skipped."""


@click.command("validate")
@verb
@click.argument("runs", type=click.Path(exists=True, dir_okay=False))
@click.option("--cross", type=click.Choice(CROSSES), default="none", help="Fit without the rows that are predicted.")
@click.option("--moe", is_flag=True, help="Score mixture-of-experts rows instead of dense ones.")
def command(runs: str, cross: str, moe: bool) -> Answer:
    """Predict every measured run of a CSV and say how far off the cost model is.

    A row needs the columns id, framework, layers, hidden, heads, seq_len, gpu, gpus, iter_time_best_s and
    global_batch or micro_batch; the guide lists them all. A row that cannot be scored is skipped, with its reason.
    """
    found = api.validate(runs, cross=cross, moe=moe)
    from shardsmith.design.validation.report import as_json, by_group

    reasons = _reasons(found)
    if not len(found.predicted):
        return Answer(data=as_json(found), show=("no row can be scored", *reasons), exit_code=REFUSED)
    errors = found.errors
    table = Table(title="groups, worst first", title_justify="left")
    for column in ("group", "rows", "mean error", "bias"):
        table.add_column(column, justify="right")
    for name, rows, mean, bias in by_group(found):
        table.add_row(name, str(rows), f"{mean:.1%}", f"{bias:+.1%}")
    text = (
        f"{len(found.predicted)} rows, {len(found.skipped)} skipped; error: mean {errors.mean:.1%}, "
        f"median {errors.median:.1%}, group-weighted {errors.group_weighted:.1%}; "
        f"{found.held:.0%} inside the 80 % interval"
    )
    show: tuple[RenderableType, ...] = (text, table, *reasons)
    return Answer(data=as_json(found), show=show)


def _reasons(found: Validation) -> tuple[str, ...]:
    """Why rows were skipped, a line a reason; `--json` names every row."""
    rows: dict[str, list[str]] = {}
    for skipped in found.skipped:
        rows.setdefault(skipped.reason, []).append(skipped.id)
    return tuple(
        f"skipped {len(ids)}: {reason} ({', '.join(ids[:NAMED])}{', ...' if len(ids) > NAMED else ''})"
        for reason, ids in sorted(rows.items(), key=lambda pair: -len(pair[1]))
    )
