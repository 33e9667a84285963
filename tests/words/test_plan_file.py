"""Plans as files and in one line; jobs; batch arithmetic; differences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardsmith.errors import Refused
from shardsmith.plan.diff import diff
from shardsmith.plan.file import (
    Batching,
    batching,
    dumps,
    loads,
    make_setup,
    parse_plan_line,
    read_job,
    read_setup,
)
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Job
from shardsmith.specs.job import Optimisation, Run, Workload

DTYPES = st.sampled_from((None, "float64", "float32", "bfloat16", "float16"))
COUNT = st.integers(1, 4096)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
PLANS = st.builds(
    Plan,
    **dict.fromkeys(
        ("data", "tensor", "pipeline", "context", "ulysses", "expert", "expert_tensor", "replicate"), COUNT
    ),
    **dict.fromkeys(("stages_per_rank", "microbatch", "microbatches"), st.none() | COUNT),
    **dict.fromkeys(("param_dtype", "grad_dtype", "reduce_dtype", "optimizer_dtype"), DTYPES),
    **dict.fromkeys(("sequence_parallel", "replicate_kv", "compile"), st.booleans()),
    order=st.just("tensor-context-data-pipeline") | TEXT,
    zero=st.sampled_from((0, 1, 2, 3)),
    zero_gather=st.sampled_from(("per_pass", "per_step")),
    bucket_mb=st.floats(0, 1e9),
    schedule=st.sampled_from(("gpipe", "one_f_one_b", "file:my grids/a,b=1.txt")) | TEXT,
    layers=st.none() | st.just("weighed") | st.lists(st.integers(0, 99), max_size=5).map(tuple),
    recompute=st.sampled_from(("none", "selective", "full")),
    overlap=st.lists(st.sampled_from(("half_microbatches", "weight_gradient", "chunks")), max_size=3).map(tuple),
    capacity_factor=st.none() | st.floats(0.1, 8),
)


def refused(call: object, *args: object, **kwargs: object) -> Refused:
    with pytest.raises(Refused) as caught:
        call(*args, **kwargs)  # type: ignore[operator]
    return caught.value


def write(folder: Path, text: str, name: str = "plan.toml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


@settings(deadline=None)
@given(plan=PLANS)
def test_one_line_form_round_trips(plan: Plan) -> None:
    assert parse_plan_line(str(plan)) == plan


@settings(deadline=None)
@given(plan=PLANS.filter(lambda p: p.layers != "weighed"))
def test_toml_round_trips(plan: Plan) -> None:
    setup = replace(make_setup(plan="tensor=2", model="llama3-8b", cluster="h100", nodes=2), plan=plan)
    assert loads(dumps(setup)).setup == setup


def test_a_job_round_trips() -> None:
    setup = make_setup(plan="tensor=2,data=3", model="llama3-8b")
    job = Job(setup=setup, optimisation=Optimisation(betas=(0.8, 0.9), lr=1e-3), run=Run(steps=3, timeline_step=2))
    assert loads(dumps(job)) == job


def test_h16_a_misspelt_key_is_an_error_with_the_right_one() -> None:
    fault = refused(parse_plan_line, "tensor_paralel=2").faults[0]
    assert fault.code == "F101"
    assert fault.hint == "did you mean tensor?"
    assert fault.values == (("--plan", "tensor_paralel = 2"),)


def test_all_faults_of_a_line_come_at_once() -> None:
    error = refused(parse_plan_line, "pipeline,data=x,data=3,layers=auto,zero=7,sequence_parallel=yes")
    assert sorted(f.code for f in error.faults) == ["F102"] * 4 + ["F201", "F202"]
    assert "zero takes 0, 1, 2 or 3" in str(error)


def test_all_faults_of_a_file_come_at_once_over_all_tables(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        [model]
        preset = "tiny-lama"
        [worklod]
        seq_len = 12
        [cluster]
        preset = "h100"
        nodes = 0
        [plan]
        tensor_paralel = 2
        zero = 7
        """,
    )
    error = refused(read_setup, file)
    assert sorted(f.code for f in error.faults) == ["F101", "F101", "F102", "F204", "H102", "M001"]
    for word in ("tiny-llama", "workload", "did you mean tensor?", "nodes = 0", str(file)):
        assert word in str(error)


