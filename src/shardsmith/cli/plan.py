"""`shardsmith plan --model M --cluster C --global-batch B --seq-len S`: the best plans, and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from rich.console import RenderableType
from rich.table import Table

from shardsmith import api
from shardsmith.cli.common import Answer, check_writable, room_in, verb, width_of
from shardsmith.cli.serving import named, serving_options
from shardsmith.plan.stages import brief
from shardsmith.specs.job import Dtype
from shardsmith.units import GIB, counted, format_seconds

if TYPE_CHECKING:
    from shardsmith.design.planner.result import Choice, RuleNote, SearchResult
    from shardsmith.plan.plan import Plan

COLUMNS = (
    *("tensor", "pipeline", "context", "ulysses", "data", "replicate", "expert", "expert_tensor", "schedule", "zero"),
    *("zero_gather", "microbatch", "recompute", "overlap"),
)
SELDOM = ("context", "ulysses", "replicate", "expert", "expert_tensor", "zero_gather", "recompute", "overlap")
"""Columns that are left out where no plan has anything to say in them."""
DROPPED = (
    *("TFLOP/s", "bubble", "overlap", "zero_gather", "recompute", "80 % of runs", "replicate", "ulysses"),
    *("microbatch", "expert_tensor", "zero", "schedule", "context", "expert", "data", "pipeline", "tensor"),
)
"""Columns that go one after another where a terminal is too narrow; every plan stands below in full."""
DTYPES = (*get_args(Dtype), "float8")


@click.command("plan")
@verb
@click.option("--model", required=True, help="Preset, TOML file or Hugging Face folder.")
@click.option("--cluster", required=True, help="Preset or TOML file.")
@click.option("--nodes", type=int, help="Nodes of the cluster (with --days: at most so many).")
@click.option("--global-batch", type=int, help="Sequences of a step.")
@click.option("--seq-len", type=int, help="Tokens of a sequence.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="bfloat16",
    help="Dtype (float8: of products only).",
)
@click.option("--top", type=int, default=5, help="Combinations of degrees to rank.")
@click.option("--fix", multiple=True, metavar="KEY=VALUE", help="Hold a plan field to one value (repeatable).")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Lay a value over model or cluster: cluster.levels.1.bandwidth_gbs=25 (repeatable).",
)
@click.option("--memory-gib", type=float, help="What a rank may hold (default: all of the device).")
@click.option("--target", help="Software that is planned for (default: megatron-core; with --serve: vllm).")
@click.option("--imbalance", type=float, default=1.0, help="Rows of the fullest expert rank over the mean.")
@click.option("--tokens", type=float, help="Tokens to train on: adds days, device hours and goodput.")
@click.option("--days", type=float, help="Train in so many days, with the fewest nodes or the fewest device hours.")
@click.option("--goal", type=click.Choice(["fewest", "cheapest"]), help="What --days minimises (default: fewest).")
@click.option("--mtbf-hours", type=float, help="Hours between failures of one device (default: 50000).")
@click.option("--checkpoint-minutes", type=float, help="Minutes between checkpoints (default: those that lose least).")
@click.option(
    "--pareto",
    type=int,
    multiple=True,
    metavar="NODES",
    help="List plans on so many nodes that none beats in time, memory and devices (repeatable).",
)
@click.option("--explain", is_flag=True, help="Print what every change by one step would cost.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a report that opens in any browser, offline.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the best plan as a plan file.")
@serving_options(training=("global_batch", "seq_len"))
def command(out: Path | None, html: Path | None, explain: bool, **options: Any) -> Answer:
    """Search all layouts of a model on a cluster, rank them, and say why.

    Training needs --global-batch and --seq-len; with --serve the layouts are for inference, and --context and
    --concurrency say what is served.
    """
    check_writable(html, out)
    model, cluster = named(options)
    found = api.search(
        model,
        cluster,
        nodes=options["nodes"],
        global_batch=options["global_batch"],
        seq_len=options["seq_len"],
        dtype=options["dtype"],
        top=options["top"],
        fix=options["fix"],
        memory_gib=options["memory_gib"],
        target=options["target"],
        imbalance=options["imbalance"],
        tokens=options["tokens"],
        days=options["days"],
        goal=options["goal"],
        mtbf_hours=options["mtbf_hours"],
        checkpoint_minutes=options["checkpoint_minutes"],
        pareto=options["pareto"],
    )
    data, files = found.as_json(), {}
    if html:
        from shardsmith.design.reports.content import report_of_search
        from shardsmith.design.reports.html import write_html

        files["html"] = str(write_html(report_of_search(found), html))
    if out:
        from shardsmith.plan.file import dumps

        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(dumps(found.best.setup), encoding="utf-8")
        files["plan"] = str(out)
    written = (f"written: {path}" for path in files.values())
    return Answer(data=data | {"files": files}, show=(*_show(found, explain, bool(options["pareto"])), *written))


def _show(found: SearchResult, explain: bool, wide: bool) -> tuple[RenderableType, ...]:
    from shardsmith.design.reports.plan_tables import memory_table, numbered

    best = found.best
    s = best.setup
    parts: list[RenderableType] = [
        f"{s.model.name}, {s.workload.global_batch} x {s.workload.seq_len} tokens in {_dtype(found)}, on "
        f"{s.cluster.devices} x {s.cluster.device.name}, priced as {found.target}",
        *_ranking(found.plans, room_in(sys.stdout)),
        f"best: {brief(s)}",
        *([numbered("in full", _briefly(found.plans))] if len(found.plans) > 1 else []),
        best.binds,
        memory_table(best.estimate, "memory of a rank in GiB, by pipeline rank"),
    ]
    if found.totals:
        t = found.totals
        parts.append(
            f"{_duration(t['days'])}, {_hours(t['device_hours'])} device hours, goodput {t['goodput']:.1%} "
            f"on {counted(s.cluster.nodes, 'node')}"
        )
    if found.robust is not best:
        parts.append(f"safest within the intervals: {brief(found.robust.setup)}")
    if found.nearby:
        parts.append(
            f"{s.workload.global_batch} sequences hold data ranks back: global_batch = {found.nearby.global_batch} "
            f"would train {found.nearby.faster - 1:.1%} more of them a second"
        )
    parts.append("\n".join(["rules of thumb:", *(_rule(note, explain) for note in best.rules)]))
    if explain:
        parts.append(_neighbours(best))
    if explain or wide:
        parts += [_front(found), numbered("plans of that table", _briefly(found.pareto))]
    parts.append("assumed:\n" + "\n".join(f"- {line}" for line in found.assumptions))
    counts = f"{found.searched:,} plans weighed by memory and time, {found.priced:,} of them priced on their own"
    parts.append(f"{counts}; {found.dismissed:,} ruled out by bounds before; {found.seconds:.2f} s")
    # Last, as nothing of it changes the figures: what the software cannot run, or the engine not train yet.
    return (*parts, *("\n" + str(fault) for fault in found.warnings))


def _dtype(found: SearchResult) -> str:
    """What is computed in; with products in float8 both dtypes."""
    from shardsmith.design.targets import FLOAT8

    dtype = found.best.setup.workload.dtype
    return f"float8 (matrix products) and {dtype}" if found.target.endswith(FLOAT8) else dtype


def _duration(days: float) -> str:
    return f"{days:.1f} days" if days >= 1.0 else format_seconds(days * 86400.0)


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def _briefly(choices: tuple[Choice, ...]) -> list[Plan]:
    return [brief(choice.setup) for choice in choices]


def _rule(note: RuleNote, explain: bool) -> str:
    """A rule of thumb in a line, and with `explain` the plan that decides otherwise in a second one."""
    line = f"- {note.verdict}: {note.rule} {note.text}"
    return f"{line}\n  {note.other}" if explain and note.other else line


def _ranking(plans: tuple[Choice, ...], width: int) -> tuple[RenderableType, ...]:
    """The ranked plans, without the columns that `width` characters have no room for, and a word on these."""
    names = [name for name in COLUMNS if name not in SELDOM or any(name in c.setup.plan.stated() for c in plans)]
    rows = [_cells(place, choice, names) for place, choice in enumerate(plans, 1)]
    left: list[str] = []
    for name in (None, *DROPPED):
        left += [name] if name in rows[0] else []
        table = _table(rows, [column for column in rows[0] if column not in left])
        if width_of(table) <= width:
            break
    if not left:
        return (table,)
    return table, f"no room in {width} characters for: {', '.join(sorted(left, key=[*rows[0]].index))}"


def _table(rows: list[dict[str, str]], columns: list[str]) -> Table:
    table = Table(title="best plan of each combination of degrees", title_justify="left")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table


def _cells(place: int, choice: Choice, names: list[str]) -> dict[str, str]:
    """A row of the ranking by column, `names` being fields of the plan."""
    e = choice.estimate
    low, high = e.interval_s
    return {
        "#": str(place),
        **{name: _cell(choice.setup.plan, name) for name in names},
        "step": format_seconds(e.step_time_s),
        "80 % of runs": f"{format_seconds(low)} - {format_seconds(high)}",
        "MFU": f"{e.mfu:.1%}",
        "TFLOP/s": f"{e.tflops_per_gpu:.0f}",
        "fullest rank": f"{e.peak / GIB:.1f} GiB",
        "bubble": f"{e.breakdown['bubble'] / e.step_time_s:.1%}",
    }


def _cell(plan: Plan, name: str) -> str:
    """A field of a plan for a table; stages a rank stand behind the schedule."""
    value = getattr(plan, name)
    if isinstance(value, tuple):
        return "+".join(value) or "none"
    return f"{value} x{plan.stages_per_rank}" if name == "schedule" and plan.stages_per_rank else str(value)


def _neighbours(choice: Choice) -> Table:
    table = Table(title="one step away from the best plan", title_justify="left")
    for column in ("field", "from", "to", "time", "fullest rank", "why not"):
        table.add_column(column, justify="left", no_wrap=column != "why not")
    for n in choice.neighbours:
        time = "" if n.ratio is None else f"{n.ratio - 1:+.1%}"
        size = "" if n.peak_gib is None else f"{n.peak_gib:.1f} GiB"
        table.add_row(n.axis, n.before, n.becomes, time, size, n.reason)
    return table


def _front(found: SearchResult) -> Table:
    table = Table(title="no plan beats these in time, memory and devices", title_justify="left")
    for column in ("#", "nodes", "step", "fullest rank", "MFU"):
        table.add_column(column, justify="right", no_wrap=True)
    for place, choice in enumerate(found.pareto, 1):
        e = choice.estimate
        nodes, step, size = str(choice.setup.cluster.nodes), format_seconds(e.step_time_s), f"{e.peak / GIB:.1f} GiB"
        table.add_row(str(place), nodes, step, size, f"{e.mfu:.1%}")
    return table
