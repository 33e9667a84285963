"""`shardsmith explain CODE`."""

from __future__ import annotations

import click

from shardsmith import api
from shardsmith.cli.common import Answer, verb


@click.command("explain")
@click.argument("code")
@verb
def command(code: str) -> Answer:
    """Explain the error or warning CODE, for example T204."""
    rule = api.explain(code)
    data = {"code": rule.code, "title": rule.title, "because": rule.because, "severity": rule.severity}
    return Answer(data=data, show=(f"{rule.severity}[{rule.code}]: {rule.title}", f"because: {rule.because}"))
