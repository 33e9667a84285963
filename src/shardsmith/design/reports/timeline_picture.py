"""A timeline as a picture: ranks downwards, time to the right, forward blue and backward orange.

`draw_timeline` writes PNG or SVG, `timeline_text` the same in characters for a terminal. Both treat
simulated and measured timelines alike and say which of the two they show. matplotlib is imported
only when something is drawn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardsmith.errors import Code
from shardsmith.timeline import LANE_KINDS, LaneKind, Span, Timeline
from shardsmith.units import counted, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE_FORMAT = Code(
    code="F601",
    title="unknown picture format",
    because="the ending of the file name chooses the format, and a picture is written as PNG, SVG or PDF",
)
FORMATS = (".png", ".svg", ".pdf")

MOST_RANKS = 32
"""With more ranks than this, only the first rank of each group of equal stages is drawn."""

# Blue, orange, green and purple of Okabe and Ito's palette, which stay apart for colour-blind readers;
# the second tone is for a rank's further stages (chunks), so that interleaving can be seen.
TONES: dict[str, tuple[str, str]] = {
    "F": ("#2f6fb0", "#8ab8e3"),
    "B": ("#e08a1e", "#f6c887"),
    "I": ("#c9563c", "#eba893"),
    "W": ("#2f8f6b", "#93cfb6"),
    "other": ("#8d93a1", "#c3c7d0"),
}
LANE_TONES: dict[LaneKind, str] = {
    "tensor": "#9467bd",
    "pipeline": "#4b5563",
    "data": "#009e73",
    "expert": "#d1478c",
    "context": "#b8a200",
}
MEANINGS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
    "other": "other compute",
}
IDLE = "#eceef2"
INK, FAINT, WHITE = "#1f2430", "#6b7280", "white"
DARK_TONES = {TONES[kind][0] for kind in ("F", "I", "W", "other")}
"""Tones on which a white number reads better than a dark one."""

FILLS = {"F": "█", "B": "▒", "I": "▚", "W": "░", "other": "▪"}
IDLE_FILL = "·"

_ACTION = re.compile(r"(F|B|I|W)(?![a-z])")

BAR, LANE, LANE_GAP, ROW_GAP, GROUP_GAP = 1.0, 0.17, 0.05, 0.28, 0.32
"""Heights in units of one compute bar."""

WIDE, LEFT, RIGHT, ABOVE, BELOW = 12.5, 1.45, 0.2, 0.72, 0.83
"""The figure's width and its margins, inches; `BELOW` for a legend of one line."""
LEGEND_COLUMNS = 6


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that work on the same stages; `stages` is empty where spans name none."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How seconds and bars become axis units and points (1/72 inch): `zero` is the first compute span."""

    zero: float
    unit: float
    points_per_second: float
    bar_points: float

    def at(self, seconds: float) -> float:
        """Where a moment of the timeline's clock stands on the time axis."""
        return (seconds - self.zero) / self.unit


def kind_of(span: Span) -> str:
    """`F`, `B`, `I` or `W` as the span's name begins (`F2.5`), else `other` (an optimizer step, say)."""
    match = _ACTION.match(span.name)
    return match.group(1) if match else "other"


def groups_of(timeline: Timeline) -> tuple[Group, ...]:
    """Ranks grouped by the stages they compute, groups by first stage, ranks ascending within."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in timeline.ranks:
        stages = tuple(sorted({s.stage for s in timeline.compute(rank) if s.stage >= 0}))
        members.setdefault(stages, []).append(rank)
    return tuple(Group(stages=stages, ranks=tuple(ranks)) for stages, ranks in sorted(members.items()))


def headline(timeline: Timeline) -> str:
    """One line of facts: origin, makespan, idle share of the step, and every note (paced, for one)."""
    makespan = format_seconds(timeline.end - timeline.start)
    facts = (timeline.origin, f"makespan {makespan}", f"idle {timeline.idle_share():.1%} of the step", *timeline.notes)
    return "  ·  ".join(facts)


def draw_timeline(timeline: Timeline, path: Path | str, *, title: str | None = None) -> Path:
    """Write the timeline as a picture and return its path; the file's ending chooses PNG, SVG or PDF.

    Raises `Refused` (F601) for any other ending, before anything is drawn.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise PICTURE_FORMAT.refuse(
            f"cannot draw a picture as {path.suffix or 'a file without an ending'}",
            ("picture", str(path)),
            hint=str(path.with_suffix(".png")),
        )
    from matplotlib import rc_context

    figure = timeline_figure(timeline, title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "shardsmith"}):
        figure.savefig(path, dpi=160, facecolor="white", metadata=_undated(path))
    return path


