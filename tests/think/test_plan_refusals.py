"""Questions without an answer: every way out that a hint names is one, and what cannot be written is said before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardsmith import api
from shardsmith.cli.main import main
from shardsmith.errors import Refused

SHARDSMITH = Path(sys.executable).parent / "shardsmith"
ASK = {"nodes": 1, "global_batch": 16, "seq_len": 2048, "top": 1}
EXCLUDED = {
    "a batch that nothing divides": {"nodes": 97, "global_batch": 13},
    "a batch too small for halves": {"global_batch": 1, "fix": ["overlap=half_microbatches"]},
    "microbatches that do not divide the batch": {"fix": ["microbatches=3"]},
    "degrees beyond the devices": {"fix": ["tensor=8", "pipeline=8"]},
    "key/value heads that need no copies": {"fix": ["replicate_kv=true"]},
    "states with nothing to shard over": {"fix": ["zero=3", "tensor=8"]},
    "replicas without shards": {"fix": ["replicate=2", "zero=0"]},
    "replicas that no data ranks make": {"fix": ["replicate=3"]},
    "too few microbatches": {"fix": ["schedule=dualpipe_v", "pipeline=2", "microbatches=1"]},
    "a weighed split of one stage": {"fix": ["layers=weighed", "pipeline=1"]},
    "too many stages": {"fix": ["stages_per_rank=99"]},
}


def ways_out(hint: str, asked: dict[str, object]) -> list[dict[str, object]]:
    """The questions that a hint of L101 proposes in the place of `asked`."""
    found = []
    for part in hint.split(", or "):
        if part.startswith("leave out "):
            for key in part.removeprefix("leave out ").split(" or "):
                kept = [text for text in asked["fix"] if not text.startswith(f"{key}=")]  # type: ignore[attr-defined]
                found.append(asked | {"fix": kept})
        elif " = " in part:
            key, value = part.split(" = ")
            found.append(asked | {key: int(value)})
    return found


@pytest.mark.parametrize("name", EXCLUDED)
def test_every_way_out_of_fields_that_exclude_all_is_one(name: str) -> None:
    asked = ASK | EXCLUDED[name]  # type: ignore[operator]
    with pytest.raises(Refused) as caught:
        api.search("llama3-8b", "h100", **asked)
    (fault,) = caught.value.faults
    assert fault.code == "L101"
    others = ways_out(fault.hint, asked)
    assert others
    for other in others:
        assert api.search("llama3-8b", "h100", **other).plans


def test_what_is_held_may_rule_out_all_of_the_usual_plans() -> None:
    """Usual plans overlap what they can, here weight gradients, and a split backward puts those off."""
    ask = ASK | {"target": "megatron-lm-3", "fix": ["schedule=zb_h1", "tensor=2"]}
    with pytest.raises(Refused, match=r"L102.*schedule=zb_h1") as caught:
        api.search("deepseek-v3", "h100", **ask)  # type: ignore[arg-type]
    assert "a device with" in caught.value.faults[0].hint


def test_values_in_a_refusal_read_as_they_are_given() -> None:
    with pytest.raises(Refused) as caught:
        api.search("llama3-8b", "h100", **ASK, fix=["overlap=chunks", "sequence_parallel=true", "tensor=1"])
    said = {what for where, what in caught.value.faults[0].values if where == "--fix"}
    assert said == {"overlap = chunks", "sequence_parallel = true", "tensor = 1"}


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"checkpoint_minutes": 1e9}, "checkpoint_minutes = "),
        ({"checkpoint_minutes": 1e-300}, "checkpoint_minutes = "),
        ({"mtbf_hours": 1.0}, "4 devices or fewer"),
        ({"mtbf_hours": 5e-324}, "devices that fail less often"),
    ],
)
def test_a_run_that_never_ends_is_refused_before_the_search(
    options: dict[str, float], hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("shardsmith.design.planner.search.Bounded", None)
        with pytest.raises(Refused, match="L301") as caught:
            api.search("llama3-8b", "h100", **ASK, tokens=1e9, **options)  # type: ignore[arg-type]
    assert hint in caught.value.faults[0].hint
    if "checkpoint_minutes" in options:
        minutes = float(caught.value.faults[0].hint.split(" = ")[1].split(",")[0])
        assert api.search("llama3-8b", "h100", **ASK, tokens=1e9, checkpoint_minutes=minutes).totals["goodput"] > 0.99  # type: ignore[arg-type]


def test_nodes_that_fail_too_often_do_not_hide_fewer_that_do_not() -> None:
    ask = {"global_batch": 64, "seq_len": 2048, "top": 1, "fix": ["context=1", "pipeline=1"]}
    goal = {"nodes": 64, "tokens": 1e9, "days": 2.0, "goal": "cheapest", "mtbf_hours": 20.0}
    found = api.search("llama3-8b", "h100", **ask, **goal)  # type: ignore[arg-type]
    assert found.totals["days"] <= 2
    with pytest.raises(Refused, match="L301"):
        api.search("llama3-8b", "h100", **ask, nodes=64, tokens=1e9, mtbf_hours=20.0)  # type: ignore[arg-type]


def test_names_that_are_empty_stand_for_nothing() -> None:
    with pytest.raises(Refused, match="X351"):
        api.search("llama3-8b", "h100", **ASK, target="")  # type: ignore[arg-type]
    done = CliRunner().invoke(main, ["simulate", "--plan", "pipeline=2", "--model", ""])
    assert done.exit_code == 1


@pytest.mark.parametrize("option", ["--out", "--html"])
@pytest.mark.parametrize("place", ["", "file/inside", "folder"])
def test_a_file_that_cannot_be_written_is_refused_before_the_search(
    option: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(api, "search", None)
    words = ["plan", "--model", "gpt2", "--cluster", "h100", "--global-batch", "8", "--seq-len", "128"]
    done = CliRunner().invoke(main, [*words, option, str(tmp_path / place)])
    assert done.exit_code == 1
    assert "error[F801]" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_answer_that_nobody_can_take_is_an_error_of_its_own(form: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([SHARDSMITH, "check", "--plan=", *form], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error[F801]: standard output: No space left")


def test_a_terminal_without_the_signs_of_a_timeline_shows_the_rest() -> None:
    words = [SHARDSMITH, "simulate", "--plan", "pipeline=2"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, capture_output=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert b"makespan" in done.stdout
