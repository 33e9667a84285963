"""What is known of measured runs beside their columns: containers, models, machines, and what their experts do."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardsmith.design.cost.batch import Batch
from shardsmith.design.cost.constants import values
from shardsmith.design.cost.experts import expert_calls, experts
from shardsmith.design.cost.interval import KINDS, half_widths, interval, kind
from shardsmith.design.cost.memory import StateBytes, memory
from shardsmith.design.cost.step import step
from shardsmith.design.validation.architectures import architecture_of, mean_window
from shardsmith.design.validation.cross import scaled_by_one_row
from shardsmith.design.validation.machines import machine_of
from shardsmith.design.validation.regenerate import DATA
from shardsmith.design.validation.report import predicted_gb, validate
from shardsmith.design.validation.rows import Runs, read_runs, target_of

C = values()


def published(which: str) -> dict[str, str]:
    with (DATA / "runs.csv").open(newline="") as file:
        return next(row for row in csv.DictReader(file) if row["id"] == which)


@pytest.fixture(scope="module")
def sparse() -> Runs:
    return read_runs(DATA / "runs.csv", moe=True)


def one(runs: Runs, which: str) -> Batch:
    return runs.batch.select(np.array([[row["id"] for row in runs.rows].index(which)]))


@pytest.mark.parametrize(
    ("which", "target"),
    [
        ("BRDG-0006", "megatron-bridge-graphs"),  # 26.08, mxfp8
        ("BRDG-0034", "megatron-bridge"),  # 26.06, but fp8 of an H100
        ("BRDG-0062", "megatron-bridge"),  # 26.04.01
        ("BRDG-0212", "megatron-bridge"),  # 25.09
        ("DGXC-0141", "megatron-core"),
        ("INTM-0002", "internevo-fsdp"),
        ("INTM-0001", "internevo"),
    ],
)
def test_software_is_told_by_what_a_row_says_of_it(which: str, target: str) -> None:
    assert target_of(published(which)).name == target


def test_products_that_take_kernels_along_leave_less_to_do(sparse: Runs) -> None:
    b = one(sparse, "BRDG-0062")
    apart, fused = (experts(replace(b, expert_fused=np.array([f])), C) for f in (0.0, 1.0))
    assert fused.gemm_forward == apart.gemm_forward
    assert fused.elementwise_forward < 0.5 * apart.elementwise_forward
    assert fused.elementwise_backward < 0.5 * apart.elementwise_backward
    wide = experts(replace(b, fp8=np.array([0.0]), expert_fused=np.array([0.0])), C)
    assert wide.elementwise_forward < apart.elementwise_forward
    assert wide.elementwise_backward < apart.elementwise_backward


def test_a_bias_behind_experts_is_traffic_and_launches(sparse: Runs) -> None:
    b = one(sparse, "BRDG-0122")
    assert b.expert_bias == 1.0
    plain = replace(b, expert_bias=np.array([0.0]))
    rows = float(b.tokens[0] * b.top_k[0] * b.hidden[0])
    more = experts(b, C).elementwise_forward - experts(plain, C).elementwise_forward
    rate = float(b.memory_bandwidth[0]) * C["memory_share"]
    assert more == pytest.approx(28.0 * C["elementwise"] * rows / rate)
    local = float(b.experts[0] / b.expert[0])
    assert expert_calls(b) - expert_calls(plain) == pytest.approx(3.0 * local)


def test_experts_on_a_rank_are_launched_one_by_one(sparse: Runs) -> None:
    b = one(sparse, "BRDG-0122")
    few, many = (expert_calls(replace(b, expert=np.array([e]))) for e in (64.0, 8.0))
    assert many - few == pytest.approx(14.0 * (2.0 + 3.0))


def test_a_window_in_some_layers_leaves_its_share_of_scores() -> None:
    assert mean_window(4096.0, 0.0, 0.0) == 4096.0
    assert mean_window(4096.0, 128.0, 1.0) == pytest.approx(128.0)
    w, s = mean_window(4096.0, 128.0, 0.5), 4096.0
    assert w * (2 * s - w) == pytest.approx(0.5 * s**2 + 0.5 * 128 * (2 * s - 128))
    assert architecture_of({"model": "GPT-OSS-120B"}).expert_bias
    assert not architecture_of({"model": "Qwen3-30B-A3B"}).expert_bias


def test_facts_of_machines_are_what_their_owners_publish() -> None:
    jean_zay, simumax = machine_of(published("BIGS-0010")), machine_of(published("SIMU-0001"))
    assert jean_zay.network_share == pytest.approx(135 / 400 / 0.85, abs=0.005)
    assert jean_zay.synchronous
    assert simumax.matmul_share == 0.49
    plain = machine_of(published("KOR22-0001"))
    assert (plain.network_share, plain.matmul_share, plain.synchronous) == (1.0, 0.0, False)


def test_runs_with_experts_have_an_interval_of_their_own(sparse: Runs) -> None:
    assert (kind(sparse.batch, C) == KINDS.index("experts")).all()
    predicted = step(sparse.batch, C).total
    found = half_widths(sparse.batch, C, predicted, sparse.seconds)
    assert set(found) == {"interval_experts"}
    low, high = interval(sparse.batch, C | found, predicted)
    assert 0.75 <= ((sparse.seconds >= low) & (sparse.seconds <= high)).mean() <= 0.9
    assert 0.75 <= validate(DATA / "runs.csv", moe=True).held <= 0.9


def test_the_update_stands_where_backward_was(sparse: Runs) -> None:
    b = replace(one(sparse, "BRDG-0122"), moe_layers=np.zeros(1), ffn=np.array([11520.0]))
    given = {"weights": 2.0, "gradients": 2.0, "states": 12.0, "logits": 6.0, "gathered_layers": 2.0, "gathered": 2.0}
    given |= {"spare": 0.0}

    def total(update: float) -> tuple[float, float]:
        found = memory(b, StateBytes(**{k: np.array([v]) for k, v in (given | {"update": update}).items()}), last=True)
        return float(found.total[0]), float((found.activations + found.logits + found.transient)[0])

    (none, backward), (little, _), (much, _) = (total(update) for update in (0.0, 1e-3, 1e4))
    assert none == little
    assert much - none == pytest.approx(none * 0 + 1e4 / 12.0 * _states(b, given) - backward)


def _states(b: Batch, given: dict[str, float]) -> float:
    found = memory(b, StateBytes(**{k: np.array([v]) for k, v in (given | {"update": 0.0}).items()}), last=True)
    return float(found.optimizer[0])


def test_memory_of_internevo_and_simumax_is_met() -> None:
    runs = read_runs(DATA / "runs.csv", memory=True)
    error, names = predicted_gb(runs) / runs.memory_gb - 1.0, np.array(runs.sources)
    for name, most, least in (("INTM", 0.045, -0.04), ("SIMU", 0.02, -0.04), ("TTAN", 0.04, -0.04)):
        off = error[names == name]
        assert np.abs(off).mean() < most
        assert off.min() > least


def test_one_run_is_believed_as_far_as_machines_differ() -> None:
    predicted, measured = np.array([1.0, 2.0, 3.0]), np.array([1.2, 2.4, 3.6])
    found = scaled_by_one_row(predicted, measured, ["A", "A", "A"], spread=0.06)
    trust = 0.06**2 / (0.06**2 + 0.03**2)
    assert found.tolist() == pytest.approx([1.2**trust, 2.0, 3.0 * 1.2**trust])
    assert scaled_by_one_row(predicted, measured, ["A", "A", "A"], spread=0.0).tolist() == [1.0, 2.0, 3.0]


def test_a_model_that_a_preset_holds_has_its_latents_and_shared_experts(tmp_path: Path) -> None:
    row = published("BRDG-0062") | {"id": "X-1", "model": "DeepSeek-V3", "layers": "61", "hidden": "7168"}
    row |= {"heads": "128", "kv_heads": "128", "head_dim": "128", "ffn_hidden": "18432", "vocab": "129280"}
    row |= {"n_experts": "256", "topk": "8", "expert_ffn": "2048", "ep": "64", "gpus": "256", "global_batch": "2048"}
    other = row | {"id": "X-2", "model": "Another-671B"}
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerows([row, other])
    b = read_runs(path, moe=True).batch
    assert b.moe_layers.tolist() == [58.0, 61.0]
    assert b.shared_ffn.tolist() == [2048.0, 0.0]
    # Latent projections hold less than plain ones of 128 heads: 187 of 470 M in a layer.
    assert b.projection[0] == pytest.approx(0.32, abs=0.03)
    assert b.projection[1] == 1.0
