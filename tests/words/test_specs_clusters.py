"""Clusters, FLOPs and utilisation."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardsmith.errors import Refused
from shardsmith.specs.cluster import cluster_faults
from shardsmith.specs.flops import Convention, forward_flops, hardware_flops, mfu, model_flops, utilisation_faults
from shardsmith.specs.library import cluster_named, cluster_names, cluster_toml, model_named
from shardsmith.specs.model import ModelSpec, weights

LOOKED_UP = ("embedding", "position")

# A GPT as in Narayanan et al. 2021: MLP of four widths, no gate, as many key/value heads as query heads.
GPTS = st.builds(
    lambda layers, heads, head_dim, vocab: ModelSpec(
        name="gpt", layers=layers, hidden=heads * head_dim, heads=heads, kv_heads=heads, head_dim=head_dim,
        ffn=4 * heads * head_dim, vocab=vocab, context=4096, activation="gelu_tanh", positions="learned",
    ),
    st.integers(1, 96), st.integers(1, 64), st.sampled_from([32, 64, 128]), st.integers(100, 60000),
)  # fmt: skip


def test_every_cluster_names_the_origin_of_every_figure() -> None:
    known = {"local", "v100", "a100", "h100", "h200", "h800", "b200", "gb200", "a800", "h20", "ascend-910b"}
    assert set(cluster_names()) == known
    for name in cluster_names():
        spec = cluster_named(name)
        assert spec.name == name
        assert spec.device.origin
        assert all(link.origin for link in spec.levels)
        assert not cluster_faults(spec, name)


def test_n11_bandwidth_is_of_one_direction() -> None:
    one_way = {name: cluster_named(name).levels[0].bandwidth_gbs for name in ("v100", "a100", "h100", "h800", "b200")}
    assert one_way == {"v100": 150, "a100": 300, "h100": 450, "h800": 200, "b200": 900}
    assert (cluster_named("a100").levels[1].bandwidth_gbs, cluster_named("h100").levels[1].bandwidth_gbs) == (25, 50)


def test_nodes_multiply_and_a_rack_is_one_fast_domain() -> None:
    rack = cluster_named("gb200", nodes=18)
    assert rack.devices == 72 == rack.levels[0].size
    assert cluster_named("local").devices is None


def test_unknown_clusters_and_impossible_nodes() -> None:
    with pytest.raises(Refused, match=r"H101[\s\S]*did you mean h100"):
        cluster_named("h10O")
    with pytest.raises(Refused, match="H104"):
        cluster_named("local", nodes=2)
    with pytest.raises(Refused, match="H102"):
        cluster_named("h100", nodes=0)


def test_cluster_file_is_read_as_strictly(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = (
        'name = "mine"\ndevices_per_node = 4\n[device]\nname = "XYZ"\norigin = "guess"\n'
        '[[levels]]\nname = "a"\nsize = 8\nbandwidth_gbs = 10\nlatency_us = 1\npath = "pcie"\norigin = "guess"\n'
        '[[levels]]\nname = "b"\nsize = 4\nbandwidth_gbs = -1\nlatency_us = 1\npath = "tcp"\norigin = "guess"\n'
    )
    file.write_text(text)
    with pytest.raises(Refused) as refused:
        cluster_named(file)
    assert {fault.code for fault in refused.value.faults} == {"H102", "H103"}
    file.write_text(text.replace('"tcp"', '"smoke"').replace("latency_us = 1\n", "", 1))
    with pytest.raises(Refused) as refused:
        cluster_named(file)
    assert {fault.code for fault in refused.value.faults} == {"F102", "F103"}
    file.write_text(text.replace("size = 4\n", "").replace("-1", "1"))
    assert cluster_named(file).device.peak("bfloat16") is None


def test_a_cluster_is_written_and_read_again(tmp_path: Path) -> None:
    for name in cluster_names():
        spec, file = cluster_named(name), tmp_path / f"{name}.toml"
        file.write_text(cluster_toml(spec))
        assert cluster_named(file) == spec


def test_g10_mfu_against_the_dense_peak_of_that_device() -> None:
    share = mfu(420e12, cluster_named("h200").device.peak("bfloat16"))
    assert share == pytest.approx(0.424, abs=5e-4)
    assert mfu(420e12, cluster_named("local").device.peak("float32")) is None
    assert mfu(100e12, cluster_named("v100").device.peak("bfloat16")) is None
    assert not utilisation_faults(share, source="h200")
    assert not utilisation_faults(None, source="local")
    (fault,) = utilisation_faults(mfu(420e12, cluster_named("a100").device.peak("bfloat16")), source="a100")
    assert (fault.code, fault.severity) == ("H201", "warning")
    assert "134.6%" in fault.message


def test_g11_attention_full_and_causal() -> None:
    spec = model_named("tiny-gpt").with_(layers=1, hidden=1024, heads=16, kv_heads=16, head_dim=64)
    full = model_flops(spec, seq_len=4096, tokens=1, convention="full")
    causal = model_flops(spec, seq_len=4096, tokens=1)
    assert full.items["attention_scores"] == 50_331_648
    assert causal.items["attention_scores"] == 25_165_824
    assert (full.convention, causal.convention) == ("full", "causal")
    assert full.total - causal.total == 25_165_824


def test_grouped_heads_and_gate_against_six_per_matrix_element() -> None:
    for name in ("llama3-70b", "llama3-405b", "smollm2-135m", "tiny-gpt"):
        spec = model_named(name)
        # Every matrix multiplies each token once: 2 FLOPs forward, 4 backward. The head counts also where it is tied.
        matrices = sum(w.numel for w in weights(spec.with_(tied=False)) if w.decay and w.role not in LOOKED_UP)
        found = model_flops(spec, seq_len=8192, tokens=1, convention="full")
        assert found.total - found.items["attention_scores"] == 6 * matrices


def test_llama3_70b_per_token_at_8k_as_published_runs_count_it() -> None:
    spec = model_named("llama3-70b")
    per_token = {c: model_flops(spec, seq_len=8192, tokens=1, convention=c).total for c in ("full", "causal")}
    assert per_token == {"full": pytest.approx(481.8e9, rel=1e-3), "causal": pytest.approx(449.6e9, rel=1e-3)}


@given(spec=GPTS, seq_len=st.integers(1, 4096), batch=st.integers(1, 64))
def test_full_recompute_is_the_formula_of_narayanan(spec: ModelSpec, seq_len: int, batch: int) -> None:
    found = hardware_flops(spec, seq_len=seq_len, tokens=batch * seq_len, recompute="full", convention="full").total
    h, depth, vocab = spec.hidden, spec.layers, spec.vocab
    # 96 B S L h^2 (1 + S / 6h + V / 16 L h), multiplied out so that it stays whole.
    assert found == batch * seq_len * (96 * depth * h * h + 16 * depth * h * seq_len + 6 * h * vocab)


@given(spec=GPTS, seq_len=st.integers(1, 4096))
def test_palm_appendix_b_without_head_and_embedding(spec: ModelSpec, seq_len: int) -> None:
    found = model_flops(spec, seq_len=seq_len, tokens=1, convention="full").total
    matrices = 12 * spec.layers * spec.hidden**2 + spec.hidden * spec.vocab
    assert found == 6 * matrices + 12 * spec.layers * spec.heads * spec.head_dim * seq_len


def test_selective_recompute_repeats_the_scores_only() -> None:
    spec = model_named("tiny-llama")
    forward = forward_flops(spec, seq_len=256)
    work = {r: hardware_flops(spec, seq_len=256, tokens=10, recompute=r) for r in ("none", "selective", "full")}
    assert work["none"].total == model_flops(spec, seq_len=256, tokens=10).total == 30 * forward.total
    assert work["selective"].items["recompute"] == 10 * forward.items["attention_scores"]
    assert work["full"].items["recompute"] == 10 * (forward.total - forward.items["head"])


def test_a_window_bounds_the_keys_of_a_query() -> None:
    spec = model_named("mistral-7b")
    width = 4 * spec.layers * spec.heads * spec.head_dim

    def keys(seq_len: int, convention: Convention) -> float:
        return forward_flops(spec, seq_len=seq_len, convention=convention).items["attention_scores"] / width

    assert (keys(4096, "full"), keys(4096, "causal")) == (4096, 2048)
    assert keys(8192, "full") == 4096
    # The first 4096 queries have 2048 keys on average, the others 4096.
    assert keys(8192, "causal") == (2048 + 4096) / 2