def timeline_figure(timeline: Timeline, *, title: str | None = None) -> Figure:
    """The picture as a matplotlib figure that no window knows of; `draw_timeline` writes it to a file."""
    from matplotlib.figure import Figure

    assert timeline.compute(), "a timeline without compute spans has nothing to draw"
    groups = groups_of(timeline)
    left_out = len(timeline.ranks) > MOST_RANKS
    if left_out:
        groups = tuple(Group(stages=g.stages, ranks=g.ranks[:1]) for g in groups)
    lanes = tuple(k for k in LANE_KINDS[1:] if any(s.lane == k for s in timeline.spans))
    tops, height = _rows(groups, lanes)
    inches = height * (0.34 if len(tops) <= 8 else 0.26 if len(tops) <= 16 else 0.19)
    legend = _legend(timeline, lanes)
    below = BELOW + 0.2 * ((len(legend) - 1) // LEGEND_COLUMNS)
    tall = inches + ABOVE + below
    figure = Figure(figsize=(WIDE, tall))
    figure.subplots_adjust(left=LEFT / WIDE, right=1 - RIGHT / WIDE, top=1 - ABOVE / tall, bottom=below / tall)
    axes = figure.add_subplot()
    first, last = _extent(timeline, tops)
    unit_name, unit = _time_unit(last - first)
    across = (WIDE - LEFT - RIGHT) * 72 / (last - first)
    scale = Scale(zero=timeline.start, unit=unit, points_per_second=across, bar_points=inches / height * 72)
    _style(axes, height, scale.at(first), scale.at(last), unit_name)
    for rank, top in tops.items():
        _draw_rank(axes, timeline, rank, top, lanes, scale)
    _label_rows(axes, groups, tops, scale)
    _head(figure, timeline, title, one_rank_each=left_out)
    _draw_legend(figure, legend)
    return figure


def timeline_text(timeline: Timeline, width: int = 100) -> str:
    """The compute lanes as lines of at most `width` characters, a line a rank, for a terminal.

    A bar starts with its microbatch where it has room and is filled by kind; the legend says how.
    """
    assert timeline.compute(), "a timeline without compute spans has nothing to draw"
    labels = {rank: f"rank {rank}" for rank in timeline.ranks}
    margin = max(len(label) for label in labels.values())
    columns = width - margin - 3
    assert columns >= 10, f"a timeline needs at least {margin + 13} characters"
    lines = [headline(timeline)]
    for group in groups_of(timeline):
        for rank in group.ranks:
            lines.append(f"{labels[rank]:>{margin}} ▕{_text_row(timeline, rank, columns)}▏")
    kinds = [k for k in FILLS if any(kind_of(s) == k for s in timeline.compute())]
    legend = [f"{FILLS[k]} {MEANINGS[k]}" for k in kinds]
    column = format_seconds((timeline.end - timeline.start) / columns)
    lines.append(" " * (margin + 2) + "   ".join([*legend, f"{IDLE_FILL} idle", f"a column is {column}"]))
    return "\n".join(lines)


def _text_row(timeline: Timeline, rank: int, columns: int) -> str:
    scale = columns / (timeline.end - timeline.start)
    row = [IDLE_FILL] * columns
    for span in timeline.compute(rank):
        first, past = round((span.start - timeline.start) * scale), round((span.end - timeline.start) * scale)
        label = str(span.microbatch) if span.microbatch >= 0 else ""
        label = label if len(label) < past - first else ""
        row[first:past] = label.ljust(past - first, FILLS[kind_of(span)])
    return "".join(row)


def _rows(groups: Sequence[Group], lanes: Sequence[LaneKind]) -> tuple[dict[int, float], float]:
    """The top of every rank's block and the height of all of them, y growing downwards."""
    tops: dict[int, float] = {}
    y = 0.0
    for index, group in enumerate(groups):
        y += GROUP_GAP if index else 0.0
        for rank in group.ranks:
            tops[rank] = y
            y += BAR + len(lanes) * (LANE + LANE_GAP) + ROW_GAP
    return tops, y - ROW_GAP


def _draw_rank(axes: Axes, timeline: Timeline, rank: int, top: float, lanes: Sequence[LaneKind], scale: Scale) -> None:
    axes.broken_barh([(0, scale.at(timeline.end))], (top, BAR), color=IDLE, linewidth=0, gid="idle", zorder=1)
    computed = timeline.compute(rank)
    stages = sorted({s.stage for s in computed if s.stage >= 0})
    by_tone: dict[str, list[Span]] = {}
    for span in computed:
        by_tone.setdefault(_tone(span, stages), []).append(span)
    for tone, spans in by_tone.items():
        _bars(axes, spans, top, BAR, tone, scale, gid="compute")
        for span in spans:
            _number(axes, span, top, WHITE if tone in DARK_TONES else INK, scale)
    for row, lane in enumerate(lanes):
        spans = [s for s in timeline.spans if s.rank == rank and s.lane == lane]
        y = top + BAR + LANE_GAP + row * (LANE + LANE_GAP)
        _bars(axes, spans, y, LANE, LANE_TONES[lane], scale, gid=lane)


def _tone(span: Span, stages: Sequence[int]) -> str:
    """The kind's colour; a rank's second, fourth, ... stage takes the light tone."""
    chunk = stages.index(span.stage) if span.stage in stages else 0
    return TONES[kind_of(span)][chunk % 2]


def _bars(axes: Axes, spans: Sequence[Span], y: float, height: float, tone: str, scale: Scale, *, gid: str) -> None:
    if not spans:
        return
    extents = [(scale.at(s.start), s.seconds / scale.unit) for s in spans]
    edge = 0.6 if gid == "compute" else 0.0
    axes.broken_barh(extents, (y, height), facecolor=tone, edgecolor=WHITE, linewidth=edge, gid=gid, zorder=2)


def _number(axes: Axes, span: Span, top: float, tone: str, scale: Scale) -> None:
    """The microbatch inside its bar, as large as fits up to 9 points, or nothing below 4.5 points."""
    room = span.seconds * scale.points_per_second
    size = min(9.0, scale.bar_points * 0.62, room / (0.64 * len(str(span.microbatch)) + 0.25))
    if span.microbatch >= 0 and size >= 4.5:
        x, y = scale.at((span.start + span.end) / 2), top + BAR / 2
        axes.text(x, y, str(span.microbatch), fontsize=size, color=tone, ha="center", va="center_baseline", zorder=3)


def _style(axes: Axes, height: float, first: float, last: float, unit_name: str) -> None:
    margin = 0.002 * (last - first)
    axes.set_xlim(first - margin, last + margin)
    axes.set_ylim(height + 0.12, -0.12)
    axes.set_xlabel(f"time ({unit_name})", fontsize=9, color=FAINT)
    axes.tick_params(axis="x", labelsize=8.5, colors=FAINT, length=3)
    axes.tick_params(axis="y", length=0, labelsize=8.5, labelcolor=INK)
    axes.grid(axis="x", color="#d9dce3", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#b5bac4")


def _label_rows(axes: Axes, groups: Sequence[Group], tops: dict[int, float], scale: Scale) -> None:
    size = min(9.0, max(5.0, scale.bar_points * 0.55))
    axes.set_yticks([top + BAR / 2 for top in tops.values()], [f"rank {rank}" for rank in tops], fontsize=size)
    across = axes.get_yaxis_transform()
    for group in groups:
        if not group.stages:
            continue
        first, last = tops[group.ranks[0]], tops[group.ranks[-1]] + BAR
        named = ", ".join(str(s) for s in group.stages)
        label = f"stage {named}" if len(group.stages) == 1 else f"stages\n{named}"
        axes.plot([-0.056, -0.056], [first, last], transform=across, color="#b5bac4", linewidth=1.2, clip_on=False)
        axes.text(
            -0.062,
            (first + last) / 2,
            label,
            transform=across,
            ha="right",
            va="center",
            fontsize=min(9.0, size + 0.5),
            color=FAINT,
            linespacing=1.1,
        )


def _head(figure: Figure, timeline: Timeline, title: str | None, *, one_rank_each: bool) -> None:
    inches = figure.get_figheight()
    facts = headline(timeline)
    if one_rank_each:
        facts += f"  ·  {counted(len(timeline.ranks), 'rank')}, the first of each group shown"
    figure.text(0.16 / WIDE, 1 - 0.16 / inches, title or "Timeline", fontsize=13, weight="bold", color=INK, va="top")
    figure.text(0.16 / WIDE, 1 - 0.43 / inches, facts, fontsize=9.5, color=FAINT, va="top")


def _legend(timeline: Timeline, lanes: Sequence[LaneKind]) -> list[tuple[str, str]]:
    """What has to be explained: (tone, words)."""
    kinds = {kind_of(s) for s in timeline.compute()}
    entries = [(tones[0], MEANINGS[k]) for k, tones in TONES.items() if k in kinds]
    if any(len(group.stages) > 1 for group in groups_of(timeline)):
        entries.append((TONES["F"][1], "light: every second stage of a rank"))
    entries.append((IDLE, "idle"))
    return entries + [(LANE_TONES[lane], f"{lane} communication") for lane in lanes]


def _draw_legend(figure: Figure, entries: Sequence[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(facecolor=tone, label=words) for tone, words in entries],
        loc="lower left",
        bbox_to_anchor=((LEFT - 0.08) / WIDE, 0.0),
        ncols=min(len(entries), LEGEND_COLUMNS),
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=1.1,
        handleheight=0.8,
        columnspacing=1.5,
        handletextpad=0.5,
    )


def _extent(timeline: Timeline, tops: dict[int, float]) -> tuple[float, float]:
    """First and last moment of anything drawn, communication included."""
    shown = [s for s in timeline.spans if s.rank in tops]
    first, last = min(timeline.start, *(s.start for s in shown)), max(timeline.end, *(s.end for s in shown))
    assert last > first, "a timeline whose spans all have length 0 has nothing to draw"
    return first, last


def _time_unit(seconds: float) -> tuple[str, float]:
    for name, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 2 * size:
            return name, size
    return "µs", 1e-6


def _undated(path: Path) -> dict[str, Any]:
    """Leave the date out of formats that would write it, so that equal timelines give equal files."""
    return {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
