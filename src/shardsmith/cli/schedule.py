"""`shardsmith schedule NAME --pipeline P --microbatches M`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from shardsmith import api
from shardsmith.cli.common import PATIENCE, Answer, verb
from shardsmith.schedule.closed_form import ClosedForm
from shardsmith.schedule.grid import GOES_ON, IDLE, Drawing
from shardsmith.schedule.play import weight_versions
from shardsmith.schedule.solve import Solved
from shardsmith.schedule.study import Study
from shardsmith.units import counted

COLOURS = {"F": "black on blue", "B": "black on green", "I": "black on cyan", "W": "black on yellow", IDLE: "dim"}
MOST_CELLS = 4000
"""Cells of a grid that is printed unless it is asked for: some bands of a wide terminal."""


@click.command("schedule")
@click.argument("name")
@click.option("--pipeline", type=int, help="Number of pipeline ranks P.")
@click.option("--microbatches", type=int, help="Number of microbatches m of a step.")
@click.option(
    "--stages-per-rank", type=int, help="Stages v that each rank holds; the schedule's own number if left out."
)
@click.option("--times", help="Lengths per microbatch and rank: F=1,I=1,W=1 (the default), or F=1,B=2 with B = I + W.")
@click.option("--stage-times", help="solved: a factor on the lengths for each stage, such as 1,1,1,1.5.")
@click.option("--live", type=int, help="solved: most microbatches that a rank holds between F and I, per stage.")
@click.option("--deferred", type=int, help="solved: most microbatches that a rank holds between I and W, per stage.")
@click.option("--effort", type=PATIENCE, default=20.0, help="solved: how long to search, in about seconds.")
@click.option("--grid/--no-grid", default=None, help=f"Print the grid; by itself up to {MOST_CELLS} cells.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the grid to this file.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw it: PNG, SVG or PDF.")
@verb
def command(
    name: str,
    pipeline: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    times: str | None,
    stage_times: str | None,
    live: int | None,
    deferred: int | None,
    effort: float,
    grid: bool | None,
    out: Path | None,
    picture: Path | None,
) -> Answer:
    """Show pipeline schedule NAME: grid, bubble, live microbatches, closed form.

    NAME is a schedule (gpipe, one_f_one_b, interleaved, looped_bfs, zb_h1, zb_v, dualpipe_v, pipedream),
    file:PATH, or solved. A file holds a row per rank and a
    cell per slot: F0 (forward of microbatch 0), B0, I0, W0, F2.0 (stage.microbatch), "." idle, "=" goes
    on. It is checked, and the first impossible action is named. `solved` is made to measure: the shortest
    order for --stage-times under the caps --live and --deferred, for `--plan schedule=file:PATH` once it is
    written with --out.
    """
    solved = None
    if name == "solved":
        solved = api.solve(
            stage_times,
            pipeline=pipeline,
            microbatches=microbatches,
            times=times,
            live=live,
            deferred=deferred,
            effort=effort,
        )
        study = solved.study
    else:
        study = api.study(
            name, pipeline=pipeline, microbatches=microbatches, stages_per_rank=stages_per_rank, times=times
        )
    if out is not None:
        out.write_text(f"# {_title(study)}\n{study.drawing().text()}\n", encoding="utf-8")
    if picture is not None:
        api.draw(study, picture)
    drawing = study.drawing()
    scale = "not to scale" if drawing.column is None else f"one column = {float(drawing.column):g}"
    cells = len(drawing.rows) * len(drawing.rows[0])
    drawn: tuple[RenderableType, ...] = (Folded(drawing), f"({scale})")
    if not (cells <= MOST_CELLS if grid is None else grid):
        drawn = (f"(a grid of {len(drawing.rows)} x {len(drawing.rows[0])} cells: --grid prints it)",)
    show: tuple[RenderableType, ...] = (_title(study), *drawn, _numbers(study), _peaks(study))
    if study.order.asynchronous:
        show = (*show, _weights(study))
    if solved is not None:
        return Answer(data=solved.as_json(), show=(*show, _quality(solved)))
    return Answer(data=study.as_json(), show=show)


def _quality(solved: Solved) -> str:
    best = "none fits" if solved.named is None else f"{solved.named}, {solved.named_slots}"
    bound = "no order is shorter" if solved.proven else f"no order is shorter than {solved.bound}"
    return (
        f"step of {int(solved.played.step_time)} slots of {float(solved.unit):g}; {bound}; best named schedule: {best}"
    )


def _title(study: Study) -> str:
    order, times = study.order, study.times
    lengths = "as drawn, a slot a cell"
    if times is not None:
        lengths = ", ".join(f"{key} = {float(getattr(times, key)):g}" for key in "FIW") + " per microbatch and rank"
    ranks, stages = counted(order.pipeline, "rank"), counted(order.stages, "stage")
    return f"{order.name}: {ranks}, {stages}, {counted(order.microbatches, 'microbatch')}; {lengths}"


class Folded:
    """A grid in colour, folded into bands that fit the terminal."""

    def __init__(self, drawing: Drawing) -> None:
        self.rows = drawing.rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """One block of rows a band, columns aligned."""
        cell = max(len(word) for row in self.rows for word in row) + 1
        label = len(f"rank {len(self.rows) - 1}: ")
        columns = len(self.rows[0])
        step = max((options.max_width - label) // cell, 1)
        styles = [_styles(row) for row in self.rows]
        for first, last in pairwise([*range(0, columns, step), columns]):
            if columns > step:
                yield Text(f"columns {first} to {last - 1}", style="dim", no_wrap=True)
            for rank, row in enumerate(self.rows):
                line = Text(f"rank {rank}: ".rjust(label), no_wrap=True)
                for word, style in zip(row[first:last], styles[rank][first:last], strict=True):
                    line.append(word.ljust(cell - 1), style=style)
                    line.append(" ")
                line.rstrip()
                yield line


def _styles(row: tuple[str, ...]) -> list[str]:
    styles: list[str] = []
    for word in row:
        styles.append(styles[-1] if word == GOES_ON else COLOURS[word[0]])
    return styles


def _numbers(study: Study) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "played", "closed form"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_column("")
    form = study.closed_form
    why = "no formula is exact here" if form is None else f"idle = {form.formula}, {form.paper}"
    table.add_row("step time", f"{float(study.step_time):g}", _of(form, "step_time", "g"), why)
    for label, key, meaning in (
        ("bubble of the step", "bubble_of_step", "idle share of ranks x step time"),
        ("bubble over ideal", "bubble_over_ideal", "idle time over computing time"),
    ):
        table.add_row(label, f"{getattr(study, key):.2%}", _of(form, key, ".2%"), meaning)
    return table


def _weights(study: Study) -> Table:
    table = Table(
        title="no flush: weights change after each backward (simulated only)",
        title_justify="left",
        title_style="",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for heading in ("rank", "versions of the weights held", "updates that a gradient is late"):
        table.add_column(heading, justify="right")
    for rank, versions in enumerate(weight_versions(study.order)):
        table.add_row(str(rank), str(versions.held), str(versions.delay))
    return table


def _of(form: ClosedForm | None, key: str, spec: str) -> str:
    return "-" if form is None else format(float(getattr(form, key)), spec)


def _peaks(study: Study) -> Table:
    per_rank = study.order.stages / study.order.pipeline
    share = "" if per_rank == 1 else f", each with 1/{per_rank:g} of a rank's layers"
    table = Table(
        title=f"peak live microbatches, counted per stage{share}",
        title_justify="left",
        title_style="",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    table.add_column("rank", justify="right")
    table.add_column("from F to B or I: all activations", justify="right")
    table.add_column("from I to W: linear inputs and output gradients", justify="right")
    for rank, peak in enumerate(study.peak_live):
        table.add_row(str(rank), str(peak.activations), str(peak.deferred))
    return table
