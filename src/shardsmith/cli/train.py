"""`shardsmith train job.toml`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from shardsmith import api
from shardsmith.cli.common import OK, PREEMPTED, Answer, verb
from shardsmith.plan.file import read_job


@click.command("train")
@verb
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Lay a value over the job file.")
@click.option("--pace", help="Pad actions to these milliseconds, F=20,I=20,W=20, to see a schedule on few cores.")
def command(file: Path, overrides: tuple[str, ...], pace: str | None) -> Answer:
    """Train as the job FILE says, on local ranks or under torchrun, srun or mpirun."""
    job = read_job(file, overrides)
    trained = api.train(job, pace=pace)
    folder = trained.folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = sorted(str(path) for path in folder.iterdir() if path.is_file())
    last = lines[-1]
    text = f"step {last['step'] + 1}: loss {lines[0]['loss']:.4f} -> {last['loss']:.4f}, all in {folder}"
    if trained.preempted:
        text += " (ended early, as SIGTERM asked)"
    data = {"folder": str(folder), "steps": last["step"] + 1, "last": last, "files": files}
    code = PREEMPTED if trained.preempted else OK
    return Answer(data=data | {"preempted": trained.preempted}, show=(text,), exit_code=code)
