"""Serving layouts for a terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table

from shardsmith.design.serving.search import ServingResult
from shardsmith.units import GIB, counted


def serving_tables(result: ServingResult) -> tuple[RenderableType, ...]:
    """The demand, the ranked layouts, the rule beside the first, and what the figures rest on."""
    d = result.demand
    head = (
        f"{d.model.name} in {d.dtype} on {d.cluster.devices} x {d.cluster.device.name}: "
        f"{counted(d.concurrency, 'request')} of {counted(d.context, 'token')}"
    )
    table = Table(title="layouts, most tokens a second first", title_justify="left")
    table.add_column("layout", no_wrap=True)
    for column in ("first token", "between tokens", "tokens/s", "weights", "cache", "holds", "bound by"):
        table.add_column(column, justify="right")
    for choice in result.plans:
        table.add_row(
            str(choice.plan) or "one device",
            f"{choice.ttft_s * 1e3:.0f} ms",
            f"{choice.tpot_s * 1e3:.1f} ms",
            f"{choice.tokens_per_s:,.0f}",
            f"{choice.weights / GIB:.1f} GiB",
            f"{choice.kv / GIB:.1f} GiB",
            f"{choice.most:,}",
            choice.binds,
        )
    counts = f"{counted(result.searched, 'layout')}, {result.fitting} hold the requests ({result.seconds * 1e3:.0f} ms)"
    notes = "\n".join(f"- {line}" for line in result.assumptions)
    return (head, table, result.plans[0].rule, counts, "assumed:\n" + notes)
