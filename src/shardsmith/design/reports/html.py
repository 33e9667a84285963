"""A report as one HTML file that needs no network: figures, bars, a timeline to zoom into, a map of the ranks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardsmith.design.reports import content
from shardsmith.design.reports.content import Report
from shardsmith.design.reports.spans import timeline_columns
from shardsmith.units import GIB, format_seconds

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

PAGE = Path(__file__).parent / "page"


def write_html(report: Report, path: Path | str) -> Path:
    """Write the report to `path` and return it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html(report), encoding="utf-8")
    return path


def html(report: Report) -> str:
    """The report as one page: styles, scripts and data inside, nothing loaded from anywhere."""
    setup, e = report.setup, report.estimate
    return _template().render(
        report=report,
        setup=setup,
        search=report.search,
        estimate=e,
        figures=content.figures(report),
        plan_rows=content.plan_rows(setup),
        memory=content.memory_bars(report) if e else None,
        breakdown=content.breakdown(report) if e else None,
        two_ways=content.two_ways(report) if e else "",
        assumptions=content.assumptions(report),
        timeline=_data(timeline_columns(report.simulation.timeline)),
        ranks=_data(content.rank_map(setup)),
        style=(PAGE / "style.css").read_text(encoding="utf-8"),
        scripts=[(PAGE / name).read_text(encoding="utf-8") for name in ("common.js", "timeline.js", "ranks.js")],
    )


def _data(value: Any) -> str:
    """JSON that can stand inside a script element: no `<` can end it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _breakable(plan: Any) -> Markup:
    """A plan in one line that may be broken behind its commas."""
    from markupsafe import Markup, escape

    return Markup(str(escape(str(plan))).replace(",", ",<wbr>"))


@cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(PAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": _breakable, "seconds": format_seconds}
    environment.globals |= {"GIB": GIB}
    return environment.get_template("report.html.j2")
