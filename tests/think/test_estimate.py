"""One plan priced: states as the layout counts them, parts that add up, the published runs, coded refusals."""

import pytest

from shardsmith import api
from shardsmith.design.cost.estimate import estimate, rank_memory
from shardsmith.design.cost.layouts import ORDERS, batch_of, layouts_of, strides
from shardsmith.design.cost.price import peak
from shardsmith.design.cost.subject import count_weights, make_subject, subject_of
from shardsmith.errors import Refused
from shardsmith.layout.shards import rank_states
from shardsmith.plan.file import make_setup
from shardsmith.plan.mesh import Coord, mesh_of
from shardsmith.plan.plan import Plan
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.specs.library import cluster_named, model_named
from shardsmith.specs.model import parameter_count

PLANS = (
    "tensor=2,pipeline=2,data=2",
    "tensor=4,pipeline=2,data=4,zero=1,sequence_parallel=true",
    "tensor=2,pipeline=4,data=4,zero=2,schedule=interleaved",
    "data=16,zero=3",
    "tensor=2,data=8,zero=2,zero_gather=per_step,replicate=2",
    "pipeline=4,data=4,zero=1,schedule=zb_v,recompute=full",
)


def setup_of(line: str, model: str = "llama3-8b", **options: object) -> Setup:
    given: dict[str, object] = {"cluster": "h100", "nodes": 2, "seq_len": 4096, "global_batch": 64, "dtype": "bfloat16"}
    return make_setup(plan=line, model=model, **(given | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2-xl", "qwen3-0.6b"])
@pytest.mark.parametrize("line", PLANS)
def test_states_are_those_of_the_layout(line: str, model: str) -> None:
    if model == "gpt2-xl":
        line = line.replace("tensor=4", "tensor=5").replace("tensor=2", "tensor=5")
    setup = setup_of(line, model, seq_len=1000)
    for rank in rank_memory(subject_of(setup), setup):
        first = Coord(pipeline=rank.pipeline_rank, replicate=0, shard=0, context=0, tensor=0)
        exact = rank_states(setup, mesh_of(setup.plan).rank(first))
        ours = [rank.items[name] for name in ("weights", "gradients", "optimizer")]
        # Rows that shards do not divide are the only difference.
        assert ours == pytest.approx([exact.weights, exact.gradients, exact.optimizer], rel=0.01)


@pytest.mark.parametrize("name", ["llama3-70b", "gpt3-175b", "deepseek-v3", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_counts_cover_every_parameter(name: str) -> None:
    model = model_named(name)
    c, sparse = count_weights(model), sum(model.is_sparse(layer) for layer in range(model.layers))
    dense = model.layers - sparse
    total = dense * (c.dense_cut + c.dense_whole) + sparse * (c.sparse_cut + c.sparse_whole + c.routed)
    total += model.layers * c.key_value + (2 - model.tied) * c.vocabulary + c.position + c.final
    assert total == parameter_count(model)


@pytest.mark.parametrize("line", PLANS)
def test_parts_add_up_to_the_step(line: str) -> None:
    found = estimate(setup_of(line))
    assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s, rel=1e-12)
    assert found.interval_s[0] < found.step_time_s < found.interval_s[1]
    assert 0 < found.mfu < 1


@pytest.mark.parametrize("line", PLANS)
def test_the_decisive_ranks_hold_the_peak(line: str) -> None:
    setup = setup_of(line)
    s, kinds = subject_of(setup), precision(setup.plan, setup.workload)
    p = layouts_of([setup.plan], setup.model, setup.workload)
    most = max(rank.total for rank in rank_memory(s, setup))
    assert float(peak(s, p, batch_of(s, p, kinds), kinds)[0]) == pytest.approx(most, rel=1e-9)


@pytest.mark.parametrize("order", ORDERS)
def test_strides_are_those_of_the_mesh(order: str) -> None:
    plan = Plan(tensor=2, context=3, data=5, pipeline=7, order=order, microbatches=1)
    workload = setup_of("data=5", global_batch=5).workload
    found, mesh = (
        strides(layouts_of([plan], setup_of("data=2").model.with_(layers=21), workload)),
        mesh_of(plan).strides,
    )
    for axis, stride in (("tensor", mesh.tensor), ("context", mesh.context), ("pipeline", mesh.pipeline)):
        assert found[f"{axis}_stride"][0] == stride
    assert found["data_stride"][0] == mesh.shard


def test_published_runs_are_met() -> None:
    """GPT-3 175B on 1,024 A100 (Narayanan et al. 2021): 140 TFLOP/s with full recomputation counted; Llama 3 405B on
    16,384 H100 (Dubey et al. 2024): 400 with attention scores in full."""
    megatron = "tensor=8,pipeline=8,data=16,schedule=interleaved,stages_per_rank=2,microbatch=1,recompute=full"
    setup = setup_of(megatron, "gpt3-175b", cluster="a100", nodes=128, seq_len=2048, global_batch=1536)
    found = estimate(setup, target="megatron-lm-classic")
    measured = 1536 * 2048 * 96 * 12288**2 * 96 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288)) / 140e12 / 1024
    assert found.step_time_s == pytest.approx(measured, rel=0.1)
    meta = "tensor=8,pipeline=16,data=128,zero=1,sequence_parallel=true,schedule=interleaved,stages_per_rank=4"
    large = setup_of(meta, "llama3-405b", cluster="h100", nodes=2048, seq_len=8192, global_batch=2048)
    assert estimate(large).tflops_per_gpu == pytest.approx(400, rel=0.1)


def test_the_fullest_expert_rank_is_what_all_wait_for() -> None:
    line = "data=16,expert=8,zero=1,microbatch=1"
    setup = setup_of(line, "qwen3-30b-a3b")
    found = {share: estimate(setup, imbalance=share) for share in (1.0, 1.3, 4.0)}
    assert found[1.0] == estimate(setup)
    assert found[1.0].step_time_s < found[1.3].step_time_s < found[4.0].step_time_s
    # Of what a microbatch keeps, the rows of experts grow, and nothing else.
    kept = [found[share].memory[0].items["activations"] for share in (1.0, 1.3, 4.0)]
    assert (kept[2] - kept[0]) / (kept[1] - kept[0]) == pytest.approx(10.0)
    model = setup.model
    assert model.experts
    routed = 4096 * model.experts.top_k * (2 * model.hidden + 3 * model.experts.ffn) * 2
    assert kept[1] - kept[0] == pytest.approx(0.3 * routed * model.layers)
    states = [[f.memory[0].items[name] for name in ("weights", "gradients", "optimizer")] for f in found.values()]
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize(("model", "imbalance"), [("qwen3-30b-a3b", 8.5), ("qwen3-30b-a3b", 0.9), ("llama3-8b", 1.1)])
def test_no_routing_is_so_uneven(model: str, imbalance: float) -> None:
    setup = setup_of("data=16,expert=8,zero=1" if model != "llama3-8b" else "data=16", model)
    with pytest.raises(Refused, match="E107"):
        estimate(setup, imbalance=imbalance)
    with pytest.raises(Refused, match="E107"):
        estimate(setup, imbalance=float("nan"))


def test_a_search_and_a_simulation_take_an_imbalance() -> None:
    asked = {"nodes": 1, "global_batch": 64, "seq_len": 4096, "top": 1, "fix": ("expert=8", "tensor=1", "pipeline=1")}
    even = api.search("qwen3-30b-a3b", "h200", **asked)  # type: ignore[arg-type]
    uneven = api.search("qwen3-30b-a3b", "h200", imbalance=1.5, **asked)  # type: ignore[arg-type]
    assert uneven.best.estimate.step_time_s > 1.02 * even.best.estimate.step_time_s
    assert uneven.best.estimate == estimate(uneven.best.setup, imbalance=1.5)
    assert "1.5 times the mean" in " ".join(uneven.assumptions)
    times = [api.simulate(even.best.setup, imbalance=share, record=False).seconds for share in (None, 1.0, 1.5)]
    assert times[0] == times[1] < times[2]
    with pytest.raises(Refused, match="S403"):
        api.simulate(even.best.setup, imbalance=1.5, times="F=1,I=1,W=1")


def test_what_cannot_be_priced_is_refused() -> None:
    with pytest.raises(Refused, match="H502"):
        estimate(setup_of("data=2", cluster="local", nodes=1))
    with pytest.raises(Refused, match="H503"):
        estimate(setup_of("data=16", dtype="float64"))
    with pytest.raises(Refused, match="X351"):
        make_subject(model_named("gpt2"), setup_of("data=16").workload, cluster_named("h100"), "megatron")
