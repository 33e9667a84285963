"""Mixtures of experts and latent attention: counts, names, FLOPs."""

from __future__ import annotations

import pytest

from shardsmith.specs.flops import forward_flops
from shardsmith.specs.library import model_named
from shardsmith.specs.model import active_parameters, mtp_weights, parameter_count, routing_biases, weights

COUNTS = {
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_parameter_counts(name: str, count: int) -> None:
    assert parameter_count(model_named(name)) == count


def test_deepseek_v3_with_routing_biases_and_mtp_apart() -> None:
    model = model_named("deepseek-v3")
    assert parameter_count(model) + routing_biases(model) == 671_026_419_200
    assert active_parameters(model) == pytest.approx(37.5e9, rel=0.01)  # the report says 37B
    mtp = sum(w.numel for w in mtp_weights(model))
    assert 11e9 < mtp < 12e9
    assert not {w.name for w in mtp_weights(model)} & {w.name for w in weights(model)}


def test_first_dense_layers_and_shared_experts_stand_where_they_should() -> None:
    names = {w.name: w for w in weights(model_named("deepseek-v2-lite"))}
    assert "layers.0.mlp.gate.weight" in names
    assert "layers.0.mlp.router.weight" not in names
    assert names["layers.1.mlp.experts.down.weight"].shape == (64, 2048, 1408)
    assert names["layers.1.mlp.shared.up.weight"].shape == (2816, 2048)
    assert names["layers.1.attention.kv_down.weight"].shape == (576, 2048)
    assert names["layers.1.attention.q.weight"].shape == (16 * 192, 2048)


def test_flops_count_what_a_token_meets() -> None:
    """Forward: two FLOPs for each active matrix element, plus scores of head_dim and value_dim channels."""
    model = model_named("mixtral-8x7b")
    flops = forward_flops(model, seq_len=4096, convention="full")
    matrices = active_parameters(model) - 32000 * 4096 - 65 * 4096  # no embedding, no norms
    assert flops.total - flops.items["attention_scores"] == 2 * matrices
    latent = forward_flops(model_named("deepseek-v3"), seq_len=4096, convention="full")
    assert latent.items["attention_scores"] == 61 * 2 * 4096 * 128 * (192 + 128)
