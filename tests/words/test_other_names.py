"""What other tools call things is answered with the name here; --set works wherever a plan is taken."""

import pytest
from click.testing import CliRunner

from shardsmith.cli.main import main


def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, list(words))
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("tp=2,pp=2", ("tensor", "pipeline")), ("dp=2", ("data",)), ("cp=2", ("context",)), ("ep=2", ("expert",)),
     ("schedule=1f1b", ("one_f_one_b",)), ("sp=true", ("sequence_parallel",)), ("grad_dtype=bf16", ("bfloat16",))],
)  # fmt: skip
def test_names_of_other_tools_are_hints(typed: str, meant: tuple[str, ...]) -> None:
    code, text = said("check", "--plan", typed)
    assert code == 1
    for name in meant:
        assert f"did you mean {name}" in text


def test_a_dtype_by_its_short_name() -> None:
    code, text = said("verify", "--plan", "data=2", "--dtype", "bf16")
    assert (code, "did you mean bfloat16?" in text) == (1, True)


@pytest.mark.parametrize(
    ("typed", "hint"), [("steps=5", "run.steps=5"), ("tp=2", "plan.tensor=2"), ("optimizer.lr=1", "optimisation.lr=1")]
)
def test_an_override_without_its_table_is_told_which(typed: str, hint: str) -> None:
    code, text = said("check", "--plan", "data=1", "--set", typed)
    assert code == 1
    assert f"did you mean {hint}?" in text


def test_values_are_laid_over_a_plan_in_one_line() -> None:
    code, text = said("check", "--plan", "data=1", "--set", "plan.tensor=2", "--set", "workload.global_batch=4")
    assert (code, "plan: tensor=2" in text) == (0, True)
    code, text = said("check", "--plan", "data=1", "--set", "plan.tensor=8")
    assert code == 1
    assert "--set: tensor = 8" in text
    assert said("simulate", "--plan", "data=1", "--set", "plan.pipeline=2")[0] == 0
