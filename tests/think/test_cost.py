"""The cost model: never negative, monotone, honest about rows it cannot score."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardsmith import api
from shardsmith.design.cost.collectives import Group, reach
from shardsmith.design.cost.constants import constants, values
from shardsmith.design.cost.devices import device_facts
from shardsmith.design.cost.step import step, tensor_time
from shardsmith.design.targets import target_named, target_names
from shardsmith.design.validation.machines import machine_of
from shardsmith.design.validation.ranking import rankings
from shardsmith.design.validation.regenerate import DATA
from shardsmith.design.validation.report import as_json, predicted_gb
from shardsmith.design.validation.rows import Runs, read_runs
from shardsmith.errors import Refused


@pytest.fixture(scope="module")
def runs() -> Runs:
    return read_runs(DATA / "runs.csv")


def test_parts_are_never_negative_and_add_up(runs: Runs) -> None:
    s = step(runs.batch, values())
    parts = [s.compute, s.bubble, s.imbalance, s.pipeline, s.data, s.optimizer]
    assert all((p > -1e-9 * s.total).all() for p in parts)
    np.testing.assert_allclose(sum(parts), s.total, rtol=1e-12)


@pytest.mark.parametrize("level", [0, 1])
def test_more_bandwidth_is_never_slower(runs: Runs, level: int) -> None:
    faster = runs.batch.level_bandwidth.copy()
    faster[level] *= 2.0
    quick = step(replace(runs.batch, level_bandwidth=faster), values()).total
    assert (quick <= step(runs.batch, values()).total * (1 + 1e-12)).all()


def test_faster_memory_is_never_slower(runs: Runs) -> None:
    quick = step(replace(runs.batch, memory_bandwidth=runs.batch.memory_bandwidth * 1.5), values()).total
    assert (quick <= step(runs.batch, values()).total).all()


def test_world_of_one_is_pure_compute(runs: Runs) -> None:
    one = np.ones(len(runs.batch))
    names = ("tensor", "context", "pipeline", "stages_per_rank", "data", "shard", "expert")
    alone = replace(runs.batch, **dict.fromkeys(names, one))
    s = step(alone, values())
    slow = step(replace(alone, level_bandwidth=alone.level_bandwidth * 1e-6), values())
    np.testing.assert_array_equal(s.total, slow.total)
    assert not s.pipeline.any()
    assert not s.data.any()
    np.testing.assert_allclose(s.bubble + s.imbalance, 0.0, atol=1e-12)


def test_no_constant_is_physically_impossible() -> None:
    for name, constant in constants().items():
        assert constant.least <= constant.value <= constant.most, name
        if name.startswith(("gemm_am", "gemm_ho", "gemm_bl", "memory", "link", "net")):
            assert constant.value <= 1.0, name


def test_shipped_constants_predict_the_shipped_rows(runs: Runs) -> None:
    found = api.validate(DATA / "runs.csv")
    assert len(found.skipped) < 0.2 * len(runs.rows)
    assert found.errors.median < 0.04
    assert found.errors.group_weighted < 0.048
    assert 0.75 <= found.held <= 0.92
    widths = np.log(found.high / found.predicted)
    assert np.median(widths) <= 0.12


def test_runs_with_experts_are_predicted_without_having_been_fitted() -> None:
    found = api.validate(DATA / "runs.csv", moe=True)
    assert len(found.predicted) == 90
    assert found.errors.group_weighted < 0.175
    assert found.errors.median < 0.13
    assert 0.75 <= found.held <= 0.9


def test_the_pick_is_good_where_layouts_were_swept(runs: Runs) -> None:
    sets = rankings(runs.rows, step(runs.batch, values()).total, runs.seconds)
    small = next(r for r in sets if r.source == "VTRM" and r.rows == 23)
    assert small.pair_order >= 0.95
    assert all(r.regret <= 0.01 for r in sets if r.source == "VTRM")
    assert all(r.regret <= 0.03 and r.pair_order >= 0.85 for r in sets if r.source == "BIGS")
    assert all(r.best_in_top3 for r in sets)


def test_declared_behaviour_of_software_changes_what_it_should(runs: Runs) -> None:
    """Hidden collectives, early stops and synchronous launches: right in sign, absent where they cannot be."""
    b, n = runs.batch, len(runs.batch)
    base = replace(b, overlap_weight_gradient=np.zeros(n), early_stop=np.zeros(n), synchronous=np.zeros(n))
    plain = step(base, values()).total
    hidden = step(replace(base, overlap_weight_gradient=np.ones(n)), values()).total
    early = step(replace(base, early_stop=np.ones(n)), values()).total
    waits = step(replace(base, synchronous=np.ones(n)), values()).total
    shares = (b.tensor > 1) & (b.overlap_tensor < 1)
    np.testing.assert_array_less(hidden[shares], plain[shares])
    np.testing.assert_array_equal(hidden[b.tensor == 1], plain[b.tensor == 1])
    np.testing.assert_array_less(early[b.recompute_layer > 0], plain[b.recompute_layer > 0])
    np.testing.assert_array_equal(early[b.recompute_layer == 0], plain[b.recompute_layer == 0])
    np.testing.assert_array_less(plain, waits)


def test_a_call_costs_more_hops_over_more_levels() -> None:
    """Eight ranks of one node, of two, and of eight: the same bytes, more and longer hops."""
    found = read_runs(DATA / "runs.csv").batch.select(np.zeros(3, dtype=np.intp))
    group = Group(members=np.full(3, 8.0), stride=np.array([1.0, 4.0, 16.0]))
    links = replace(found, level_bandwidth=np.full((2, 3), 1e11), level_size=np.array([[16.0] * 3, [np.inf] * 3]))
    hops = reach(links, values(), group).hops / values()["latency"]
    inner, outer = links.level_latency[0][0], links.level_latency[1][0]
    np.testing.assert_allclose(hops, [7 * inner, 3 * inner + outer, 3 * outer])


def test_what_owners_say_of_a_machine_is_taken() -> None:
    plain = machine_of({"notes": "two nodes", "source": "somewhere"})
    assert (plain.network_share, plain.matmul_share, plain.synchronous) == (1.0, 0.0, False)
    zay = machine_of({"notes": "Jean Zay A100-80GB, 4xOPA100 per node", "source": ""})
    assert zay.synchronous
    assert zay.network_share == 0.4
    assert len(zay.origin) > 40


def test_json_names_every_row_and_reason() -> None:
    data = as_json(api.validate(DATA / "runs.csv"))
    seconds, gigabytes = {"predicted_s", "low_s", "high_s", "measured_s"}, {"predicted_gb", "measured_gb"}
    assert set(data["rows"][0]) == {"id", "group", "error"} | seconds | gigabytes
    assert all(s["reason"] for s in data["skipped"])


def test_bad_rows_are_named_and_the_rest_is_done(tmp_path: Path) -> None:
    with (DATA / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))[:5]
    rows[0]["gpu"] = "Z9000"
    rows[1]["inter_bw_Gbps_per_gpu"] = "0"
    rows[2]["layers"] = "many"
    rows[3]["framework"] = "homegrown"
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    found = api.validate(path)
    assert len(found.predicted) == 1
    reasons = [s.reason for s in found.skipped]
    assert "H501" in reasons[0]
    assert "inter_bw_Gbps_per_gpu = 0 is below 1" in reasons[1]
    assert "many" in reasons[2]
    assert "homegrown" in reasons[3]


def test_an_empty_file_gives_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text((DATA / "runs.csv").read_text().splitlines()[0] + "\n")
    assert as_json(api.validate(path))["rows"] == []


def test_unknown_names_are_refused_with_neighbours() -> None:
    with pytest.raises(Refused, match="H501"):
        device_facts("A1000")
    with pytest.raises(Refused, match="X351"):
        target_named("megatron")
    with pytest.raises(Refused, match="F701"):
        api.validate(DATA / "runs.csv", cross="leave-two-out")


def test_every_target_reads_and_says_where_its_figures_come_from() -> None:
    assert all(len(target_named(name).origin) > 40 for name in target_names())


def test_memory_of_allocator_peaks() -> None:
    found = read_runs(DATA / "runs.csv", memory=True)
    known = found.select(np.array([s in ("TTAN", "SIMU") for s in found.sources]))
    error = predicted_gb(known) / known.memory_gb - 1.0
    assert np.abs(error).mean() <= 0.03
    assert error.min() >= -0.045
    evo = found.select(np.array([s == "INTM" for s in found.sources]))
    error = predicted_gb(evo) / evo.memory_gb - 1.0
    assert np.abs(error).mean() <= 0.1
    assert error.min() >= -0.04


def test_inputs_kept_in_parts_are_gathered_again(runs: Runs) -> None:
    """Only under sequence parallelism, with tensor ranks; in 8 bits where products are."""
    b, n = runs.batch, len(runs.batch)
    keeps, gathers = (replace(b, regather=np.full(n, f)) for f in (0.0, 1.0))
    without, again = step(keeps, values()).total, step(gathers, values()).total
    parts = (b.sequence_parallel > 0) & (b.tensor > 1)
    wide, hidden = parts & (b.fp8 == 0), b.overlap_regather > 0
    assert (again[wide & ~hidden] > without[wide & ~hidden]).all()
    assert (again[wide] >= without[wide]).all()
    np.testing.assert_array_equal(again[~parts], without[~parts])
    wide_gathers = gathers.select(parts & (b.peak8 > 0) & (b.fp8 == 0))
    half = replace(wide_gathers, fp8=np.ones(len(wide_gathers)))
    assert (tensor_time(half, values()) < tensor_time(wide_gathers, values())).all()
    assert (tensor_time(half, values()) > 0.75 * tensor_time(wide_gathers, values())).all()
