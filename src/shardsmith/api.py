"""The public verbs as functions. Only here (and in `cli`) do thinking and doing meet.

Nothing at module level imports torch: a verb that runs a model imports the engine when it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardsmith.errors import CODES, Code

if TYPE_CHECKING:
    from shardsmith.engine.dataset.prepare import Prepared, Watch
    from shardsmith.schedule.study import Study

UNKNOWN_CODE = Code(code="F001", title="unknown code", because="every rule has one code, printed in its message")


def explain(code: str) -> Code:
    """The rule behind an error or warning code. Raises `Refused` (F001) for a code that no rule has."""
    import shardsmith.engine.dataset.order
    import shardsmith.engine.dataset.prepare
    import shardsmith.layout.check
    import shardsmith.schedule.rules  # noqa: F401 - these register the codes

    rule = CODES.get(code.upper())
    if rule is None:
        raise UNKNOWN_CODE.refuse(f"no rule has the code {code!r}", hint="one of " + ", ".join(sorted(CODES)))
    return rule


def prepare(
    inputs: Sequence[str],
    out: str | Path,
    *,
    tokenizer: str = "byte",
    patterns: Sequence[str] = (),
    eod: str | None = None,
    limit_mb: float | None = None,
    force: bool = False,
    watch: Watch | None = None,
) -> Prepared:
    """Turn text into the token file `out`.bin/.idx; see `shardsmith.engine.dataset.prepare.prepare`. Needs no torch."""
    from shardsmith.engine.dataset.prepare import prepare

    return prepare(
        inputs,
        out,
        tokenizer=tokenizer,
        patterns=patterns,
        eod=eod,
        limit_mb=limit_mb,
        force=force,
        watch=watch,
    )


def schedule(
    name: str,
    *,
    pipeline: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    times: str | None = None,
) -> Study:
    """A pipeline schedule, played with equal stages and free communication: grid, bubbles, peaks, closed form.

    `name` is a schedule or `file:PATH`, a grid that brings its own sizes. `times` gives lengths per
    microbatch and rank, such as `F=1,I=1,W=1`. Raises `Refused` for what the schedule forbids, and for a
    grid that is not legal (S013 names the first impossible action).
    """
    from shardsmith.schedule.study import study

    return study(
        name,
        pipeline=pipeline,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        times=times,
    )
