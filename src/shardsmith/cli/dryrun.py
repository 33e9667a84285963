"""`shardsmith dryrun PLAN`: one real step on tensors without data, beside what the closed forms say."""

from __future__ import annotations

import click
from rich.console import RenderableType
from rich.table import Table

from shardsmith import api
from shardsmith.cli.common import PATIENCE, Answer, verb
from shardsmith.cli.inputs import setup_options
from shardsmith.layout.record import ITEMS, Compared, StepRecord, by_kind
from shardsmith.plan.setup import Setup
from shardsmith.units import counted, format_bytes

TFLOP = 1e12


@click.command("dryrun")
@verb
@setup_options
@click.option("--rank", type=int, help="Global rank to run (default: 0).")
@click.option("--all-stages", is_flag=True, help="One rank of every position of the pipeline.")
@click.option(
    "--imbalance",
    default=1.0,
    show_default=True,
    metavar="F",
    help="Rows that a rank's experts receive, as a multiple of the mean.",
)
@click.option("--workers", type=click.IntRange(1), help="Processes that share the ranks (default: one a CPU).")
@click.option(
    "--timeout", type=PATIENCE, default=3600.0, show_default=True, help="Seconds after which the dry run is given up."
)
def command(
    setup: Setup, rank: int | None, all_stages: bool, imbalance: float, workers: int | None, timeout: float
) -> Answer:
    """Run the real training step of one rank, of a world of any size, on tensors without data.

    Shows peak memory by item, collectives and FLOPs as the engine does them, and as the closed forms say.
    """
    if all_stages and rank is not None:
        raise click.UsageError("--rank and --all-stages exclude each other")
    found = api.dryrun(setup, rank=rank, all_stages=all_stages, imbalance=imbalance, workers=workers, timeout_s=timeout)
    return Answer(data=found.as_json(), show=_show(found))


def _show(found: api.DryRun) -> tuple[RenderableType, ...]:
    setup, plan = found.setup, found.setup.plan
    parts: list[RenderableType] = [
        f"{setup.model.name}, {counted(plan.world, 'rank')}, {counted(setup.workload.seq_len, 'token')} a sequence, "
        f"global batch {setup.workload.global_batch}, {setup.workload.dtype}; {found.seconds:.1f} s",
        f"plan: {plan}",
    ]
    if setup.model.experts is not None:
        load = "balanced" if found.imbalance == 1.0 else f"{found.imbalance:g} times the mean on a rank shown"
        parts.append(f"routing: as stated, {load}")
    if len(found.ranks) > 1:
        parts.append(_ranks_table(found.ranks))
    return (*parts, _memory_table(found.fullest), _work_table(found.fullest))


def _ranks_table(ranks: tuple[Compared, ...]) -> Table:
    table = Table(title="one rank of each position of the pipeline", title_justify="left")
    for column in ("pipeline rank", "rank", "peak", "model", "difference", "TFLOPs", "collectives"):
        table.add_column(column, justify="right")
    for c in ranks:
        same = "as the model's" if c.same_collectives else "not the model's"
        table.add_row(
            str(c.run.pipeline_rank),
            str(c.run.rank),
            format_bytes(c.run.peak),
            format_bytes(c.model.peak),
            f"{c.peak_error:+.2%}",
            _flops(c.run),
            f"{sum(k.count for k in c.run.collectives)}, {same}",
        )
    return table


def _memory_table(c: Compared) -> Table:
    table = Table(title=f"memory of rank {c.run.rank} at its peak", title_justify="left")
    for column in ("item", "dry run", "model"):
        table.add_column(column, justify="left" if column == "item" else "right")
    for item in ITEMS:
        run, model = c.run.memory.get(item, 0), c.model.memory.get(item, 0)
        if run or model:
            table.add_row(item, format_bytes(run), format_bytes(model))
    table.add_section()
    table.add_row("all", format_bytes(c.run.peak), f"{format_bytes(c.model.peak)} ({c.peak_error:+.2%})")
    return table


def _work_table(c: Compared) -> Table:
    table = Table(title=f"work of rank {c.run.rank} in a step", title_justify="left")
    for column in ("", "dry run", "model"):
        table.add_column(column, justify="right" if column else "left")
    run, model = by_kind(c.run.collectives), by_kind(c.model.collectives)
    for kind in sorted({*run, *model}):
        table.add_row(kind, *(_calls(side.get(kind)) for side in (run, model)))
    table.add_row("TFLOPs", _flops(c.run), _flops(c.model))
    return table


def _flops(record: StepRecord) -> str:
    return f"{record.total_flops / TFLOP:.4g}"


def _calls(found: dict[str, int] | None) -> str:
    return "-" if found is None else f"{found['count']} calls, {format_bytes(found['bytes'])}"
