"""A timeline as compact binary columns for the canvas of a report: a row a rank, a block a lane."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np

from shardsmith.design.reports.timeline_picture import LANE_TONES, TONES, kind_of
from shardsmith.timeline import LANE_KINDS, Span, Timeline

MOST_SPANS = 250_000
"""Spans that a page carries (some 3 MB); beyond, only compute is kept."""
KINDS = tuple(TONES)


def timeline_columns(timeline: Timeline) -> dict[str, Any]:
    """Rows of ranks with one block a lane: start and length (float32 seconds), microbatch, stage, kind; base64.

    A block of n spans is n starts, n lengths (float32), n microbatches, n stages (uint16, 65535: none), n kinds
    (uint8, index into `kinds`), little-endian.
    """
    kept = timeline.spans if len(timeline.spans) <= MOST_SPANS else tuple(timeline.compute())
    zero = min(s.start for s in kept)
    by_row: dict[tuple[int, str], list[Span]] = {}
    for span in kept:
        by_row.setdefault((span.rank, span.lane), []).append(span)
    rows = []
    for rank in sorted({s.rank for s in kept}):
        lanes = [
            {"lane": lane, "count": len(by_row[rank, lane]), "data": _block(by_row[rank, lane], zero)}
            for lane in LANE_KINDS
            if (rank, lane) in by_row
        ]
        stages = sorted({s.stage for s in by_row.get((rank, "compute"), []) if s.stage >= 0})
        rows.append({"rank": rank, "stages": stages, "lanes": lanes})
    rows.sort(key=lambda row: (row["stages"], row["rank"]))
    return {
        "end": max(s.end for s in kept) - zero,
        "kinds": list(KINDS),
        "tones": {kind: list(tones) for kind, tones in TONES.items()},
        "laneTones": dict(LANE_TONES),
        "rows": rows,
        "left": len(timeline.spans) - len(kept),
    }


def _block(spans: list[Span], zero: float) -> str:
    spans = sorted(spans, key=lambda s: s.start)
    whole = np.array([(s.start - zero, s.seconds) for s in spans], dtype="<f4").T.tobytes()
    marks = np.array([(s.microbatch % 65536, s.stage % 65536) for s in spans], dtype="<u2").T.tobytes()
    kinds = np.array([KINDS.index(kind_of(s)) for s in spans], dtype=np.uint8).tobytes()
    return b64encode(whole + marks + kinds).decode()
