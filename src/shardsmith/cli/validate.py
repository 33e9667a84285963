"""`shardsmith validate runs.csv`: accuracy of the cost model; `validate --refit LOG PLAN`: fit it to one's own run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.console import RenderableType
from rich.table import Table

from shardsmith import api
from shardsmith.cli.common import REFUSED, Answer, verb
from shardsmith.cli.inputs import plan_options, priced_setup
from shardsmith.units import counted, format_seconds

if TYPE_CHECKING:
    from shardsmith.design.validation.report import Validation

CROSSES = ("none", "leave-one-group-out", "leave-one-source-out", "one-scalar-per-source", "one-refit-per-source")

NAMED = 4
"""Rows named for each reason why some were skipped."""


@click.command("validate")
@verb
@plan_options
@click.option("--cross", type=click.Choice(CROSSES), default="none", help="Fit without the rows that are predicted.")
@click.option("--moe", is_flag=True, help="Score mixture-of-experts rows instead of dense ones.")
@click.option("--constants", type=click.Path(), help="Constants that --refit wrote, instead of the shipped ones.")
@click.option("--refit", "log", metavar="LOG", type=click.Path(), help="Fit to the log of a run of the plan FILE.")
@click.option("--target", default="shardsmith", show_default=True, help="Software that the run used (--refit).")
@click.option("--out", type=click.Path(), help="Where --refit writes what moved, for --constants.")
def command(
    cross: str, moe: bool, constants: str | None, log: str | None, target: str, out: str | None, **given: Any
) -> Answer:
    """Predict every measured run of a CSV FILE and say how far off the cost model is.

    A row needs the columns id, framework, layers, hidden, heads, seq_len, gpu, gpus, iter_time_best_s and
    global_batch or micro_batch; the guide lists them all. A row that cannot be scored is skipped, with its reason.

    With --refit, FILE (or --plan) is the plan of a run of yours, LOG its log (metrics.jsonl, or lines of Megatron-LM,
    DeepSpeed or torchtitan): each constant moves as far as that run and its own spread between machines say.
    """
    if log is not None:
        if moe or cross != "none":
            raise click.UsageError("--refit takes one run; --cross and --moe are about a CSV of runs")
        return _refit(log, given, target, constants, out)
    ignored = [name for name, value in given.items() if name != "file" and value]
    if ignored or out is not None or target != "shardsmith":
        raise click.UsageError("without --refit, validate takes a CSV of runs and no plan, target or --out")
    if given["file"] is None:
        raise click.UsageError("missing argument 'FILE': a CSV of measured runs")
    return _validate(given["file"], cross, moe, constants)


def _validate(runs: str, cross: str, moe: bool, constants: str | None) -> Answer:
    found = api.validate(runs, cross=cross, moe=moe, constants=constants)
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
        f"{counted(len(found.predicted), 'row')}, {len(found.skipped)} skipped; error: mean {errors.mean:.1%}, "
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


def _refit(log: str, given: dict[str, Any], target: str, constants: str | None, out: str | None) -> Answer:
    found = api.refit(log, priced_setup(given), target=target, constants=constants, out=out)
    from shardsmith.design.validation.own_run import as_json

    data = as_json(found)
    table = Table(title="constants that moved, widest first", title_justify="left")
    for column in ("constant", "before", "after", "change", "of its spread between machines"):
        table.add_column(column, justify="right")
    for move in found.moved:
        share, sigmas = f"{move.share:+.1%}", f"{move.sigmas:+.2f} sigma"
        table.add_row(move.name, f"{move.before:.4g}", f"{move.after:.4g}", share, sigmas)
    text = (
        f"{counted(found.log.steps, 'step')} of a {found.log.form} log: {format_seconds(found.log.seconds)} "
        f"(+- {format_seconds(found.log.spread)}); predicted {format_seconds(data['predicted_before_s'])} before, "
        f"{format_seconds(data['predicted_after_s'])} after"
    )
    wrote = (f"wrote {out}: give it to --constants",) if out else ()
    show: tuple[RenderableType, ...] = (text, table, *wrote)
    return Answer(data=data, show=show)
