"""What a run's folder says about the run: the job, and what another start states otherwise."""

from dataclasses import replace
from pathlib import Path

from shardsmith.engine.train.run_record import changes, tokenizer_of, write_record
from shardsmith.plan.file import make_setup, read_job
from shardsmith.plan.setup import Job
from shardsmith.specs.job import Data, Optimisation, Run


def test_what_changed_since_the_run_began_is_told(tmp_path: Path) -> None:
    job = Job(setup=make_setup(plan="data=2"), optimisation=Optimisation(schedule="cosine"), run=Run(folder="runs/a"))
    assert changes(job, tmp_path) == ()
    write_record(job, tmp_path)
    assert read_job(tmp_path / "run.toml") == job
    longer = replace(job, run=replace(job.run, steps=200, resume="auto", timeline_step=3))
    workload = replace(job.setup.workload, dtype="bfloat16")
    longer = replace(longer, setup=replace(longer.setup, workload=workload))
    assert changes(longer, tmp_path) == ("run.steps: 100 -> 200", "workload.dtype: float32 -> bfloat16")
    assert changes(job, tmp_path) == ()


def test_random_tokens_have_no_tokenizer() -> None:
    assert tokenizer_of(Data()) == (None, None)
