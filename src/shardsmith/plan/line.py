"""The plan in one line, `tensor=2,pipeline=2,microbatches=4`, and single overrides, `plan.tensor=2`."""

from __future__ import annotations

import json
import re
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from shardsmith.errors import Code, Fault, Refused
from shardsmith.plan.plan import Plan
from shardsmith.specs.parse import parse_table

NOT_A_PAIR = Code(
    code="F201",
    title="not a key=value pair",
    because="a plan in one line is pairs joined by commas; lists inside a value are joined by +",
)
TWICE = Code(
    code="F202",
    title="key given twice",
    because="only one of two values can be used, and which one was meant is unknown",
)

_PIECE = re.compile(r'\s*((?:"(?:[^"\\]|\\.)*"|[^,"])*)(?:,|$)', re.DOTALL)
_PAIR = re.compile(r"([A-Za-z_][\w.]*)\s*=\s*(.*?)\s*", re.DOTALL)


def parse_plan_line(text: str, *, source: str = "--plan") -> Plan:
    """The Plan that one line states: the inverse of `str(plan)`; an empty line is the plan of one device.

    Raises `Refused` with every piece that is no pair (F201), key given twice (F202) and wrong key or value.
    """
    faults: list[Fault] = []
    table = plan_table(text, source, faults)
    try:
        plan = parse_table(Plan, table, source=source, section="plan")
    except Refused as refused:
        raise Refused([*faults, *refused.faults]) from None
    if faults:
        raise Refused(faults)
    return plan


def plan_table(text: str, source: str, faults: list[Fault]) -> dict[str, Any]:
    """The [plan] table of a one-line plan, values typed as the fields are; what is no pair goes to `faults`."""
    table: dict[str, Any] = {}
    hints = get_type_hints(Plan)
    for piece in pieces(text):
        pair = _PAIR.fullmatch(piece)
        if pair is None:
            faults.append(
                NOT_A_PAIR.fault(f"{piece!r} is not key=value", (source, piece), hint="tensor=2,pipeline=2,layers=3+5")
            )
        elif pair[1] in table:
            faults.append(TWICE.fault(f"{pair[1]} is given twice", (source, piece), hint=f"keep one {pair[1]}"))
        else:
            table[pair[1]] = value_of(pair[2], hints.get(pair[1], int))
    return table


def pieces(text: str) -> list[str]:
    """`text` cut at the commas that stand outside quotes; empty pieces (a trailing comma) are dropped."""
    found, at = [], 0
    while at < len(text):
        match = _PIECE.match(text, at)
        if match is None:  # a quote that never closes: one piece, which its reader then refuses
            found.append(text[at:].strip())
            break
        found.append(match[1].strip())
        at = match.end()
    return [piece for piece in found if piece]


def value_of(text: str, hint: Any) -> Any:
    """`text` as a value of type `hint`; where it is none, as a number or text, which its reader then refuses."""
    for kind in (hint, int, float, str):
        try:
            return _read(text, kind)
        except ValueError:
            continue
    return text


def _read(text: str, hint: Any) -> Any:
    """`text` as a value of type `hint`; raises ValueError where it is none."""
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _first(text, members)
    if origin is Literal:
        text = json.loads(text) if text.startswith('"') else text
        by_text = {str(m): m for m in members}
        if text not in by_text:
            raise ValueError(text)
        return by_text[text]
    if origin is tuple:
        parts = [part.strip() for part in re.split(r"[+,]", text.strip("[]() ")) if part.strip()]
        inner = members[:1] * len(parts) if members[-1] is Ellipsis else members
        return [_read(part, kind) for part, kind in zip(parts, inner, strict=True)]
    if hint is bool:
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    if hint in (int, float):
        return hint(text)
    if hint is str:
        return json.loads(text) if text.startswith('"') else text
    raise ValueError(text)


def _first(text: str, members: tuple[Any, ...]) -> Any:
    for member in members:
        if member is NoneType:
            continue
        try:
            return _read(text, member)
        except ValueError:
            continue
    raise ValueError(text)
