"""The `shardsmith` command: finds a verb's file only when that verb is called."""

from __future__ import annotations

from importlib import import_module

import click

VERBS = {
    "check": "Check a plan file (or a plan in one line): every fault at once, with legal neighbours.",
    "convert": "Convert weights: a Hugging Face folder to the folder of a run, or back.",
    "demo": "The whole tour: real text, a 3-D plan on 8 local ranks, a parity certificate, a timeline.",
    "explain": "Explain an error or warning code.",
    "plan": "Find the best way to split a training run over a cluster, and say why.",
    "generate": "Let trained weights go on with a text.",
    "prepare": "Turn text into token files (.bin/.idx).",
    "schedule": "Show a pipeline schedule: grid, bubble, live microbatches, closed form.",
    "simulate": "Simulate one step of a plan: step time, bubble, lanes, stragglers, a timeline to look at.",
    "train": "Train a model as a job file says.",
    "validate": "Say how accurate the cost model is on a CSV of measured runs.",
    "verify": "Prove that a plan computes what one process computes.",
}


class Verbs(click.Group):
    """A click group that imports `shardsmith.cli.<verb>` on demand, so that help and refusals are instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, sorted."""
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command object of a verb, or None where there is no such verb."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"shardsmith.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing any of them."""
        with formatter.section("Verbs"):
            formatter.write_dl(sorted(VERBS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardsmith")
def main() -> None:
    """Plan, explain, run and prove parallel training of large models."""
