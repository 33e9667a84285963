"""What tables and messages say: whole plans, the columns that matter, words that agree with numbers, no warnings."""

from __future__ import annotations

import json
import warnings

import pytest
from click.testing import CliRunner
from rich.table import Table

from shardsmith import api
from shardsmith.cli.common import console_for, width_of
from shardsmith.cli.main import main
from shardsmith.layout.check import check
from shardsmith.plan.file import make_setup, make_specs
from shardsmith.specs.cluster import RANGES
from shardsmith.units import counted

EDGES = {
    "device.memory_bandwidth_gbs": "memory_bandwidth_gbs",
    "device.peak_tflops.bfloat16": "peak_tflops",
    "levels.0.bandwidth_gbs": "bandwidth_gbs",
    "levels.0.latency_us": "latency_us",
    "levels.1.bandwidth_gbs": "bandwidth_gbs",
    "levels.1.latency_us": "latency_us",
}


def said(*words: str, width: str = "80") -> str:
    done = CliRunner(env={"COLUMNS": width}).invoke(main, list(words))
    return done.output


@pytest.mark.parametrize("edge", [0, 1])
@pytest.mark.parametrize("keys", [list(EDGES), *([key] for key in EDGES)], ids=lambda keys: keys[0] + f"-{len(keys)}")
def test_figures_at_the_ends_of_their_ranges_are_priced_without_a_warning(keys: list[str], edge: int) -> None:
    sets = [f"cluster.{key}={RANGES[EDGES[key]][edge]:g}" for key in keys]
    plan = "tensor=4,data=2,pipeline=2,zero=3,schedule=interleaved"
    sizes = {"model": "llama3-8b", "cluster": "h100", "nodes": 2, "global_batch": 16, "seq_len": 2048}
    setup = make_setup(plan=plan, dtype="bfloat16", overrides=sets, **sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert api.check(setup).estimate is not None
        assert api.simulate(setup, record=False).seconds > 0
        model, cluster = make_specs("llama3-8b", "h100", nodes=2, overrides=sets)
        assert api.search(model, cluster, global_batch=16, seq_len=2048, fix=["tensor=8"]).plans
        assert api.serve(model, cluster, context=4096, concurrency=8).plans


def test_a_search_warns_of_layers_that_are_counted_but_not_trained() -> None:
    words = ("plan", "--model", "deepseek-v3", "--cluster", "h800", "--nodes", "32", "--global-batch", "512")
    words += ("--seq-len", "4096", "--fix", "tensor=1", "--fix", "pipeline=16", "--fix", "expert=16", "--top", "1")
    words += ("--fix", "schedule=one_f_one_b")
    text = said(*words)
    assert "\n\nwarning[X101]: training layers that predict further tokens is not built yet" in text
    found = json.loads(said(*words, "--json"))
    checked = json.loads(said("check", "--plan", "data=1", "--model", "deepseek-v3", "--json"))
    assert found["warnings"] == [w for w in checked["warnings"] if w["code"] == "X101"]
    assert "expert_tensor" not in text
    assert "replicate" not in text


def test_columns_appear_where_a_plan_has_them_and_no_plan_is_cut() -> None:
    words = ("plan", "--model", "tiny-moe", "--cluster", "h100", "--nodes", "2", "--global-batch", "64")
    words += ("--seq-len", "128", "--top", "3", "--pareto", "2")
    usual, other = [["--fix", f"expert_tensor={n}", "--fix", f"replicate={n}", "--fix", "zero=1"] for n in (1, 2)]
    plain, cut = said(*words, *usual), said(*words, *other)
    head, wide = (text.splitlines()[3] for text in (plain, cut))
    assert "expert_tensor" not in head
    assert "replicate" not in head
    assert "expert_tensor" in wide
    assert "replicate" in wide
    data = json.loads(said(*words, *usual, "--json"))
    for text in (plain, cut):
        assert "…" not in text
    for place, choice in enumerate(data["plans"], 1):
        assert f"{place}. {choice['plan']}\n" in plain
    for place, choice in enumerate(data["pareto"], 1):
        assert f"{place}. {choice['plan']}\n" in plain.partition("plans of that table:\n")[2]


def test_a_narrow_terminal_gets_every_cell() -> None:
    table = Table()
    table.add_column("number", no_wrap=True)
    table.add_column("two words")
    table.add_row("1" * 90, "a" * 30)

    class Narrow:
        """A stream that remembers, as wide as nothing."""

        text = ""

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

        def flush(self) -> None:
            pass

        def isatty(self) -> bool:
            return True

    narrow = Narrow()
    console_for(narrow, width_of(table)).print(table)
    assert "1" * 90 in narrow.text
    assert "a" * 30 in narrow.text


def test_words_agree_with_numbers() -> None:
    assert [counted(1, "rank"), counted(2, "rank"), counted(2, "microbatch")] == ["1 rank", "2 ranks", "2 microbatches"]
    assert "tiny-llama on local, 1 rank: legal" in said("check", "--plan", "data=1")
    assert "1 rank, 1 stage, 1 microbatch;" in said("schedule", "gpipe", "--pipeline", "1", "--microbatches", "1")
    (world,) = (f for f in check(make_setup(plan="data=4", cluster="h100", global_batch=8)) if f.code == "H403")
    assert "1 node x 8 devices" in world.message


def test_a_policy_named_twice_is_refused() -> None:
    plan = make_setup(plan="tensor=2,overlap=chunks+chunks")
    (fault,) = [f for f in check(plan) if f.severity == "error"]
    assert (fault.code, fault.hint) == ("T307", "overlap = chunks")
    both = check(make_setup(plan="tensor=2,overlap=chunks+weight_gradient"))
    assert "T307" not in {f.code for f in both}
