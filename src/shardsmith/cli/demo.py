"""`shardsmith demo`: the whole tour on one machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from shardsmith import api
from shardsmith.cli.common import OK, REFUSED, Answer, console_for, verb
from shardsmith.design.reports.timeline_picture import timeline_text
from shardsmith.units import counted


@click.command("demo")
@verb
@click.option("--out", default="demo-run", show_default=True, type=click.Path(path_type=Path), help="Folder to fill.")
@click.option("--steps", default=250, show_default=True, type=click.IntRange(2), help="Training steps.")
def command(out: Path, steps: int) -> Answer:
    """Train a small Llama on real text over 8 ranks (tensor 2 x pipeline 2 x data 2) and prove that plan."""
    console = console_for(sys.stderr)
    tour = api.demo(out, steps=steps, say=lambda text: console.print(text))
    shown = [
        f"loss {tour.first_loss:.3f} -> {tour.last_loss:.3f} in {counted(steps, 'step')} "
        f"on {tour.tokens:,} tokens of real text",
        tour.certificate.summary(),
        "greedy samples:\n" + "\n".join(f"  {prompt!r} -> {text!r}" for prompt, text in tour.samples),
        timeline_text(tour.timeline),
        f"measured timeline: {out / 'timeline.png'} (picture), {out / 'trace.json'} (open it in ui.perfetto.dev)",
    ]
    data = {
        "folder": str(out),
        "first_loss": tour.first_loss,
        "last_loss": tour.last_loss,
        "certificate": tour.certificate.as_json(),
        "samples": [{"prompt": prompt, "text": text} for prompt, text in tour.samples],
        "idle_share": tour.timeline.idle_share(),
    }
    learned = tour.last_loss < 0.8 * tour.first_loss
    code = OK if tour.certificate.passed and learned else REFUSED
    return Answer(data=data, show=tuple(shown), exit_code=code)
