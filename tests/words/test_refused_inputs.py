"""What is refused in words that name the cause: experts, link domains, plan files in the place of models."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardsmith import api
from shardsmith.cli.main import main
from shardsmith.errors import Fault, Refused
from shardsmith.plan.file import dumps, make_setup, make_specs
from shardsmith.plan.plan import Plan
from shardsmith.specs.library import cluster_named, model_named


def refused(model: str = "llama3-8b", cluster: str = "h100", *overrides: str) -> tuple[Fault, ...]:
    with pytest.raises(Refused) as caught:
        make_specs(model, cluster, overrides=overrides)
    return caught.value.faults


@pytest.mark.parametrize(
    ("model", "override", "message", "hint"),
    [
        ("mixtral-8x7b", "top_k=70", "top_k = 70 is more than the 8 experts that there are", "top_k = 8"),
        ("deepseek-v3", "top_k=200", "top_k = 200 is more than the 128 experts of the best 4 groups", "top_k = 128"),
        ("deepseek-v3", "groups=7", "groups = 7 does not divide 256 experts", "groups = 4"),
        ("deepseek-v3", "top_groups=9", "top_groups = 9 is more than 8 groups", "top_groups = 8"),
        ("deepseek-v3", "first_dense=61", "first_dense = 61 leaves no layer with experts of 61", "first_dense = 60"),
        ("mixtral-8x7b", "top_k=0", "top_k = 0 must be 1 or more", "top_k = 1"),
        ("mixtral-8x7b", "shared_ffn=-1", "shared_ffn = -1 must not be negative", "shared_ffn = 0"),
        (
            "mixtral-8x7b",
            "shared_gate=true",
            "shared_gate weighs a shared expert, and there is none",
            "shared_gate = false",
        ),
    ],
)
def test_impossible_experts_name_the_counts_and_a_legal_one(model: str, override: str, message: str, hint: str) -> None:
    (fault,) = refused(model, "h100", f"model.experts.{override}")
    assert (fault.code, fault.message, fault.hint) == ("M108", message, hint)
    key = override.partition("=")[0]
    assert any(value.startswith(f"experts.{key} = ") for _, value in fault.values)
    assert "Experts(" not in str(fault)
    make_specs(model, "h100", overrides=[f"model.experts.{hint.replace(' ', '')}"])


def test_groups_of_one_expert_that_are_scored_by_two_are_refused() -> None:
    score, top_k = refused("deepseek-v3", "h100", "model.experts.groups=256")[::-1]
    assert (score.message, score.hint) == ("a group scored by its two best experts has 1", "groups = 128")
    assert top_k.message == "top_k = 8 is more than the 4 experts of the best 4 groups"
    make_specs("deepseek-v3", "h100", overrides=["model.experts.groups=128"])


def test_experts_of_a_plain_mlp_are_refused() -> None:
    faults = refused("mixtral-8x7b", "h100", 'model.activation="gelu"')
    assert [fault.hint for fault in faults if fault.code == "M108"] == ['activation = "swiglu"']


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (("cluster.levels.0.size=3",), "size = 8"),
        (("cluster.levels.0.size=12",), "size = 8"),
        (("cluster.devices_per_node=6",), "size = 6"),
    ],
)
def test_a_domain_that_ends_inside_a_node_is_refused(overrides: tuple[str, ...], hint: str) -> None:
    (fault,) = refused("llama3-8b", "h100", *overrides)
    assert (fault.code, fault.hint) == ("H106", hint)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 72])
def test_a_domain_of_whole_nodes_or_of_an_equal_part_is_taken(size: int) -> None:
    _, cluster = make_specs("llama3-8b", "h100", nodes=32, overrides=[f"cluster.levels.0.size={size}"])
    assert cluster.levels[0].size == size


def test_a_slower_inner_link_is_warned_of_where_a_plan_is_priced() -> None:
    slow = ["cluster.levels.0.bandwidth_gbs=30"]
    ask = {"global_batch": 16, "seq_len": 1024, "dtype": "bfloat16"}
    setup = make_setup(plan="tensor=8", model="llama3-8b", cluster="h100", nodes=1, overrides=slow, **ask)  # type: ignore[arg-type]
    assert [fault.code for fault in api.check(setup).faults if fault.code == "H107"] == ["H107"]
    found = api.search(*make_specs("llama3-8b", "h100", nodes=1, overrides=slow), fix=["tensor=8"], top=1, **ask)  # type: ignore[arg-type]
    assert [fault.code for fault in found.warnings] == ["H107"]
    usual = api.search("llama3-8b", "h100", nodes=1, fix=["tensor=8"], top=1, **ask)  # type: ignore[arg-type]
    assert usual.warnings == ()


def test_a_plan_file_in_the_place_of_a_model_or_cluster_is_named(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(dumps(make_setup(plan="data=2")), encoding="utf-8")
    for read, kind in ((model_named, "model"), (cluster_named, "cluster")):
        with pytest.raises(Refused) as caught:
            read(file)
        (fault,) = caught.value.faults
        assert fault.code == "F113"
        assert fault.message == f"{file} is a plan file, not a {kind}"
        assert f"shardsmith check {file}" in fault.hint


def test_an_imbalance_without_experts_says_so() -> None:
    with pytest.raises(Refused) as caught:
        api.search("llama3-8b", "h100", nodes=1, global_batch=8, seq_len=1024, imbalance=1.3)
    (fault,) = caught.value.faults
    assert (fault.code, fault.message) == ("E107", "imbalance = 1.3, but this model has no experts")


def test_an_unknown_key_of_a_plan_is_answered_by_all_keys() -> None:
    answer = CliRunner().invoke(main, ["check", "--plan", "foo=1"])
    (hint,) = [line for line in answer.output.splitlines() if line.startswith("hint: one of ")]
    assert set(hint.removeprefix("hint: one of ").split(", ")) == {field.name for field in fields(Plan)}
