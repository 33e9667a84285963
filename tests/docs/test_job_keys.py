"""The guide's table of job keys is that of the dataclasses, defaults included."""

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path

from shardsmith.plan.file import SECTIONS

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"


def shown(value: object) -> str:
    if value is MISSING:
        return "required"
    return "none" if value is None else f"`{json.dumps(value)}`"


def test_the_table_of_job_keys_is_complete_and_true() -> None:
    rows = dict(
        re.findall(
            r"^\| `((?:workload|data|optimisation|run)\.\w+)` \| (.*?) \|",
            GUIDE.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    wanted = {
        f"{section}.{field.name}": shown(field.default)
        for section in ("workload", "data", "optimisation", "run")
        for field in fields(SECTIONS[section])
    }
    assert rows == wanted
