"""`shardsmith verify PLAN`: the parity certificate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.console import RenderableType
from rich.table import Table

from shardsmith import api
from shardsmith.cli.common import OK, PATIENCE, REFUSED, Answer, verb
from shardsmith.cli.inputs import setup_options
from shardsmith.plan.setup import Setup

if TYPE_CHECKING:
    from shardsmith.engine.parity.certificate import Certificate

SHOWN = 12
"""Tensors listed for a person where a proof fails: those with the largest errors; `--json` lists all, always."""


@click.command("verify")
@verb
@setup_options
@click.option("--steps", default=2, show_default=True, type=click.IntRange(1), help="Optimiser steps to compare.")
@click.option("--seed", default=0, show_default=True, help="Seed of initial weights and data.")
@click.option("--shrink", is_flag=True, help="Prove the same kind of plan on small degrees and a small model.")
@click.option("--packed", is_flag=True, help="Put several documents into each sequence, which do not see each other.")
@click.option(
    "--timeout", type=PATIENCE, default=600.0, show_default=True, help="Seconds after which the proof is given up."
)
def command(setup: Setup, steps: int, seed: int, shrink: bool, packed: bool, timeout: float) -> Answer:
    """Prove that a plan computes what one process computes: loss, every gradient, norm, parameters.

    Give --dtype float64 for the strict proof (1e-10); float32 is compared at 2e-5. What says a narrower dtype is
    proven in float32.
    """
    certificate = api.verify(setup, steps=steps, seed=seed, shrunk=shrink, packed=packed, timeout_s=timeout)
    code = OK if certificate.passed else REFUSED
    show: tuple[RenderableType, ...] = (certificate.summary(),)
    if not certificate.passed:
        show = (*show, errors_table(certificate))
    return Answer(data=certificate.as_json(), show=show, exit_code=code)


def errors_table(certificate: Certificate) -> Table:
    """The tensors that are furthest apart."""
    table = Table("tensor", "gradient error", "value error", title="largest errors", title_justify="left")
    worst = sorted(certificate.parameters, key=lambda p: -max(p.grad_error, p.value_error))
    for p in worst[:SHOWN]:
        table.add_row(p.name, f"{p.grad_error:.1e}", f"{p.value_error:.1e}")
    return table
