"""A run that begins with given weights: any format, any plan; and nothing that a folder holds is overwritten."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpointing import MODEL, Rank, job_of, run_job
from click.testing import CliRunner
from safetensors.torch import load_file

from shardsmith import api
from shardsmith.cli.main import main
from shardsmith.engine.checkpoint.convert import convert
from shardsmith.engine.checkpoint.hugging_face import write_hugging_face
from shardsmith.engine.checkpoint.run_folder import write_run
from shardsmith.engine.checkpoint.source import in_memory
from shardsmith.engine.checkpoint.whole import write_full
from shardsmith.errors import Refused
from shardsmith.plan.file import dumps, read_job
from shardsmith.specs.model import ModelSpec, weights

pytestmark = pytest.mark.ranks

FORMATS = ("hugging_face", "run", "checkpoint")


def tensors_of(model: ModelSpec, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {w.name: torch.randn(w.shape, generator=generator, dtype=torch.float64).to(dtype) for w in weights(model)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same weights in every format."""
    root = tmp_path_factory.mktemp("weights")
    source = in_memory(MODEL, tensors_of(MODEL))
    for kind, write in (("hugging_face", write_hugging_face), ("run", write_run)):
        (root / kind).mkdir()
        write(source, root / kind)
    write_full(root / "checkpoint", source, model=MODEL)
    return root


def begun(job):
    """All full tensors after the beginning, on rank 0, and the loss of a step."""
    rank = Rank(job)
    rank.checkpoints.resume()
    return rank.state(), rank.checkpoints.step, rank.steps(0, 1)


# tied embeddings on two stages, vocabulary and other dims uneven over all axes, every ZeRO level
PLANS = {
    "one rank": "",
    "2 x 2": "tensor=2,pipeline=2,microbatches=3",
    "ZeRO 1": "data=3,zero=1",
    "ZeRO 2": "data=2,pipeline=2,zero=2,microbatches=3",
    "ZeRO 3": "data=2,tensor=2,zero=3",
}


@pytest.mark.parametrize("plan", PLANS)
def test_any_plan_begins_with_these_weights_to_the_bit(folders, tmp_path, plan):
    expected = tensors_of(MODEL)
    kinds = FORMATS if plan in ("one rank", "ZeRO 3") else ("hugging_face",)
    losses = set()
    for kind in kinds:
        job = job_of(tmp_path, PLANS[plan], init=str(folders / kind))
        state, step, (loss,) = run_job(begun, job)[0]
        assert step == 0
        wrong = [name for name, tensor in expected.items() if not np.array_equal(state[name], tensor.numpy())]
        assert not wrong, kind
        losses.add(loss)
    assert len(losses) == 1


def test_narrow_weights_are_kept_exactly_by_wide_masters(tmp_path):
    (tmp_path / "run").mkdir()
    narrow = tensors_of(MODEL, torch.bfloat16)
    write_run(in_memory(MODEL, narrow), tmp_path / "run")
    job = job_of(tmp_path / "new", "data=2,zero=1", dtype="bfloat16", init=str(tmp_path / "run"))
    state, _, _ = run_job(begun, job)[0]
    assert all(np.array_equal(state[name], tensor.float().numpy()) for name, tensor in narrow.items())


def trained(job):
    api.train(job)
    folder = Path(job.run.folder)
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_from_a_converted_one_where_it_stood(folders, tmp_path):
    """The loss of the first step is that of the weights, and training from a run's result lowers it further."""
    first = job_of(tmp_path / "first", "data=2", steps=3, tensorboard=False, init=str(folders / "hugging_face"))
    losses = trained(first)
    convert(tmp_path / "first", tmp_path / "hub")
    again = replace(first, run=replace(first.run, folder=str(tmp_path / "again"), init=str(tmp_path / "hub"), steps=1))
    whole = replace(first, run=replace(first.run, folder=str(tmp_path / "whole"), steps=4))
    assert trained(whole)[:3] == losses
    # the same samples as in step 0, seen by trained weights
    assert trained(again)[0] < losses[0]
    assert (tmp_path / "again" / "run.toml").is_file()
    assert read_job(tmp_path / "again" / "run.toml") == again


def refusal(job) -> list[tuple[str, str, str]]:
    with pytest.raises(Refused) as refused:
        api.train(job)
    return [(fault.code, fault.message, fault.hint) for fault in refused.value.faults]


