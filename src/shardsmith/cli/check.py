"""`shardsmith check FILE`, or `shardsmith check --plan tensor=2,pipeline=2`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import RenderableType
from rich.table import Table

from shardsmith import api
from shardsmith.cli.common import OK, REFUSED, Amount, Answer, check_writable, verb
from shardsmith.cli.inputs import plan_options, priced_setup
from shardsmith.errors import Refused
from shardsmith.plan.stages import brief
from shardsmith.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from shardsmith.design.cost.estimate import Estimate
    from shardsmith.design.planner.priced import Priced
    from shardsmith.design.planner.result import Neighbour


@click.command("check")
@verb
@plan_options
@click.option("--target", help="Software that the plan is priced for (default: megatron-core).")
@click.option("--explain", is_flag=True, help="Add what these degrees, and those one step away, can do at best.")
@click.option("--memory-gib", type=Amount(), help="What a rank may hold (default: all of the device).")
@click.option("--imbalance", type=float, default=1.0, help="Rows of the fullest expert rank over the mean.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a report that opens in any browser, offline.")
def command(
    target: str | None,
    explain: bool,
    memory_gib: float | None,
    imbalance: float,
    html: Path | None,
    **options: Any,
) -> Answer:
    """Check a plan FILE (or --plan) against model, workload and cluster: every fault at once."""
    check_writable(html)
    try:
        setup = priced_setup(options)
        checked = api.check(setup, target=target, anew=explain, imbalance=imbalance, memory_gib=memory_gib)
    except Refused as refused:
        faults = {kind: [f.as_json() for f in refused.faults if f.severity == kind] for kind in ("error", "warning")}
        data = {"errors": faults["error"], "warnings": faults["warning"], "unknown": [], "memory_gib": []}
        return Answer(data=data | {"step_time_s": None, "better": []}, show=(str(refused),), exit_code=REFUSED)
    found, shown = checked.as_json(), _show(checked)
    if html:
        written, why = _report(checked, html, imbalance)
        found["files"] = {"html": written} if written else {}
        shown = (*shown, f"written: {written}" if written else f"no report: {why}")
    return Answer(data=found, show=shown, exit_code=REFUSED if checked.errors else OK)


def _report(checked: Priced, path: Path, imbalance: float) -> tuple[str, str]:
    """The report of the plan as a file, and why there is none: a plan that breaks a rule cannot be simulated."""
    from shardsmith.design.reports.content import report_of_simulation
    from shardsmith.design.reports.html import write_html

    try:
        found = api.simulate(checked.setup, target=checked.target or None, imbalance=imbalance)
    except Refused as refused:
        return "", refused.faults[0].message
    return str(write_html(report_of_simulation(found, found.target, imbalance), path)), ""


def _show(checked: Priced) -> tuple[RenderableType, ...]:
    setup, parts = checked.setup, [str(fault) + "\n" for fault in (*checked.errors, *checked.warnings)]
    parts.append(_header(checked))
    verdict = "refused" if checked.errors else "legal"
    counts = f"{counted(len(checked.errors), 'error')}, {counted(len(checked.warnings), 'warning')}"
    parts.append(
        f"{setup.model.name} on {setup.cluster.name}, {counted(setup.plan.world, 'rank')}: {verdict} ({counts})"
    )
    parts.append(f"plan: {(setup.plan if checked.errors else brief(setup)) or 'one rank'}")
    if checked.estimate is not None:
        return (*parts, *_price(checked, checked.estimate))
    parts += checked.remarks
    if not checked.memory:
        return tuple(parts)
    table = Table(title="states of a rank, by stage (activations come on top)", title_justify="left")
    for column in ("stage", "pipeline rank", "weights", "gradients", "optimiser (AdamW)", "all states"):
        table.add_column(column, justify="right")
    for m in checked.memory:
        sizes = (m.states.weights, m.states.gradients, m.states.optimizer, m.states.total)
        table.add_row(str(m.stage), str(m.pipeline_rank), *map(format_bytes, sizes))
    return (*parts, table)


def _header(checked: Priced) -> str:
    """What was judged: sizes that nobody stated are marked, as no price means much without them."""
    setup = checked.setup
    work, origins = setup.workload, setup.origins

    def said(value: str, key: str) -> str:
        return f"{value} (default)" if origins.get(f"workload.{key}") == "default" else value

    batch = said(str(work.global_batch), "global_batch")
    tokens = said(str(work.seq_len), "seq_len")
    priced = f", priced as {checked.target}" if checked.target else ""
    return f"a step of {batch} x {tokens} tokens in {work.dtype}{priced}"


def _price(checked: Priced, e: Estimate) -> tuple[RenderableType, ...]:
    from shardsmith.design.cost.limit import device_bytes
    from shardsmith.design.reports.plan_tables import memory_table

    low, high = e.interval_s
    table = memory_table(e, "memory of a rank at its peak in GiB, by pipeline rank")
    text = (
        f"step {format_seconds(e.step_time_s)} (80 % of runs: {format_seconds(low)} to {format_seconds(high)}), "
        f"MFU {e.mfu:.1%}, {e.tokens_per_s_per_gpu:,.0f} tokens/s a device"
    )
    parts: list[RenderableType] = [text, *checked.remarks, checked.binds, table]
    fits = e.peak <= device_bytes(checked.setup)
    if checked.better:
        parts.append(_neighbours("better neighbours" if fits else "neighbours that fit", checked.better))
    else:
        parts.append(f"no single change that is legal {'and fits is faster' if fits else 'fits'}")
    if checked.barred:
        parts.append(_neighbours("faster, but too large for the device", checked.barred))
    if checked.anew:
        parts += _anew(checked.anew)
    return tuple(parts)


def _anew(found: tuple[Neighbour, ...]) -> tuple[RenderableType, ...]:
    """The best plans with these degrees and those near, and each of the plans in a line to copy."""
    from shardsmith.design.reports.plan_tables import numbered

    title = "best plan with these degrees, then with one of them moved by a step"
    return _neighbours(title, found, whole=True), numbered("plans of that table", (n.plan for n in found))


def _neighbours(title: str, found: tuple[Neighbour, ...], whole: bool = False) -> Table:
    """What becomes of the plan; `whole` ones have numbers."""
    table = Table(title=title, title_justify="left")
    for column in (*(("#",) if whole else ()), "field", "from", "to", "time", "fullest rank"):
        table.add_column(column, no_wrap=True)
    for place, n in enumerate(found, 1):
        cells = (n.axis, n.before, n.becomes, f"{(n.ratio or 0) - 1:+.1%}", f"{n.peak_gib:.1f} GiB")
        table.add_row(*((str(place),) if whole else ()), *cells)
    return table
