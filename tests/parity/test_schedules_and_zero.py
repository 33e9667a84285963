"""Every schedule x ZeRO level x {no other axis, tensor 2, expert 2, context 2} against one process, tied and untied."""

from __future__ import annotations

import pytest
from plans import Row
from schedule_plans import AXES, SCHEDULE_TABLE, SCHEDULES
from together import Together

from shardsmith.schedule import orders

pytestmark = pytest.mark.ranks

CERTIFICATES = Together(SCHEDULE_TABLE)


@pytest.mark.parametrize("found", SCHEDULE_TABLE, ids=lambda found: found.name)
def test_schedule_with_zero_equals_one_process(found: Row) -> None:
    assert CERTIFICATES.holds(found).tolerance == 1e-10


def test_the_table_is_whole() -> None:
    found = {
        (p.schedule, p.zero, p.tensor, p.expert, p.context, r.setup.model.tied)
        for r in SCHEDULE_TABLE
        for p in [r.setup.plan]
    }
    assert len(found) == len(SCHEDULE_TABLE) == len(SCHEDULES) * 4 * len(AXES)
    assert {schedule for schedule, *_ in found} >= set(orders.names())
