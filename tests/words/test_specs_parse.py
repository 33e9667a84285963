"""Strict reading of tables: nothing ignored, nothing converted, all faults at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from shardsmith.errors import Refused
from shardsmith.plan.plan import Plan
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import ModelSpec
from shardsmith.specs.parse import did_you_mean, parse_table, read_toml


@dataclass(frozen=True, kw_only=True)
class Part:
    width: int


@dataclass(frozen=True, kw_only=True)
class Odd:
    layers: tuple[int, ...] | Literal["weighed"] | None = None
    part: Part | Literal["all"] = "all"


def refusals(cls: type[Any], data: Any, **more: Any) -> dict[str, Any]:
    with pytest.raises(Refused) as caught:
        parse_table(cls, data, source="plan.toml", section="plan", **more)
    return {fault.values[0][1]: fault for fault in caught.value.faults}


def test_values_are_taken_as_written() -> None:
    plan = parse_table(
        Plan, {"tensor": 2, "layers": [3, 1], "bucket_mb": 8, "overlap": ["chunks"]}, source="x", section="plan"
    )
    assert plan == Plan(tensor=2, layers=(3, 1), bucket_mb=8.0, overlap=("chunks",))


def test_h16_misspelt_key_is_refused_with_the_right_one() -> None:
    (fault,) = refusals(Plan, {"tensor_paralel": 2}).values()
    assert fault.code == "F101"
    assert fault.hint == "did you mean tensor?"
    assert fault.values == (("plan.toml", "tensor_paralel = 2"),)


def test_all_faults_at_once_with_values_and_allowed_ones() -> None:
    faults = refusals(
        Plan, {"tensr": 2, "zero": 7, "tensor": True, "layers": [2, 2.5], "compile": 1, "schedule": 3, "data": "2"}
    )
    assert {what: fault.code for what, fault in faults.items()} == {
        "tensr = 2": "F101",
        "zero = 7": "F102",
        "tensor = true": "F102",
        "layers.1 = 2.5": "F102",
        "compile = 1": "F102",
        "schedule = 3": "F102",
        'data = "2"': "F102",
    }
    assert faults["zero = 7"].hint == "zero takes 0, 1, 2 or 3"
    assert faults["tensor = true"].hint == "tensor takes a whole number"


def test_nested_tables_are_as_strict() -> None:
    faults = refusals(ModelSpec, {"rope_scaling": {"factr": 8.0, "kind": "linear"}})
    assert faults["rope_scaling.factr = 8.0"].hint == "did you mean factor?"
    assert faults['rope_scaling.kind = "linear"'].hint == "rope_scaling.kind takes 'llama3' or 'yarn'"


def test_of_alternative_tables_the_one_whose_kind_is_right_was_meant() -> None:
    faults = refusals(ModelSpec, {"rope_scaling": {"kind": "yarn", "factor": 4.0, "beta": 3.0}})
    nested = {what: fault for what, fault in faults.items() if "rope_scaling" in fault.message}
    assert {fault.message: fault.hint for fault in nested.values()} == {
        "[plan] has no key rope_scaling.beta": "did you mean beta_fast or beta_slow?",
        "[plan] lacks rope_scaling.original_context": "add rope_scaling.original_context = ...",
    }
    faults = refusals(ModelSpec, {"rope_scaling": {"low_freq": 1.0}})
    assert faults["rope_scaling.low_freq = 1.0"].hint == "did you mean low_freq_factor?"
    assert not any("original_context" in fault.message for fault in faults.values())


def test_missing_keys_are_each_named() -> None:
    faults = refusals(ModelSpec, {"name": "m"}).values()
    missing = {fault.message.removeprefix("[plan] lacks ") for fault in faults if fault.code == "F103"}
    assert missing == {"layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context"}


@pytest.mark.parametrize("data", [3, "tensor", [1, 2], None])
def test_something_else_than_a_table(data: Any) -> None:
    (fault,) = refusals(Plan, data).values()
    assert fault.code == "F102"
    assert fault.message == "[plan] must be a table"


def test_of_several_allowed_types_the_meant_one_is_explained() -> None:
    assert refusals(Odd, {"layers": [2, 2.5]})["layers.1 = 2.5"].hint == "layers.1 takes a whole number"
    assert refusals(Odd, {"layers": 3})["layers = 3"].hint == "layers takes a list or 'weighed'"
    assert refusals(Odd, {"layers": {}})["layers = {}"].code == "F102"
    assert refusals(Odd, {"part": {"wdth": 1, "width": 2}})["part.wdth = 1"].hint == "did you mean width?"
    assert refusals(Odd, {"part": {}})["[plan] without part.width"].code == "F103"


def test_lists_of_fixed_length_and_infinite_numbers() -> None:
    assert {f.code for f in refusals(Optimisation, {"betas": [0.9], "lr": float("nan")}).values()} == {"F102"}
    assert set(refusals(Optimisation, {"betas": [0.9, 0.95, 0.99]})) == {"betas = [0.9, 0.95, 0.99]"}


def test_a_single_value_may_have_another_origin() -> None:
    faults = refusals(Plan, {"zero": 9, "tensor": 1.5}, sources={"zero": "--set"})
    assert faults["zero = 9"].values[0][0] == "--set"
    assert faults["tensor = 1.5"].values[0][0] == "plan.toml"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"F110.*missing\.toml"):
        read_toml(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("tensor = = 2")
    with pytest.raises(Refused, match=r"F111.*bad\.toml.*line 1"):
        read_toml(tmp_path / "bad.toml")


def test_hints_prefer_what_was_meant() -> None:
    known = ["microbatch", "microbatches", "data", "tensor"]
    assert did_you_mean("microbatc", known) == "did you mean microbatch or microbatches?"
    assert did_you_mean("micro_batch", known) == "did you mean microbatch?"
    assert did_you_mean("tp", known) == "did you mean tensor?"
    assert did_you_mean("xyz", ["b", "a"]) == "one of a, b"
