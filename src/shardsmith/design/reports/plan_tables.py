"""What `plan` and `check` both print of a plan: memory by pipeline rank, and lists of plans that can be copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from shardsmith.design.cost.estimate import ITEM_WORDS, Estimate, RankMemory
from shardsmith.units import GIB

MOST_RANKS = 6
"""Pipeline ranks up to which each has a column of its own."""
FIRST, LAST = 3, 2
"""With more, so many from either end have one; those between share one."""


def rank_columns(memory: Sequence[RankMemory]) -> tuple[tuple[str, RankMemory], ...]:
    """(label, rank) of a table's columns: all of a few ranks, else those of both ends and the fullest between them."""
    if len(memory) <= MOST_RANKS:
        return tuple((str(rank.pipeline_rank), rank) for rank in memory)
    between = memory[FIRST:-LAST]
    label = f"{between[0].pipeline_rank}-{between[-1].pipeline_rank}"
    shared = (label, max(between, key=lambda rank: rank.total))
    ends = [(str(rank.pipeline_rank), rank) for rank in (*memory[:FIRST], *memory[-LAST:])]
    return (*ends[:FIRST], shared, *ends[FIRST:])


def memory_table(e: Estimate, title: str) -> Table:
    """GiB of every item and of all, one column a pipeline rank; narrow enough for 80 characters."""
    columns = rank_columns(e.memory)
    shared = [(label, rank) for label, rank in columns if label != str(rank.pipeline_rank)]
    caption = "; ".join(f"{label}: the fullest of them, rank {rank.pipeline_rank}" for label, rank in shared)
    table = Table(title=title, title_justify="left", caption=caption or None, caption_justify="left")
    table.add_column("pipeline rank", no_wrap=True)
    for label, _ in columns:
        table.add_column(label, justify="right", no_wrap=True)
    for item in e.memory[0].items:
        if any(rank.items[item] for rank in e.memory):
            table.add_row(ITEM_WORDS[item], *(f"{rank.items[item] / GIB:.1f}" for _, rank in columns))
    table.add_section()
    table.add_row("all", *(f"{rank.total / GIB:.1f}" for _, rank in columns))
    return table


def numbered(title: str, plans: Iterable[object]) -> str:
    """Plans one a line, as any verb takes them, under the numbers that a table above has for them."""
    return "\n".join([f"{title}:", *(f"{place}. {plan}" for place, plan in enumerate(plans, 1))])