def test_model_and_cluster_presets_take_overrides(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        [model]
        preset = "tiny-llama"
        layers = 6
        [workload]
        seq_len = 64
        global_batch = 8
        [cluster]
        preset = "a100"
        nodes = 2
        [plan]
        tensor = 2
        """,
    )
    setup = read_setup(file)
    assert (setup.model.layers, setup.model.hidden, setup.cluster.devices) == (6, 128, 16)
    keys = ("plan.tensor", "plan.data", "model.layers", "model.heads", "workload.seq_len", "cluster.nodes")
    assert setup.said(*keys) == (
        (str(file), "tensor = 2"),
        ("default", "data = 1"),
        (str(file), "layers = 6"),
        ("tiny-llama", "heads = 8"),
        (str(file), "seq_len = 64"),
        (str(file), "nodes = 2"),
    )


def test_a_hugging_face_config_is_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    config = '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}'
    write(tmp_path, config, "small/config.json")
    tables = '[model]\nhf = "small"\nvocab = 100\n[workload]\nseq_len = 8\nglobal_batch = 1\n'
    model = read_setup(write(tmp_path, tables)).model
    assert (model.name, model.layers, model.vocab) == ("small", 3, 100)
    both = refused(read_setup, write(tmp_path, tables.replace("vocab = 100", 'preset = "tiny-llama"')))
    assert [f.code for f in both.faults] == ["F205"]


def test_unreadable_files_are_refused_with_a_code(tmp_path: Path) -> None:
    assert refused(read_setup, tmp_path / "none.toml").faults[0].code == "F110"
    assert refused(read_setup, tmp_path).faults[0].code == "F110"
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00[plan]")
    assert refused(read_setup, binary).faults[0].code == "F111"
    syntax = refused(read_setup, write(tmp_path, "[plan]\ntensor = \n")).faults[0]
    assert syntax.code == "F111"
    assert "line 2" in syntax.message


def test_a_table_of_another_type_is_refused(tmp_path: Path) -> None:
    error = refused(read_setup, write(tmp_path, "model = 3\nworkload = 4\ncluster = 5\nplan = 6\n"))
    assert [f.code for f in error.faults] == ["F102"] * 4


JOB = """
[data]
path = "text"
[run]
steps = 7
"""
TABLES = """
[model]
preset = "tiny-llama"
[workload]
seq_len = 64
global_batch = 8
[plan]
tensor = 2
"""


def test_a_job_names_its_plan_file(tmp_path: Path) -> None:
    plan = write(tmp_path, TABLES)
    job = read_job(write(tmp_path, 'plan = "plan.toml"\n' + JOB, "job.toml"))
    assert (job.setup.plan.tensor, job.run.steps, job.data.path) == (2, 7, "text")
    assert job.setup.said("plan.tensor") == ((str(plan), "tensor = 2"),)
    twice = write(tmp_path, 'plan = "plan.toml"\n' + JOB + '[model]\npreset = "tiny-gpt"\n', "twice.toml")
    assert [f.code for f in refused(read_job, twice).faults] == ["F205"]
    gone = write(tmp_path, 'plan = "other.toml"\n' + JOB, "gone.toml")
    assert "other.toml" in str(refused(read_job, gone))


def test_overrides_go_over_the_file_and_are_named_in_faults(tmp_path: Path) -> None:
    file = write(tmp_path, TABLES + JOB, "job.toml")
    sets = ["plan.tensor=4", "plan.layers=1+3", "optimisation.betas=[0.8, 0.9]", "run.tensorboard=false", "run.steps=2"]
    job = read_job(file, [*sets, "data.path=other", "model.preset=tiny-gpt", "optimisation.lr=1e-2"])
    assert (job.setup.plan.tensor, job.setup.plan.layers, job.setup.model.name) == (4, (1, 3), "tiny-gpt")
    assert (job.optimisation.betas, job.optimisation.lr, job.run.tensorboard) == ((0.8, 0.9), 0.01, False)
    assert (job.run.steps, job.data.path) == (2, "other")
    assert job.setup.said("plan.tensor") == (("--set", "tensor = 4"),)
    error = refused(read_job, file, ["plan.tensor", "plam.tensor=2", "run.stps=2", "plan.zero=x"])
    assert sorted(f.code for f in error.faults) == ["F101", "F101", "F102", "F208"]
    assert all(f.values[0][0] == "--set" for f in error.faults)
    assert "did you mean steps?" in str(error)


def test_one_line_setups_fill_in_the_workload() -> None:
    setup = make_setup(plan="tensor=2,pipeline=2,data=3")
    assert (setup.model.name, setup.cluster.name) == ("tiny-llama", "local")
    assert setup.workload == Workload(seq_len=128, global_batch=12)
    assert setup.said("workload.global_batch") == (("default", "global_batch = 12"),)
    assert make_setup(plan="microbatch=2,microbatches=5").workload.global_batch == 10
    stated = make_setup(plan="", seq_len=16, global_batch=4, dtype="float64")
    assert stated.workload == Workload(seq_len=16, global_batch=4, dtype="float64")


def test_options_go_over_a_file(tmp_path: Path) -> None:
    file = write(tmp_path, TABLES)
    setup = make_setup(file, model="tiny-gpt", cluster="a100", nodes=2, seq_len=32)
    assert (setup.model.name, setup.cluster.devices, setup.workload.seq_len, setup.plan.tensor) == (
        "tiny-gpt",
        16,
        32,
        2,
    )
    assert setup.said("workload.seq_len", "workload.global_batch") == (
        ("--seq-len", "seq_len = 32"),
        (str(file), "global_batch = 8"),
    )
    for inputs in ({}, {"file": file, "plan": "tensor=2"}):
        assert refused(make_setup, **inputs).faults[0].code == "F203"


@pytest.mark.parametrize(
    ("line", "batch", "expected"),
    [
        ("data=2", 8, (1, 4)),
        ("data=2,microbatch=2", 8, (2, 2)),
        ("data=2,microbatches=2", 8, (2, 2)),
        ("data=2,microbatch=4,microbatches=1", 8, (4, 1)),
    ],
)
def test_two_of_three_fix_the_third(line: str, batch: int, expected: tuple[int, int]) -> None:
    found = batching(parse_plan_line(line), Workload(seq_len=8, global_batch=batch))
    assert found == Batching(microbatch=expected[0], microbatches=expected[1])


def test_h06_an_odd_number_of_devices_gets_the_nearest_batches() -> None:
    error = refused(batching, Plan(data=7, microbatch=2), Workload(seq_len=8, global_batch=256))
    (fault,) = error.faults
    assert fault.message == "global_batch = 256 is not a multiple of data x microbatch = 7 x 2 = 14"
    assert fault.hint == "global_batch = 252 or 266"


def test_b02_an_indivisible_batch_names_the_valid_counts() -> None:
    (fault,) = refused(batching, Plan(microbatches=3, pipeline=2), Workload(seq_len=8, global_batch=8)).faults
    assert fault.code == "B201"
    assert "global_batch = 8" in fault.message
    assert "3" in fault.message
    assert "microbatches = one of 1, 2, 4, 8" in fault.hint


def test_a_clash_of_all_three_names_every_factor() -> None:
    plan = Plan(data=2, microbatch=2, microbatches=3)
    (fault,) = refused(batching, plan, Workload(seq_len=8, global_batch=16)).faults
    assert fault.code == "B202"
    assert fault.message == "data x microbatch x microbatches = 2 x 2 x 3 = 12, but global_batch = 16"
    assert fault.hint == "global_batch = 12, or microbatches = 4"


def test_sizes_below_one_are_refused_before_dividing() -> None:
    error = refused(batching, Plan(data=0, microbatch=-1), Workload(seq_len=8, global_batch=0))
    assert [f.code for f in error.faults] == ["B203"] * 3


def test_diff_names_what_changed() -> None:
    changes = diff(Plan(tensor=2, layers=(1, 3)), Plan(data=2, tensor=4))
    assert [str(c) for c in changes] == ["data: 1 -> 2", "tensor: 2 -> 4", "layers: [1, 3] -> not stated"]
    assert diff(Plan(data=2), Plan(data=2)) == ()
