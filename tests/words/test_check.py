"""Every rule of a plan: codes, values with their origins, legal neighbours, all at once."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from shardsmith import api
from shardsmith.cli.main import main
from shardsmith.errors import CODES, Fault
from shardsmith.layout.axes.tensor import model_degrees
from shardsmith.layout.check import check, examine
from shardsmith.layout.collectives import collectives
from shardsmith.plan.file import make_setup
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup


def setup(line: str = "", **options: object) -> Setup:
    return make_setup(plan=line, **options)  # type: ignore[arg-type]


def codes(found: Setup, *, running: bool = False) -> list[str]:
    return sorted(f.code for f in check(found, running=running))


def only(found: Setup) -> Fault:
    (fault,) = check(found)
    return fault


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["check", *arguments])


def with_model(found: Setup, **changes: object) -> Setup:
    return replace(found, model=found.model.with_(**changes))


REFUSAL = """\
error[T204]: tensor = 8 does not divide 4 key/value heads
  --plan: tensor = 8      tiny-llama: kv_heads = 4
because: each tensor rank owns whole key/value heads
hint: tensor = 4 (tiny-llama allows 1, 2, 4), or replicate_kv = true (+32.00 KiB of weights a rank)"""


def test_a_refusal_reads_as_designed() -> None:
    assert str(only(setup("tensor=8"))) == REFUSAL


def test_h01_two_key_value_heads_on_four_ranks() -> None:
    found = with_model(setup("tensor=4"), kv_heads=2)
    text = str(only(found))
    assert "tensor = 4 does not divide 2 key/value heads" in text
    assert "1, 2" in text


def test_h01_four_key_value_heads_of_size_128_on_eight_ranks() -> None:
    fault = only(with_model(setup("tensor=8"), kv_heads=4, head_dim=128))
    assert fault.code == "T204"
    # Without copies a rank would hold half a head of K and V, 2 x 64 x 128 float32 in each of 4 layers: the same again.
    copies = "replicate_kv = true (+256 KiB of weights a rank)"
    assert fault.hint == f"tensor = 4 (tiny-llama allows 1, 2, 4), or {copies}"


def test_h01_copied_key_value_heads() -> None:
    assert codes(with_model(setup("tensor=4,replicate_kv=true"), kv_heads=2), running=True) == []
    assert codes(with_model(setup("tensor=8,replicate_kv=true"), kv_heads=2), running=True) == []
    # 4 ranks cannot share 3 heads evenly, and copies do not help query heads.
    odd = only(with_model(setup("tensor=4,replicate_kv=true"), heads=12, kv_heads=3, ffn=384))
    assert (odd.code, odd.hint) == ("T204", "tensor = 3 or 6 (tiny-llama allows 1, 3, 6, 12)")
    assert codes(with_model(setup("tensor=16,replicate_kv=true"), kv_heads=2)) == ["T203"]
    assert "replicate_kv" not in only(with_model(setup("tensor=4"), heads=12, kv_heads=3, ffn=384)).hint
    for line in ("tensor=4,replicate_kv=true", "replicate_kv=true"):
        fault = only(setup(line))
        assert (fault.code, fault.severity, fault.hint) == ("T208", "warning", "replicate_kv = false")


def test_tensor_faults_come_together() -> None:
    found = with_model(setup("tensor=3,sequence_parallel=true"), name="m")
    assert codes(found) == ["T203", "T204", "T205", "T206"]
    last = check(found)[-1]
    assert last.hint == "seq_len = 126 or 129, or sequence_parallel = false"
    assert codes(setup("sequence_parallel=true")) == ["T207"]


def test_h06_batch_faults_name_where_each_factor_was_written() -> None:
    fault = only(setup("data=7,microbatch=2", global_batch=256))
    assert fault.values == (
        ("--global-batch", "global_batch = 256"),
        ("--plan", "data = 7"),
        ("--plan", "microbatch = 2"),
    )
    assert fault.hint == "global_batch = 252 or 266"


def test_b02_check_names_the_valid_counts() -> None:
    fault = only(setup("pipeline=2,microbatches=3", global_batch=8))
    assert (fault.code, "1, 2, 4, 8" in fault.hint) == ("B201", True)


def test_n10_sixty_four_ranks_do_not_stand_on_thirty_two_devices() -> None:
    fault = only(setup("tensor=8,pipeline=4,data=2", model="llama3-70b", cluster="h100", nodes=4))
    assert fault.code == "H402"
    assert fault.message == "tensor x pipeline x data = 8 x 4 x 2 = 64 ranks, but 4 nodes x 8 devices = 32"
    assert fault.hint == "data = 1, or pipeline = 2, or tensor = 4, or nodes = 8"


def test_n10_the_two_legal_splits_pass() -> None:
    for line in ("tensor=8,pipeline=4,data=1", "tensor=4,pipeline=2,data=4"):
        assert codes(setup(line, model="llama3-8b", cluster="h100", nodes=4, seq_len=4096)) in ([], ["P305"])


def test_idle_devices_are_a_warning() -> None:
    fault = only(setup("tensor=4", cluster="h100", model="llama3-8b"))
    assert (fault.code, fault.severity) == ("H403", "warning")
    assert fault.hint == "data = 2, or pipeline = 2, or tensor = 8"


def test_c05_zero_without_data_ranks_is_explained() -> None:
    found = setup("tensor=4,zero=2")
    fault = next(f for f in check(found) if f.code == "D103")
    assert fault.severity == "warning"
    assert "each divided by data / replicate x context = 1 / 1 x 1 = 1" in fault.message
    assert "never over tensor or pipeline" in fault.because
    assert "D103" not in codes(setup("tensor=4,zero=2,data=2"))
    assert "D103" in codes(setup("zero=2,data=2,replicate=2"))


def test_states_that_do_not_fit_are_refused_with_a_number() -> None:
    found = setup("tensor=8", model="llama3-70b", cluster="h100", seq_len=4096)
    fault = next(f for f in check(found) if f.code == "H404")
    assert "tensor x pipeline of at least 14 (now 8 x 1)" in fault.hint
    assert "H404" not in codes(setup("tensor=8,pipeline=2", model="llama3-70b", cluster="h100", seq_len=4096))


def test_sequences_longer_than_the_positions() -> None:
    assert only(setup(seq_len=300, model="tiny-gpt")).code == "B204"
    rope = only(setup(seq_len=300))
    assert (rope.code, rope.severity, rope.hint) == ("B205", "warning", "seq_len = 256")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("data=0,tensor=-1,microbatches=0", ["B203", "B203", "B203"]),
        ("order=tensor-data", ["H401"]),
        ("order=tensor-data-data-pipeline", ["H401"]),
        ("data=4,replicate=3", ["D101"]),
        ("bucket_mb=0", ["D102"]),
        ("schedule=one_f_one_bee", ["S001"]),
        ("pipeline=2,stages_per_rank=2", ["S003"]),
        ("pipeline=5", ["P301"]),
        ("pipeline=2,layers=1+1", ["P303"]),
    ],
)
def test_each_rule_has_its_code(line: str, expected: list[str]) -> None:
    found = setup(line, global_batch=24)
    assert codes(found) == expected
    assert all(f.because and f.hint and f.values for f in check(found) if f.code not in ("S001", "S003"))


def test_everything_wrong_comes_at_once() -> None:
    line = "tensor=3,pipeline=5,data=7,zero=1,context=2,order=x"
    found = setup(line, model="tiny-gpt", cluster="h100", global_batch=256, seq_len=300, dtype="bfloat16")
    assert codes(found) == ["B201", "B204", "H401", "H402", "P301", "T203", "T204", "T205"]


def test_what_is_not_built_is_refused_for_a_run_and_a_warning_for_a_thought() -> None:
    found = setup("", model="deepseek-v3")
    faults, refusals = ([f for f in check(found, running=running) if f.code == "X101"] for running in (False, True))
    assert {f.severity for f in faults} == {"warning"}
    assert {f.severity for f in refusals} == {"error"}
    assert all("mtp_layers = 1" in f.values[0][1] for f in faults)


@pytest.mark.parametrize(("key", "code"), [("compile=true", "X106"), ("tensor=2,overlap=chunks", "T306")])
def test_what_experts_cannot_be_combined_with(key: str, code: str) -> None:
    assert [f.code for f in check(setup(key, model="tiny-moe"), running=True) if f.severity == "error"] == [code]


def test_dtypes_that_waste_or_lose_what_they_hold() -> None:
    assert codes(setup(dtype="bfloat16")) == []
    assert codes(setup("reduce_dtype=bfloat16,grad_dtype=float64,optimizer_dtype=bfloat16", dtype="bfloat16")) == []
    assert codes(setup("param_dtype=bfloat16")) == ["D104"]
    assert codes(setup("optimizer_dtype=bfloat16")) == ["D105"]
    assert codes(setup("optimizer_dtype=float16", dtype="float16")) == ["D106"]
    assert codes(setup("reduce_dtype=float64,param_dtype=float64", dtype="float64")) == []


@settings(deadline=None, max_examples=60)
@given(
    tensor=st.integers(1, 8),
    pipeline=st.integers(1, 6),
    data=st.integers(1, 4),
    schedule=st.sampled_from(("gpipe", "one_f_one_b", "interleaved")),
    stages_per_rank=st.none() | st.integers(1, 3),
    microbatches=st.none() | st.integers(1, 5),
    microbatch=st.none() | st.integers(1, 3),
    sequence_parallel=st.booleans(),
)
def test_a_plan_without_errors_has_stages_and_collectives(**degrees: object) -> None:
    base = setup(global_batch=24)
    found = examine(replace(base, plan=Plan(**degrees)))  # type: ignore[arg-type]
    assert bool(found.memory) == (not found.errors)
    if not found.errors:
        assert degrees["tensor"] in model_degrees(base.model)
        for rank in (0, found.setup.plan.world - 1):
            assert all(c.count > 0 and c.bytes > 0 for c in collectives(found.setup, rank))


def test_every_code_explains_itself() -> None:
    api.explain("T204")
    assert all(rule.because and rule.title for rule in CODES.values())
    assert {rule.code[0] for rule in CODES.values()} <= set("FMBDTPSCEXRGHIL")


KEYS = {"errors", "warnings", "unknown", "memory_gib", "step_time_s", "better"}
READ = KEYS | {"workload", "target", "remarks"}


def test_the_verb_prints_one_json_object() -> None:
    good = run("--plan", "tensor=2,pipeline=2,data=2", "--json")
    data = json.loads(good.stdout)
    assert (good.exit_code, data.keys(), data["errors"]) == (0, READ | {"unpriced"}, [])
    assert data["step_time_s"] is None
    assert "local" in data["unpriced"]
    assert [m["stage"] for m in data["memory_gib"]] == [0, 1]
    states = data["memory_gib"][0]
    assert states["states"] == pytest.approx(states["weights"] + states["gradients"] + states["optimizer"])
    bad = run("--plan", "tensor=8", "--json")
    assert (bad.exit_code, [e["code"] for e in json.loads(bad.stdout)["errors"]]) == (1, ["T204"])
    unread = run("--plan", "tensor_paralel=8", "--json")
    data = json.loads(unread.stdout)
    assert (unread.exit_code, data.keys(), data["errors"][0]["hint"]) == (1, KEYS, "did you mean tensor?")


def test_the_verb_reads_files_and_prints_text(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('[model]\npreset = "tiny-llama"\n[workload]\nseq_len = 64\nglobal_batch = 8\n[plan]\ntensor = 8\n')
    result = run(str(file))
    assert result.exit_code == 1
    assert REFUSAL.replace("--plan", str(file)) in result.stdout
    assert "refused (1 error, 0 warnings)" in result.stdout
    file.write_text(file.read_text().replace("tensor = 8", "tensor = 2\ndata = 2"))
    result = run(str(file))
    assert result.exit_code == 0
    assert "4 ranks: legal (0 errors, 0 warnings)" in result.stdout
    assert "optimiser (AdamW)" in result.stdout
    assert run(str(file), "--plan", "tensor=2").exit_code == 1
    assert "F110" in run(str(tmp_path / "none.toml")).stdout


def test_a_refusal_is_quick_and_never_imports_torch() -> None:
    script = (
        "import sys; from shardsmith.cli.main import main\n"
        "try: main(['check', '--plan', 'tensor=8'])\n"
        "except SystemExit as e: assert e.code == 1\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time, as the wall clock of a busy machine says nothing about this code.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0
