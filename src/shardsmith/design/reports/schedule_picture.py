"""A schedule as a picture: its played actions as a timeline of one second a unit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardsmith.design.reports.timeline_picture import draw_timeline
from shardsmith.schedule.ir import Action
from shardsmith.schedule.study import Study
from shardsmith.timeline import Span, Timeline
from shardsmith.units import counted


def draw_schedule(study: Study, path: Path | str) -> Path:
    """Write the played schedule as PNG, SVG or PDF (by the file's ending, else F601) and return its path."""
    spans = [span for rank, actions in enumerate(study.order.ranks) for span in _spans(study, rank, actions)]
    order = study.order
    title = f"{order.name}: {counted(order.pipeline, 'rank')}, {counted(order.microbatches, 'microbatch')}"
    return draw_timeline(Timeline(origin="simulated", spans=tuple(spans)), path, title=title)


def _spans(study: Study, rank: int, actions: tuple[Action, ...]) -> Iterator[Span]:
    """One span an action; the two of a pair, which run together, side by side in its time."""
    unit, before = float(study.unit), None
    for action in actions:
        start, end = study.played.start[action] * unit, study.played.end[action] * unit
        third = start + (end - start) / 3
        if action in study.order.pairs:
            end = third
        elif before in study.order.pairs:
            start = third
        before = action
        yield Span(
            rank=rank,
            lane="compute",
            name=str(action),
            start=start,
            end=end,
            stage=action.stage,
            microbatch=action.microbatch,
        )
