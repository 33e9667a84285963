"""`shardsmith train job.toml`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from shardsmith import api
from shardsmith.cli.common import OK, PREEMPTED, Answer, verb
from shardsmith.engine.runtime import environment
from shardsmith.errors import Refused
from shardsmith.plan.file import read_job

OF_ONE_RANK = ("R103", "R2", "R3", "D", "G5")
"""How codes begin that are about single ranks."""


@click.command("train")
@verb
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Lay a value over the job file.")
@click.option("--pace", help="Pad actions to these milliseconds, F=20,I=20,W=20, to see a schedule on few cores.")
def command(file: Path, overrides: tuple[str, ...], pace: str | None) -> Answer:
    """Train as the job FILE says, on local ranks or under torchrun, srun or mpirun."""
    try:
        trained = api.train(read_job(file, overrides), pace=pace)
    except Refused as refused:
        refused.told = environment.detect().local_rank > 0 and not _of_one_rank(refused)
        raise
    folder = trained.folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = sorted(str(path) for path in folder.iterdir() if path.is_file())
    last = lines[-1]
    data = {"folder": str(folder), "steps": last["step"] + 1, "last": last, "files": files}
    data |= {"first_step": trained.first, "preempted": trained.preempted}
    code = PREEMPTED if trained.preempted else OK
    return Answer(data=data, show=(_summary(trained, lines),), exit_code=code, silent=trained.rank != 0)


def _of_one_rank(refused: Refused) -> bool:
    """Whether a refusal may be that of some ranks only; all ranks on a node meet the same files and settings."""
    return any(fault.code.startswith(OF_ONE_RANK) for fault in refused.faults)


def _summary(trained: api.Trained, lines: list[dict[str, Any]]) -> str:
    """The run in one line: how far it came, what it learnt, where everything is."""
    last = lines[-1]
    done = last["step"] + 1
    if trained.first >= done:
        return f"nothing left to do: all {done} steps are done, loss {last['loss']:.4f}, all in {trained.folder}"
    text = f"step {done}: loss {lines[0]['loss']:.4f} -> {last['loss']:.4f}"
    evaluated = [line for line in lines if line.get("eval_loss") is not None]
    if evaluated:
        text += f", held out {evaluated[-1]['eval_loss']:.4f} (step {evaluated[-1]['step'] + 1})"
    if trained.first:
        text += f", resumed at step {trained.first}"
    text += f", all in {trained.folder}"
    return text + (" (ended early, as SIGTERM asked)" if trained.preempted else "")
