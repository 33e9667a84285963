"""The public verbs as functions. Only here (and in `cli`) do thinking and doing meet.

Nothing at module level imports torch: a verb that runs a model imports the engine when it is called.
"""

from __future__ import annotations

from shardsmith.errors import CODES, Code

UNKNOWN_CODE = Code(code="F001", title="unknown code", because="every rule has one code, printed in its message")


def explain(code: str) -> Code:
    """The rule behind an error or warning code. Raises `Refused` (F001) for a code that no rule has."""
    import shardsmith.layout.check  # noqa: F401 - registers the codes of every axis

    rule = CODES.get(code.upper())
    if rule is None:
        raise UNKNOWN_CODE.refuse(f"no rule has the code {code!r}", hint="one of " + ", ".join(sorted(CODES)))
    return rule
