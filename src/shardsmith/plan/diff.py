"""What changed between two plans."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import shown


@dataclass(frozen=True, kw_only=True)
class Change:
    """One field that two plans disagree on."""

    field: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.field}: {shown(self.before)} -> {shown(self.after)}"


def diff(before: Plan, after: Plan) -> tuple[Change, ...]:
    """The fields in which two plans differ, in the order of the Plan; none where they are equal."""
    pairs = ((f.name, getattr(before, f.name), getattr(after, f.name)) for f in fields(Plan))
    return tuple(Change(field=name, before=old, after=new) for name, old, new in pairs if old != new)