def test_a_fresh_start_overwrites_neither_weights_nor_a_run(folders, tmp_path):
    shutil.copytree(folders / "run", tmp_path / "run")
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    job = job_of(tmp_path / "run", "", steps=1, tensorboard=False)
    for overwrite in (False, True):  # nothing that no run has written may go
        ((code, message, hint),) = refusal(replace(job, run=replace(job.run, overwrite=overwrite)))
        assert (code, "weights that no run wrote" in message) == ("F512", True)
        assert f'run.init = "{tmp_path / "run"}"' in hint
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["model.safetensors", "model.toml"]

    job = job_of(tmp_path / "new", "", steps=2, tensorboard=False, timeline_step=1)
    losses = trained(job)
    ((code, _, hint),) = refusal(job)
    assert (code, "run.overwrite = true" in hint) == ("F512", True)
    foreign = job_of(tmp_path / "new", "", resume=str(folders / "checkpoint"))
    assert [code for code, _, _ in refusal(foreign)] == ["F512"]
    short = replace(job, run=replace(job.run, steps=1, overwrite=True, timeline_step=-1))
    assert trained(short) == losses[:1]
    assert not (tmp_path / "new" / "timeline.json").exists(), "what the earlier run left would be taken for this one's"


def test_resume_with_weights_names_the_key_that_takes_them(folders, tmp_path):
    for kind in ("run", "hugging_face"):
        ((code, _, hint),) = refusal(job_of(tmp_path, "", resume=str(folders / kind)))
        assert (code, f'run.init = "{folders / kind}"' in hint) == ("F506", True)


def test_weights_of_another_model_are_refused_before_a_rank_starts(folders, tmp_path):
    other = MODEL.with_(layers=5, norm_eps=1e-6, dropout=0.1)
    found = refusal(job_of(tmp_path / "a", "", model=other, init=str(folders / "hugging_face")))
    assert [(code, message.split()[0]) for code, message, _ in found] == [
        ("F503", "model.layers"),
        ("F503", "model.norm_eps"),
    ]
    assert found[0][2] == f'[model] hf = "{folders / "hugging_face"}"'
    assert not (tmp_path / "a").exists()
    nothing = job_of(tmp_path / "a", "", init=str(tmp_path / "none"))
    assert [code for code, _, _ in refusal(nothing)] == ["F406"]
    shutil.copytree(folders / "hugging_face", tmp_path / "torn")
    file = tmp_path / "torn" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert [code for code, _, _ in refusal(job_of(tmp_path / "a", "", init=str(tmp_path / "torn")))] == ["F405"]


def test_two_beginnings_are_one_too_many(folders, tmp_path):
    init = str(folders / "run")
    assert [c for c, _, _ in refusal(job_of(tmp_path, "", init=init, resume=str(folders / "checkpoint")))] == ["F513"]
    assert [c for c, _, _ in refusal(job_of(init, "", init=init))] == ["F513"]


def test_longer_reach_is_trained_for_and_said():
    from shardsmith.engine.checkpoint.record import start_faults
    from shardsmith.specs.library import model_named

    llama = model_named("tiny-llama")
    (warning,) = start_faults(llama, llama.with_(rope_theta=5e5), "hub")
    assert (warning.code, warning.severity) == ("F503", "warning")
    assert [f.severity for f in start_faults(MODEL, MODEL.with_(context=32), "hub")] == ["error"]


def test_the_newcomer_who_converts_and_trains(folders, tmp_path, monkeypatch):
    """convert; resume from it is refused with the key that works; that key works; again is refused; a word is said."""
    monkeypatch.chdir(tmp_path)
    job = job_of("runs/ft", "data=2", steps=2, tensorboard=False)
    Path("job.toml").write_text(dumps(job))

    def said(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, [str(word) for word in words])
        return done.exit_code, done.output

    assert said("convert", folders / "hugging_face", "q2-run")[0] == 0
    code, text = said("train", "job.toml", "--set", "run.resume=q2-run")
    assert (code, 'run.init = "q2-run"' in text) == (1, True)
    code, text = said("train", "job.toml", "--set", "run.folder=q2-run")
    assert (code, "F512" in text) == (1, True)
    code, text = said("train", "job.toml", "--set", "run.init=q2-run", "--set", "run.save_every=1")
    assert code == 0, text
    assert torch.equal(load_file("q2-run/model.safetensors")["embedding.weight"], tensors_of(MODEL)["embedding.weight"])
    code, text = said("train", "job.toml", "--set", "run.init=q2-run", "--set", "run.save_every=1")
    assert (code, text.splitlines()[-1][:50]) == (0, "nothing left to do: all 2 steps are done, loss "[:50])
