"""`--set` reaches nested keys, is refused where it leads nowhere, and figures that no machine has are refused."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from shardsmith.cli.main import main
from shardsmith.errors import Fault, Refused
from shardsmith.plan.file import make_setup, make_specs
from shardsmith.plan.setup import Setup


def setup_with(*overrides: str, cluster: str = "h100", model: str = "llama3-8b") -> Setup:
    return make_setup(plan="data=8", model=model, cluster=cluster, overrides=overrides)


def refused(*overrides: str, cluster: str = "h100") -> list[Fault]:
    with pytest.raises(Refused) as error:
        setup_with(*overrides, cluster=cluster)
    return list(error.value.faults)


def test_nested_figures_of_a_preset_are_laid_over() -> None:
    changed = setup_with(
        "cluster.levels.1.bandwidth_gbs=25",
        "cluster.levels.0.size=4",
        "cluster.device.memory_gib=141.5",
        "cluster.device.peak_tflops.bfloat16=400",
        "cluster.nodes=2",
        "model.rope_scaling.factor=16",
    )
    cluster, plain = changed.cluster, setup_with().cluster
    assert (cluster.nodes, cluster.levels[0].size, cluster.levels[1].bandwidth_gbs) == (2, 4, 25)
    assert (cluster.device.memory_gib, cluster.device.peak("bfloat16")) == (141.5, 400e12)
    assert cluster.device.peak("float16") == plain.device.peak("float16")
    assert cluster.levels[1].latency_us == plain.levels[1].latency_us
    assert cluster.levels[1].origin == plain.levels[1].origin + "; --set: bandwidth_gbs"
    assert cluster.device.origin == plain.device.origin + "; --set: memory_gib, bfloat16"
    assert changed.model.rope_scaling is not None
    assert changed.model.rope_scaling.factor == 16


def test_the_last_of_two_overrides_holds_and_a_whole_list_replaces_its_places() -> None:
    assert setup_with("cluster.levels.0.size=2", "cluster.levels.0.size=4").cluster.levels[0].size == 4
    twice = make_setup(plan="pipeline=2,layers=2+2", overrides=["plan.layers.0=3", "plan.layers.1=1"])
    assert twice.plan.layers == (3, 1)
    whole = make_setup(plan="pipeline=2,layers=2+2", overrides=["plan.layers.0=3", "plan.layers=1+3"])
    assert whole.plan.layers == (1, 3)


@pytest.mark.parametrize(
    ("override", "code", "hint"),
    [
        ("cluster.levels.0.bandwidth_gb_s=1", "F101", "did you mean bandwidth_gbs?"),
        ("cluster.levels.2.size=1", "F101", "one of levels.0 (nvlink), levels.1 (infiniband)"),
        ("cluster.levels.nvlink.size=1", "F101", "one of levels.0 (nvlink), levels.1 (infiniband)"),
        ("cluster.memory_gib=1", "F101", "did you mean device.memory_gib?"),
        ("cluster.latency_us=1", "F101", "did you mean levels.0.latency_us?"),
        ("cluster.devce.memory_gib=1", "F101", "did you mean device?"),
        ("cluster.nodes.x=1", "F101", "cluster.nodes=..."),
        ("cluster.levels.0=1", "F102", "levels.0 takes a table"),
        ("cluster.levels.0.size=four", "F102", "levels.0.size takes a whole number"),
        ("cluster.device.peak_tflops.bf16=1", "F102", "device.peak_tflops.bf16 takes 'float64', "),
        ("cluster.levels..size=1", "F208", "plan.tensor=2"),
        ("model.experts.top_k=2", "F103", "add experts.count = ..."),
    ],
)
def test_an_override_that_leads_nowhere_is_told_where(override: str, code: str, hint: str) -> None:
    fault = refused(override)[0]
    assert (fault.code, fault.hint[: len(hint)]) == (code, hint)
    if code != "F103":
        assert fault.values[0][0] == "--set"


def test_a_cluster_without_links_says_so() -> None:
    (fault,) = refused("cluster.levels.0.size=1", cluster="local")
    assert "empty here" in fault.hint


@pytest.mark.parametrize(
    ("override", "least"),
    [
        ("cluster.levels.0.bandwidth_gbs=1e-300", "1e-06 to 1e+06"),
        ("cluster.levels.1.latency_us=1e300", "0.001 to 1e+07"),
        ("cluster.device.memory_gib=1e12", "0.001 to 1e+06"),
        ("cluster.device.memory_bandwidth_gbs=1e-9", "0.001 to 1e+06"),
        ("cluster.device.peak_tflops.bfloat16=989400000000000", "1e-06 to 1e+06"),
        ("cluster.nodes=" + "9" * 400, "1 to 1e+15"),
        ("cluster.levels.0.size=99999999999", "1 to 1e+09"),
    ],
)
def test_a_figure_that_no_machine_has_is_refused_with_its_range(override: str, least: str) -> None:
    key = override.partition("=")[0].removeprefix("cluster.")
    fault = next(fault for fault in refused(override) if fault.code == "H105")
    assert (fault.values[0][0], fault.hint) == ("--set", f"{key} from {least}")


def test_a_search_takes_overrides_of_model_and_cluster() -> None:
    model, cluster = make_specs("tiny-llama", "h100", nodes=2, overrides=["model.vocab=99", "cluster.levels.1.size=16"])
    assert (model.vocab, cluster.nodes, cluster.levels[1].size) == (99, 2, 16)
    with pytest.raises(Refused) as error:
        make_specs("tiny-llama", "h100", overrides=["plan.tensor=2", "cluster.levels.5.size=1", "model.vocab=1"])
    assert sorted(fault.code for fault in error.value.faults) == ["F101", "F210", "M112"]
    words = "plan --model tiny-llama --cluster h100 --nodes 2 --global-batch 16 --seq-len 128"
    words += " --fix tensor=8 --fix data=2"
    seconds = []
    for figure in ("25", "0.001"):
        done = CliRunner().invoke(main, [*words.split(), "--set", f"cluster.levels.1.bandwidth_gbs={figure}", "--json"])
        assert done.exit_code == 0, done.output
        seconds.append(json.loads(done.stdout)["plans"][0]["step_time_s"])
    assert seconds[1] > 2 * seconds[0]


def test_a_vocabulary_of_one_token_is_refused() -> None:
    assert [fault.code for fault in refused("model.vocab=1")] == ["M112"]
    assert setup_with("model.vocab=2").model.vocab == 2
