"""`shardsmith simulate PLAN`: one step, event by event."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import RenderableType
from rich.table import Table

from shardsmith import api
from shardsmith.cli.common import Answer, check_writable, verb
from shardsmith.cli.inputs import plan_options, priced_setup
from shardsmith.units import counted, format_seconds

if TYPE_CHECKING:
    from shardsmith.design.simulator.simulation import Simulation

MOST_LINES = 16
"""Pipeline ranks and microbatches up to which a timeline is drawn in the terminal."""


@click.command("simulate")
@verb
@plan_options
@click.option("--slow", multiple=True, metavar="RANK=FACTOR", help="A straggler: 3=1.2 makes rank 3 a fifth slower.")
@click.option("--times", help="Seconds a microbatch and rank, F=1,I=1,W=1, in the place of the cost model.")
@click.option("--target", help="Software whose behaviour is priced (default: megatron-core).")
@click.option("--constants", type=click.Path(), help="Constants that `validate --refit` wrote.")
@click.option("--imbalance", type=float, help="Rows of the fullest expert rank over the mean (default: 1).")
@click.option("--trace", type=click.Path(path_type=Path), help="Write the timeline for ui.perfetto.dev (JSON).")
@click.option("--html", type=click.Path(path_type=Path), help="Write a report that opens in any browser, offline.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw the timeline (.png, .svg or .pdf).")
def command(
    slow: tuple[str, ...],
    times: str | None,
    target: str | None,
    constants: str | None,
    imbalance: float | None,
    trace: Path | None,
    html: Path | None,
    picture: Path | None,
    **options: Any,
) -> Answer:
    """Simulate one step of a plan FILE (or --plan) with the cost model's lengths.

    A dtype that nobody states is bfloat16 on a cluster with figures. On one without (local) a forward and each half
    of a backward take 1 s, and communication is free.
    """
    from shardsmith.design.simulator.simulation import parse_slow

    check_writable(trace, html, picture)
    setup = priced_setup(options)
    drawn = setup.plan.pipeline <= MOST_LINES
    found = api.simulate(
        setup,
        slow=parse_slow(slow),
        times=times,
        target=target,
        constants=constants,
        imbalance=imbalance,
        record=drawn or bool(trace or html or picture),
    )
    files = {}
    if trace:
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.write_text(json.dumps(found.timeline.chrome_trace()), encoding="utf-8")
        files["trace"] = str(trace)
    if html:
        from shardsmith.design.reports.content import report_of_simulation
        from shardsmith.design.reports.html import write_html

        files["html"] = str(write_html(report_of_simulation(found, found.target), html))
    if picture:
        from shardsmith.design.reports.timeline_picture import draw_timeline

        files["picture"] = str(draw_timeline(found.timeline, picture, title=str(setup.plan)))
    return Answer(data=found.as_json() | {"files": files}, show=(*_show(found, drawn), *_written(files)))


def _show(found: Simulation, drawn: bool) -> tuple[RenderableType, ...]:
    setup = found.setup
    parts: list[RenderableType] = [str(fault) + "\n" for fault in found.warnings]
    parts.append(f"{setup.model.name} on {setup.cluster.name}, {counted(setup.plan.world, 'rank')}: {setup.plan}")
    parts.append(found.origin)
    step = f"simulated step {format_seconds(found.seconds)}"
    if found.low is not None and found.high is not None:
        step += f" (80 % of runs: {format_seconds(found.low)} to {format_seconds(found.high)})"
    parts.append(f"{step}, bubble {found.bubble:.2%} of the time until the last backward")
    if found.slow:
        slow = ", ".join(f"rank {rank} x {factor:g}" for rank, factor in found.slow.items())
        cost = found.seconds / found.undisturbed - 1
        parts.append(f"without stragglers ({slow}) {format_seconds(found.undisturbed)}: they cost {cost:+.1%}")
    if found.order.asynchronous:
        parts.append(f"no flush: in a long run {format_seconds(found.steady)} for as many updates; simulated only")
    if drawn and found.order.microbatches <= 4 * MOST_LINES:
        from shardsmith.design.reports.timeline_picture import timeline_text

        # Where lengths come from, and who is slow, has been said above.
        parts.append(timeline_text(replace(found.timeline, notes=()), width=118))
    return (*parts, _lanes(found))


def _lanes(found: Simulation) -> Table:
    from shardsmith.schedule.play import weight_versions

    lanes, versions = found.lanes(), weight_versions(found.order)
    table = Table(title="busy time of lanes, by pipeline rank", title_justify="left")
    for column in ("pipeline rank", "rank", *lanes):
        table.add_column(column, justify="right")
    if found.order.asynchronous:
        table.add_column("weight versions", justify="right")
        table.add_column("updates late", justify="right")
    for at, rank in enumerate(found.ranks):
        cells = [format_seconds(seconds[at]) for seconds in lanes.values()]
        if found.order.asynchronous:
            cells += [str(versions[at].held), str(versions[at].delay)]
        table.add_row(str(at), str(rank), *cells)
    return table


def _written(files: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"written: {path}" for path in files.values())
