"""Serving layouts: cache sizes that are published, rooflines by hand, legality, targets, coded refusals."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from rich.console import Console

import shardsmith
from shardsmith.design.cost.constants import values
from shardsmith.design.reports.serving_tables import serving_tables
from shardsmith.design.serving.demand import Demand, servings
from shardsmith.design.serving.latency import BOUNDS, latency
from shardsmith.design.serving.memory import cache_token, cached_tokens, held_tokens, serving_memory, weight_bytes
from shardsmith.design.serving.search import ServingResult, search_serving
from shardsmith.design.targets import server_named, target_names
from shardsmith.errors import Refused
from shardsmith.specs.library import cluster_named, model_named
from shardsmith.specs.model import parameter_count
from shardsmith.units import GIB


def demand(model: str = "llama3-70b", cluster: str = "h100", nodes: int = 1, **more: object) -> Demand:
    given: dict[str, object] = {"context": 8192, "concurrency": 64}
    spec, machines = model_named(model), cluster_named(cluster, nodes)
    return Demand(model=spec, cluster=machines, **(given | more))  # type: ignore[arg-type]


def serve(*args: object, **more: object) -> ServingResult:
    return search_serving(demand(*args, **more), top=1000)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "bytes_a_token"),
    [
        ("llama3-8b", 2 * 8 * 128 * 2 * 32),  # 128 KiB
        ("llama3-70b", 327_680),  # 320 KiB, Llama 3 with 8 key/value heads
        ("gpt3-175b", 2 * 96 * 128 * 2 * 96),  # 4.5 MiB without grouped queries
        ("deepseek-v3", 70_272),  # (512 + 64) x 2 bytes x 61 layers; DeepSeek-AI print 70 KB
    ],
)
def test_cache_of_a_token_on_one_device(model: str, bytes_a_token: int) -> None:
    d = demand(model, nodes=4, context=2048)
    s = servings(d)
    alone = (s.tensor == 1) & (s.pipeline == 1)
    assert (cache_token(d, s)[alone] * d.model.layers == bytes_a_token).all()
    halved = replace(d, cache_dtype="float8")
    assert (cache_token(halved, s)[alone] * d.model.layers == bytes_a_token / 2).all()


def test_tensor_ranks_share_heads_but_not_latents_and_copy_heads_they_lack() -> None:
    for model, at, share in (("llama3-70b", 8, 8), ("llama3-70b", 16, 8), ("deepseek-v3", 8, 1)):
        d = demand(model, nodes=2)
        s = servings(d)
        one, many = (cache_token(d, s)[s.tensor == degree][0] for degree in (1, at))
        assert one / many == share


def test_a_sliding_window_bounds_the_cache() -> None:
    assert cached_tokens(demand("mistral-7b", context=32768)) == 4096
    assert cached_tokens(demand("mistral-7b", context=1000)) == 1000
    assert cached_tokens(demand("llama3-8b", context=32768)) == 32768


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2-xl", "mixtral-8x7b", "deepseek-v3", "qwen3-0.6b"])
def test_weights_of_one_device_are_the_model(model: str) -> None:
    d = demand(model, context=1024)
    s = servings(d)
    alone = np.flatnonzero((s.tensor == 1) & (s.pipeline == 1) & (s.expert == 1))
    layers = np.full(len(s), float(d.model.layers))
    assert weight_bytes(d, s, layers)[alone] == pytest.approx(2 * parameter_count(d.model), rel=1e-3)


def test_memory_is_the_sum_that_it_says() -> None:
    d = demand()
    s = servings(d)
    m = serving_memory(d, s)
    assert m.weights + m.workspace + m.room == pytest.approx(0.9 * 79.18 * GIB)
    for choice in serve().plans:
        assert choice.most >= 64
        assert choice.weights + choice.workspace + choice.kv <= 0.9 * 79.18 * GIB


def test_vllm_is_read_feature_by_feature() -> None:
    """Every declared feature of the engine changes what is planned, and nothing else does."""
    vllm = server_named("vllm")
    assert vllm.origin
    assert "vllm" not in target_names()
    base, moe = demand(nodes=2), demand("qwen3-30b-a3b", concurrency=1024)
    narrow = replace(base, dtype="float8")
    cases = {
        "memory_share": (base, 0.8),
        "reserve_gib": (base, 3.0),
        "block_tokens": (replace(base, context=8000), 256),
        "latent_block_tokens": (demand("deepseek-v3", nodes=4, context=8000), 256),
        "large_chunk_tokens": (base, 1024),
        "large_requests": (base, 4096),
        "large_memory_gib": (base, 100.0),
        "never_large": (base, ("H100",)),
        "chunk_tokens": (replace(base, cluster=cluster_named("a100", 2)), 512),
        "requests": (replace(base, cluster=cluster_named("a100", 2)), 4096),
        "graph_requests": (base, 8),
        "kernels": (base, 20.0),
        "expert_kernels": (moe, 30.0),
        "own_reduce_bytes": (base, 1024),
        "own_reduce_ranks": (base, (2, 4)),
        "hop_tensors": (base, 1.0),
        "copies_kv": (base, False),
        "experts_over_data": (moe, False),
        "narrow_ends": (narrow, True),
        "logit_bytes": (base, 12.0),
    }
    assert set(cases) | {"name", "origin"} == {f.name for f in fields(vllm)}

    def planned(d: Demand) -> list[tuple[float, ...]]:
        s = servings(d)
        m, t = serving_memory(d, s), latency(d, s)
        return [tuple(column) for column in (s.tensor, s.expert, m.weights, m.request, m.room, t.ttft, t.tpot)]

    for name, (d, value) in cases.items():
        other = replace(d, server=replace(vllm, **{name: value}))
        assert planned(other) != planned(d), f"{name} is read by nobody"


def test_what_vllm_takes_of_a_device() -> None:
    """Defaults of `vllm serve`: chunks of 8192 and 1024 requests from 70 GiB on, A100 excepted; blocks of 16 tokens."""
    for cluster, chunk, rows in (("h100", 8192, 1024), ("a100", 2048, 256), ("h200", 8192, 1024)):
        d = demand(cluster=cluster)
        device = d.cluster.device
        assert (d.server.chunk(device), d.server.reserved_requests(device)) == (chunk, rows)
    assert held_tokens(demand(context=8185)) == 8192
    assert held_tokens(demand("deepseek-v3", nodes=4, context=8129)) == 8192
    assert held_tokens(demand("mistral-7b", context=32768)) == 4096


def test_sums_in_one_kernel_are_small_and_inside_a_fast_domain() -> None:
    few, many = demand(concurrency=16, nodes=2), demand(concurrency=2048, nodes=2)
    for d, saved in ((few, True), (many, False)):
        s = servings(d)
        without = replace(d, server=replace(d.server, own_reduce_ranks=()))
        faster = latency(d, s).tpot < latency(without, s).tpot * (1 - 1e-12)
        assert faster[(s.tensor == 8) & (s.pipeline == 1)].all() == saved
        assert not faster[(s.tensor == 16) | (s.tensor == 1)].any()


def test_one_request_on_one_device_decodes_as_fast_as_its_weights_are_read() -> None:
    d = demand("llama3-8b", context=1, concurrency=1)
    s = servings(d)
    alone = int(np.flatnonzero((s.tensor == 1) & (s.pipeline == 1))[0])
    read = 2 * (parameter_count(d.model) - d.model.vocab * d.model.hidden) / (3350e9 * values()["memory_share"])
    found = latency(d, s)
    assert read < found.tpot[alone] < 1.2 * read
    assert BOUNDS[found.binds[alone]] == "weights"


def test_a_long_prompt_is_bound_by_flops() -> None:
    d = demand("llama3-8b", context=8192, concurrency=1)
    s = servings(d)
    alone = int(np.flatnonzero((s.tensor == 1) & (s.pipeline == 1))[0])
    least = 2 * 7.5e9 * 8192 / 989.4e12
    assert least < latency(d, s).ttft[alone] < 2.5 * least


def test_more_of_anything_never_hurts() -> None:
    base = demand()
    s = servings(base)
    device = base.cluster.device
    assert device.memory_bandwidth_gbs
    faster = replace(base.cluster, device=replace(device, memory_bandwidth_gbs=2 * device.memory_bandwidth_gbs))
    links = tuple(replace(link, bandwidth_gbs=2 * link.bandwidth_gbs) for link in base.cluster.levels)
    before = latency(base, s)
    for better in (replace(base, cluster=faster), replace(base, cluster=replace(base.cluster, levels=links))):
        after = latency(better, servings(better))
        assert (after.tpot <= before.tpot * (1 + 1e-12)).all()
        assert (after.ttft <= before.ttft * (1 + 1e-12)).all()
    longer = replace(base, context=16384)
    assert (latency(longer, s).tpot >= before.tpot).all()
    assert (serving_memory(longer, s).requests <= serving_memory(base, s).requests).all()


def test_i02_expert_parallel_spreads_whole_experts_over_data_and_tensor() -> None:
    for choice in serve("deepseek-v3", "h200", dtype="float8").plans:
        p = choice.plan
        assert p.expert in (1, p.data * p.tensor)
        assert 256 % p.expert == 0
        assert p.world <= 8


def test_i01_and_i12_degrees_cut_whole_heads_and_replicas_take_what_is_left() -> None:
    s = servings(demand("gpt2-xl", context=1024))  # 25 heads
    assert set(s.tensor) == {1, 5}
    assert (s.data == np.floor(8 / (s.tensor * s.pipeline))).all()


def test_m14_replicas_first_where_requests_are_many_and_weights_small() -> None:
    """Data before tensor before pipeline: a small model under load, fast links or not, gains nothing from stages."""
    found = serve("qwen3-0.6b", context=512, concurrency=512)
    followed = [c for c in found.plans if c.verdict == "followed"]
    assert [str(c.plan) for c in followed] == ["data=8"]
    large = serve("llama3-405b", nodes=2)
    assert (large.plans[0].verdict, str(large.plans[0].plan)) == ("followed", "tensor=8,pipeline=2")
    beaten = serve("llama3-8b", concurrency=1).plans[0]
    assert beaten.verdict == "beaten"
    assert str(beaten.plan) == "tensor=8"
    assert "it picks data=8" in beaten.rule


def test_targets_are_met_and_the_best_comes_first() -> None:
    found = serve(tpot_s=0.025, ttft_s=0.6)
    assert found.plans
    assert all(c.tpot_s <= 0.025 and c.ttft_s <= 0.6 for c in found.plans)
    rates = [c.tokens_per_s for c in found.plans]
    assert rates == sorted(rates, reverse=True)
    assert len(found.plans) < len(serve().plans)


@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("I101", {"context": 0}),
        ("I101", {"tpot_s": -1.0}),
        ("I102", {"cluster": "local"}),
        ("I102", {"cluster": "a100", "dtype": "float8"}),
        ("I103", {"model": "gpt2-xl", "context": 4096}),
        ("I201", {"concurrency": 10_000}),
        ("I201", {"model": "llama3-405b"}),
        ("I202", {"tpot_s": 0.001}),
    ],
)
def test_refusals_say_what_would_help(code: str, more: dict[str, object]) -> None:
    with pytest.raises(Refused) as refused:
        serve(**more)
    (fault,) = refused.value.faults
    assert fault.code == code
    assert fault.hint


def test_what_the_hint_proposes_works() -> None:
    with pytest.raises(Refused, match="at most") as refused:
        serve(concurrency=640)
    hint = refused.value.faults[0].hint
    options = dict(part.removeprefix("or ").split() for part in hint.split(", "))
    assert serve(concurrency=int(options["--concurrency"])).plans
    assert serve(concurrency=640, context=int(options["--context"])).plans
    assert serve(concurrency=640, nodes=int(options["--nodes"])).plans
    with pytest.raises(Refused, match="at most 0 requests") as refused:
        serve(context=10**9, concurrency=1)
    assert refused.value.faults[0].hint.startswith("--context ")
    longest = int(refused.value.faults[0].hint.split()[1])
    assert longest > 500_000, "the layout that holds the longest request is the nearest one"
    assert serve(context=longest, concurrency=1).plans


@pytest.mark.parametrize("top", [0, -2])
def test_no_layouts_wanted_is_refused(top: int) -> None:
    with pytest.raises(Refused, match="B203"):
        search_serving(demand(), top=top)


def test_json_and_table_hold_the_promised_keys() -> None:
    found = shardsmith.serve("llama3-70b", "h100", context=8192, concurrency=64, tpot_ms=25)
    keys = {"plan", "ttft_s", "tpot_s", "tokens_per_s", "weights_gib", "kv_gib", "max_concurrency", "rule"}
    assert all(keys <= plan.keys() for plan in found.as_json()["plans"])
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in serving_tables(found):
        console.print(part)
    text = console.export_text()
    assert "tensor=8" in text
    assert "data > tensor > pipeline" in text
    assert found.seconds < 1.0
