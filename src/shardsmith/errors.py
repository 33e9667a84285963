"""Coded errors: what clashes, where it came from, why, and a legal neighbour.

A `Code` names one rule and is registered once, next to the check that enforces it.
A `Fault` is one breach of a rule; `Refused` carries all faults of an input at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]

CODES: dict[str, Code] = {}
"""Every rule by its code; filled where the rules stand, read by `shardsmith explain`."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """One rule: `code` (letter + number), a `title`, and the reason `because` it exists."""

    code: str
    title: str
    because: str
    severity: Severity = "error"

    def __post_init__(self) -> None:
        assert self.code not in CODES, f"code {self.code} is registered twice"
        CODES[self.code] = self

    def fault(self, message: str, *values: tuple[str, str], hint: str = "") -> Fault:
        """A breach of this rule; `values` are (where it came from, "key = value") pairs."""
        return Fault(
            code=self.code,
            severity=self.severity,
            message=message,
            values=values,
            because=self.because,
            hint=hint,
        )

    def refuse(self, message: str, *values: tuple[str, str], hint: str = "") -> Refused:
        """An exception that holds this one fault, ready to be raised."""
        return Refused([self.fault(message, *values, hint=hint)])


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One breach of a rule, with the values that clash and where each came from."""

    code: str
    severity: Severity
    message: str
    values: tuple[tuple[str, str], ...] = ()
    because: str = ""
    hint: str = ""

    def __str__(self) -> str:
        lines = [f"{self.severity}[{self.code}]: {self.message}"]
        if self.values:
            lines.append("  " + "      ".join(f"{where}: {what}" for where, what in self.values))
        if self.because:
            lines.append(f"because: {self.because}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The fault as plain JSON values."""
        return {
            "code": self.code,
            "message": self.message,
            "values": [{"source": where, "value": what} for where, what in self.values],
            "because": self.because,
            "hint": self.hint,
        }


class Refused(ValueError):
    """Input that breaks rules; `faults` lists every breach found, errors first.

    `told` once another process says the same to the same person, as the first rank on a node does for the others.
    """

    told = False

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults: tuple[Fault, ...] = tuple(sorted(faults, key=lambda f: f.severity))
        super().__init__("\n\n".join(str(f) for f in self.faults))

    def __reduce__(self) -> tuple[type[Refused], tuple[tuple[Fault, ...]]]:
        return type(self), (self.faults,)


def raise_errors(faults: Sequence[Fault]) -> None:
    """Raise `Refused` with all of `faults` if any of them is an error; warnings alone pass."""
    if any(f.severity == "error" for f in faults):
        raise Refused(faults)
