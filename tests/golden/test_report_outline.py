"""The structure of reports: sections, headings, table heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from reports import outline, searched, simulated, unpriced

from shardsmith.design.reports.content import Report
from shardsmith.design.reports.html import html


@pytest.mark.parametrize("report", [searched, simulated, unpriced], ids=lambda f: f.__name__)
def test_outline_of_a_page(report: Callable[[], Report], golden: Callable[[str, str], None]) -> None:
    golden(f"reports/{report.__name__}.txt", outline(html(report())))
