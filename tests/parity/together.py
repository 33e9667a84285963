"""Certificates of a table: rows of equal world run in the same processes, as forking costs more than a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plans import Row

from shardsmith.engine.parity.certificate import Case, Certificate, certify_together
from shardsmith.layout.check import check

MOST = 24
"""Rows in one run: few enough that no test waits for long, and that a run which fails tells where."""


def certified(rows: Sequence[Row], timeout_s: float = 170.0) -> list[Certificate]:
    """One for each of `rows`, which are of equal world."""
    cases = [Case(setup=r.setup, steps=r.steps, packed=r.packed) for r in rows]
    return certify_together(cases, timeout_s=timeout_s)


class Together:
    """What the rows of a table were found to be; a run starts when one of its rows is asked for."""

    def __init__(self, rows: Iterable[Row], *, timeout_s: float = 170.0) -> None:
        self.timeout_s = timeout_s
        by_world: dict[int, list[Row]] = {}
        for row in rows:
            by_world.setdefault(row.setup.plan.world, []).append(row)
        runs = [found[at : at + MOST] for found in by_world.values() for at in range(0, len(found), MOST)]
        self._runs = {row.name: run for run in runs for row in run}
        self._found: dict[str, Certificate | Exception] = {}

    def holds(self, row: Row) -> Certificate:
        """The certificate of `row`, which is a legal plan that equals one process; raises what its run raised."""
        assert [fault for fault in check(row.setup, running=True) if fault.severity == "error"] == []
        if row.name not in self._found:
            self._run(self._runs[row.name])
        found = self._found[row.name]
        if isinstance(found, Exception):
            raise found
        assert found.passed, found.summary()
        return found

    def _run(self, rows: list[Row]) -> None:
        try:
            found: Sequence[Certificate | Exception] = certified(rows, self.timeout_s)
        except Exception as failure:
            found = [failure] * len(rows)
        self._found |= {row.name: one for row, one in zip(rows, found, strict=True)}
