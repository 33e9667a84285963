"""The planner: its legality is that of check, its bounds dismiss nothing better, more is never worse."""

import json
import random
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from click.testing import CliRunner

from shardsmith import api
from shardsmith.cli.main import main
from shardsmith.design.cost.estimate import estimate, estimate_plan
from shardsmith.design.cost.layouts import ORDERS
from shardsmith.design.cost.price import price
from shardsmith.design.cost.schedules import SCHEDULES
from shardsmith.design.cost.subject import Subject, make_subject
from shardsmith.design.planner.bounded import Bounded
from shardsmith.design.planner.goodput import Failures
from shardsmith.design.planner.plans import plan_of, setup_of
from shardsmith.design.planner.space import DEGREES, PLENTY, Space
from shardsmith.design.planner.tables import distinct, everything
from shardsmith.errors import Refused
from shardsmith.layout.check import examine
from shardsmith.plan.file import make_setup, read_setup
from shardsmith.plan.plan import Plan
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import settled
from shardsmith.schedule import orders
from shardsmith.specs.cluster import ClusterSpec
from shardsmith.specs.job import Workload
from shardsmith.specs.library import cluster_named, model_named
from shardsmith.units import GIB

NO_EFFECT = {"T207", "T208", "D103"}
"""Warnings about fields that change nothing: the space has such a plan once, without them."""

SMALL = (
    # model, layers, devices a node, nodes, global batch, sequence
    ("llama3-8b", 5, 2, 3, 6, 1024),
    ("gpt2", 12, 4, 1, 8, 512),
    ("mixtral-8x7b", 3, 2, 2, 4, 1024),
)


def subject(model: str, layers: int, per_node: int, nodes: int, batch: int, seq_len: int) -> Subject:
    cluster = cluster_named("h100")
    levels = (replace(cluster.levels[0], size=per_node), *cluster.levels[1:])
    small = replace(cluster, nodes=nodes, devices_per_node=per_node, levels=levels)
    work = Workload(seq_len=seq_len, global_batch=batch, dtype="bfloat16")
    return make_subject(model_named(model).with_(layers=layers), work, small)


def space_of(s: Subject, **fixed: object) -> Space:
    assert s.cluster.devices is not None
    return Space(subject=s, world=s.cluster.devices, fixed=fixed)


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("limit_gib", [9.0, 30.0, 79.0])
def test_bounds_give_the_answer_of_brute_force(case: tuple[str, int, int, int, int, int], limit_gib: float) -> None:
    space = space_of(subject(*case))
    count = 4
    found = Bounded(space=space, limit=limit_gib * GIB, count=count).run()
    every = Bounded(space=space, limit=limit_gib * GIB, bound=False).run()
    assert every.priced == every.searched == every.total == found.total
    fits = int(np.isfinite(every.best).sum())
    best = min(count, fits)
    np.testing.assert_allclose(np.sort(found.best)[:best], np.sort(every.best)[:best], rtol=1e-12)
    assert len(found.ranked()) >= best
    if fits:
        assert found.searched < every.searched
        assert found.searched + found.dismissed == every.searched


@pytest.mark.parametrize("case", SMALL)
def test_a_plan_put_together_from_shared_parts_is_priced_as_alone(case: tuple[str, int, int, int, int, int]) -> None:
    """Without bounds every plan is put together from parts; alone, every formula sees every plan."""
    space = space_of(subject(*case))
    every = everything(space)
    alone = price(space.subject, every, precision(Plan(), space.subject.workload))
    fits = alone.peak <= 30 * GIB
    found = Bounded(space=space, limit=30 * GIB, bound=False).run()
    assert found.searched == found.priced == len(every)
    assert Bounded(space=space, limit=30 * GIB).leanest().limit == pytest.approx(float(alone.peak.min()), rel=1e-12)
    kind = distinct([getattr(every, name) for name in DEGREES]).place
    for at in np.unique(kind):
        mine = alone.step.total[(kind == at) & fits]
        best = mine.min() if len(mine) else np.inf
        assert np.isclose(found.best, best, rtol=1e-12).any()


@pytest.mark.parametrize("case", SMALL)
def test_a_plan_that_holds_little_enough_ends_the_search_for_the_least(
    case: tuple[str, int, int, int, int, int],
) -> None:
    search = Bounded(space=space_of(subject(*case)).thin(), limit=np.inf)
    least = search.leanest()
    (plan,) = least.plans.values()
    assert float(price(search.space.subject, plan, search.kinds).peak[0]) == pytest.approx(least.limit, rel=1e-12)
    assert search.leanest(least.limit).limit == least.limit
    assert least.limit <= search.leanest(least.limit * 1.5).limit <= least.limit * 1.5


def test_what_a_schedule_forbids_of_stages_has_nothing_to_do_with_microbatches() -> None:
    """The space asks about each alone: stages with plenty of microbatches, microbatches with the usual stages."""
    for name in SCHEDULES:
        order = orders.load(name)

        def sound(pipeline: int, microbatches: int, each: int, order: orders.Schedule = order) -> bool:
            sizes = {"pipeline": pipeline, "microbatches": microbatches, "stages_per_rank": each}
            return not order.faults(**sizes, source="plan")

        for pipeline, microbatches, each in product(range(1, 9), range(1, 33), range(1, 7)):
            alone = sound(pipeline, PLENTY * pipeline, each)
            alone &= sound(pipeline, microbatches, order.DEFAULT_STAGES_PER_RANK)
            assert sound(pipeline, microbatches, each) == alone, (name, pipeline, microbatches, each)


def test_the_whole_space_of_a_large_cluster_is_searched() -> None:
    """405 billion parameters on 16,384 devices: billions of plans."""
    found = api.search("llama3-405b", "h100", nodes=2048, global_batch=2048, seq_len=8192)
    assert found.searched + found.dismissed > 2e9


@pytest.mark.parametrize("case", SMALL)
def test_what_the_planner_calls_legal_check_passes(case: tuple[str, int, int, int, int, int]) -> None:
    s = subject(*case)
    p = everything(space_of(s))
    rng = random.Random(0)
    for row in rng.sample(range(len(p)), min(150, len(p))):
        faults = examine(setup_of(s, p, row, Plan())).faults
        wrong = [f for f in faults if f.code in NO_EFFECT or (f.severity == "error" and f.code != "H404")]
        assert not wrong, (str(plan_of(p, row, Plan())), str(wrong[0]))


@pytest.mark.parametrize("case", SMALL)
def test_what_check_passes_the_planner_has(case: tuple[str, int, int, int, int, int]) -> None:
    s = subject(*case)
    p = everything(space_of(s))
    key = _keys(s)
    known = {key(plan_of(p, row, Plan())) for row in range(len(p))}
    rng, hits = random.Random(1), 0
    for _ in range(1500):
        plan = _random_plan(s, rng)
        setup = Setup(model=s.model, workload=s.workload, cluster=s.cluster, plan=plan)
        faults = examine(setup).faults
        if plan.world != s.cluster.devices or any(
            f.code in NO_EFFECT or (f.severity == "error" and f.code != "H404") for f in faults
        ):
            continue
        if not plan.zero and plan.replicate > 1:
            continue
        hits += 1
        assert key(plan) in known, str(plan)
    assert hits > 20


def _keys(s: Subject):  # type: ignore[no-untyped-def]
    def key(plan: Plan) -> tuple[object, ...]:
        one = settled(Setup(model=s.model, workload=s.workload, cluster=s.cluster, plan=plan)).plan
        placed = plan.with_(order=ORDERS[0], microbatches=None, layers=None)
        weighed = plan.layers == "weighed" and one.layers is not None
        each = plan.stages_per_rank
        if weighed and plan.pipeline > 1:
            from shardsmith.plan.stages import even_layers, placement_of

            stages = len(placement_of(plan))
            weighed = stages > s.model.layers or one.layers != even_layers(s.model.layers, stages)
        return (str(placed.with_(stages_per_rank=each)), weighed and plan.pipeline > 1)

    return key


def _random_plan(s: Subject, rng: random.Random) -> Plan:
    assert s.cluster.devices is not None
    world = s.cluster.devices
    some = [d for d in range(1, world + 1) if world % d == 0]
    tensor, pipeline, context = rng.choice(some), rng.choice(some), rng.choice(some)
    data = max(1, world // (tensor * pipeline * context))
    schedule = rng.choice(["gpipe", "one_f_one_b", "interleaved", "looped_bfs", "zb_h1", "zb_v", "dualpipe_v"])
    schedule = schedule if pipeline > 1 else "one_f_one_b"
    zero = rng.choice([0, 1, 2, 3])
    moe = s.model.experts is not None
    each = rng.choice([2, 3]) if schedule in ("interleaved", "looped_bfs") else 2
    batch = s.workload.global_batch // data if s.workload.global_batch % data == 0 else 1
    return Plan(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        ulysses=rng.choice([1, 2]) if context % 2 == 0 else 1,
        data=data,
        replicate=rng.choice([1, 2]),
        expert=rng.choice([1, 2, 4]) if moe else 1,
        expert_tensor=rng.choice([1, 2]) if moe else 1,
        zero=zero,  # type: ignore[arg-type]
        zero_gather=rng.choice(["per_pass", "per_step"]) if zero >= 2 else "per_pass",
        schedule=schedule,
        stages_per_rank=each if each == 3 else None,
        layers=rng.choice([None, "weighed"]) if pipeline > 1 else None,
        microbatch=rng.choice([d for d in range(1, batch + 1) if batch % d == 0]),
        sequence_parallel=rng.choice([False, True]),
        replicate_kv=tensor > s.model.kv_heads,
        recompute=rng.choice(["none", "selective", "full"]),
        overlap=rng.choice([(), ("weight_gradient",), ("chunks",)]) if tensor > 1 else (),
    )


@pytest.mark.parametrize("case", SMALL)
def test_more_memory_and_faster_parts_never_lose(case: tuple[str, int, int, int, int, int]) -> None:
    """Memory; bandwidth and latency of every level; peak and memory bandwidth of the device: dense and experts."""
    s = subject(*case)

    def best(cluster: ClusterSpec, gib: float) -> float:
        one = make_subject(s.model, s.workload, cluster)
        return float(Bounded(space=space_of(one), limit=gib * GIB).run().best.min(initial=np.inf))

    sizes = (9, 14, 20, 30, 60, 120)
    now = {gib: best(s.cluster, gib) for gib in sizes}
    assert all(now[more] <= now[less] for less, more in pairwise(sizes))
    tight = min(gib for gib in sizes if np.isfinite(now[gib]))
    gained = set()
    for gib, factor in ((tight, 1.1), (120, 4.0)):
        for part, cluster in faster(s.cluster, factor).items():
            then = best(cluster, gib)
            assert then <= now[gib], (part, gib)
            gained |= {part} if then < now[gib] * (1 - 1e-6) else set()
    assert {"peak", "memory bandwidth"} < gained


def faster(cluster: ClusterSpec, factor: float) -> dict[str, ClusterSpec]:
    """The cluster with one of its parts faster by a factor, by what that is."""
    device, found = cluster.device, {}
    for at, link in enumerate(cluster.levels):
        wide, near = (
            replace(link, bandwidth_gbs=link.bandwidth_gbs * factor),
            replace(link, latency_us=link.latency_us / factor),
        )
        for name, other in (("bandwidth", wide), ("latency", near)):
            levels = (*cluster.levels[:at], other, *cluster.levels[at + 1 :])
            found[f"{name} of {link.name}"] = replace(cluster, levels=levels)
    peaks = {dtype: peak * factor for dtype, peak in device.peak_tflops.items()}
    found["peak"] = replace(cluster, device=replace(device, peak_tflops=peaks))
    assert device.memory_bandwidth_gbs is not None
    wide_memory = replace(device, memory_bandwidth_gbs=device.memory_bandwidth_gbs * factor)
    return found | {"memory bandwidth": replace(cluster, device=wide_memory)}


def test_the_answer_is_what_the_estimate_says_and_fits() -> None:
    found = api.search("llama3-8b", "h100", nodes=2, global_batch=64, seq_len=8192, top=3)
    times = [choice.estimate.step_time_s for choice in found.plans]
    assert times == sorted(times)
    for choice in (*found.plans, *found.pareto):
        assert choice.estimate.peak <= 79.18 * GIB
        assert estimate_plan(make_subject(*_parts(choice.setup)), choice.setup) == choice.estimate
        assert not [f for f in examine(choice.setup).faults if f.severity == "error"]
    ends = [(c.estimate.step_time_s, c.estimate.peak) for c in found.pareto]
    assert ends
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(ends))
    assert found.robust.estimate.interval_s[1] == min(c.estimate.interval_s[1] for c in found.plans)
    followed = {n.rule: n for n in found.best.rules}
    assert all(n.ratio is None or n.ratio >= 1 - 1e-9 for n in followed.values())
    fast = [n for n in found.best.neighbours if n.ratio is not None and n.ratio < 1 - 1e-9]
    assert all(n.reason for n in fast), "a faster neighbour of the best plan must not be legal and fit"


def test_the_front_over_time_memory_and_devices_holds_the_fastest_of_every_size() -> None:
    ask = {"global_batch": 32, "seq_len": 4096, "fix": ["context=1"]}
    # On 37 nodes no layout is legal: it adds nothing.
    front = api.search("llama3-8b", "h100", nodes=2, pareto=[1, 2, 37, 2], **ask).pareto  # type: ignore[arg-type]
    assert {c.setup.cluster.nodes for c in front} == {1, 2}
    costs = [(c.estimate.step_time_s, c.estimate.peak, c.setup.plan.world) for c in front]
    for a in costs:
        assert not [b for b in costs if b != a and all(x <= y for x, y in zip(b, a, strict=True))]
    for choice in front[:: len(front) - 1]:
        nodes, size = choice.setup.cluster.nodes, choice.estimate.peak / GIB
        within = api.search("llama3-8b", "h100", nodes=nodes, memory_gib=size * (1 + 1e-9), **ask)  # type: ignore[arg-type]
        assert within.best.estimate.step_time_s == pytest.approx(choice.estimate.step_time_s, rel=1e-9)


def test_products_in_float8_are_priced_where_someone_measured_them() -> None:
    ask = {"nodes": 2, "global_batch": 64, "seq_len": 4096, "fix": ["context=1"]}
    wide = api.search("llama3-8b", "h100", **ask)  # type: ignore[arg-type]
    found = api.search("llama3-8b", "h100", dtype="float8", **ask)  # type: ignore[arg-type]
    e = found.best.estimate
    assert 0.6 < e.step_time_s / wide.best.estimate.step_time_s < 0.95
    assert e.mfu == pytest.approx(e.tflops_per_gpu / 1978.9, rel=1e-3)
    assert any("float8" in line for line in found.assumptions)
    assert found.best.setup.workload.dtype == "bfloat16"
    same = estimate(found.best.setup, "megatron-core:float8")
    assert same == e
    with pytest.raises(Refused, match=r"A100.* has no products in float8"):
        api.search("llama3-8b", "a100", dtype="float8", **ask)  # type: ignore[arg-type]


def test_states_that_do_not_fit_hint_at_a_neighbour_that_does() -> None:
    words = ["check", "--plan", "data=16,microbatch=1", "--model", "llama3-8b", "--cluster", "h100", "--nodes", "2"]
    done = CliRunner().invoke(main, [*words, "--global-batch", "16", "--seq-len", "4096", "--json"])
    (fault,) = [f for f in json.loads(done.stdout)["errors"] if f["code"] == "H404"]
    axis, value = fault["hint"].split(" (")[0].split(" = ")
    line = f"data=16,microbatch=1,{axis}={value}"
    found = api.check(make_setup(plan=line, model="llama3-8b", cluster="h100", nodes=2, global_batch=16, seq_len=4096))
    assert not found.errors


def _parts(setup: Setup) -> tuple[object, ...]:
    return setup.model, setup.workload, setup.cluster


def test_case_g13_layouts_for_more_devices() -> None:
    """48 layers, 128 experts, batch 512: on 32 devices 12 chunks a rank with expert 8 is legal, expert 32 is not."""
    s = make_subject(
        model_named("qwen3-30b-a3b"),
        Workload(seq_len=4096, global_batch=512, dtype="bfloat16"),
        cluster_named("h100").with_nodes(4),
    )
    fixed = {"tensor": 1, "context": 1, "pipeline": 2, "microbatch": 1, "schedule": "interleaved"}
    p = everything(space_of(s, **fixed, stages_per_rank=12, zero=1, replicate=1, order=ORDERS[0], recompute="none"))
    plans = [plan_of(p, row, Plan()) for row in range(len(p))]
    assert {plan.expert for plan in plans if plan.expert_tensor == 1} == {1, 2, 4, 8, 16}
    assert all(plan.data == 16 and plan.microbatches == 32 for plan in plans)


def test_fixed_fields_hold() -> None:
    fix = ["tensor=4", "zero=1", "recompute=full", "schedule=zb_h1", "bucket_mb=100.0"]
    found = api.search("llama3-8b", "h100", nodes=2, global_batch=64, seq_len=4096, fix=fix)
    for choice in found.plans:
        plan = choice.setup.plan
        assert (plan.tensor, plan.zero, plan.recompute, plan.schedule) == (4, 1, "full", "zb_h1")
        assert plan.bucket_mb == 100.0


@pytest.mark.parametrize(
    ("options", "code", "helps"),
    [
        ({"nodes": 0}, "H102", "a cluster without devices"),
        ({"global_batch": 0}, "B203", "1"),
        ({"global_batch": 7, "fix": ["pipeline=1", "tensor=1", "context=1"]}, "L101", "global_batch = 16"),
        ({"model": "llama3-405b", "nodes": 1}, "L102", "nodes ="),
        ({"memory_gib": -1.0}, "B203", "above 0"),
        ({"memory_gib": 1000.0}, "L106", "79.18 or less"),
        ({"memory_gib": 10.0}, "L102", "memory_gib = 10.9"),
        ({"tokens": float("inf")}, "B203", "above 0"),
        ({"tokens": 1e9, "mtbf_hours": float("inf")}, "B203", "above 0"),
        ({"mtbf_hours": 5.0}, "L104", "--tokens"),
        ({"goal": "cheapest"}, "L104", "--days 30"),
        ({"tokens": 1e10, "days": 1e-300}, "L103", "devices at their peak need longer"),
        ({"nodes": 10**12}, "B206", "125000 or less"),
        ({"global_batch": 10**18}, "B206", "or less"),
        ({"nodes": 1000}, "L101", "global_batch = 65"),
        ({"fix": ["microbatch=7", "microbatches=3"]}, "L101", "global_batch = 21"),
        ({"pareto": [2, 0]}, "B203", "pareto = 0"),
        ({"fix": ["tensor=lots"]}, "F102", "whole number"),
        ({"fix": ["layers=3+5"]}, "L105", "weighed"),
        ({"fix": ["tensor=3"]}, "T203", "tensor = 2 or 4"),
        ({"fix": ["microbatch=0"]}, "B203", "1 or more"),
        ({"fix": ["expert=2"]}, "E101", "leave expert out"),
        ({"fix": ["context=3"]}, "C202", "--seq-len: seq_len = 4096"),
        ({"fix": ["bucket_mb=-1"]}, "D102", "25.0"),
        ({"fix": ["sequence_parallel=true", "tensor=1"]}, "L101", "leave out sequence_parallel or tensor"),
        ({"model": "mixtral-8x7b", "fix": ["expert=16"]}, "E102", "1 or 2 or 4 or 8"),
        ({"days": 3.0}, "L104", "--tokens"),
        ({"days": 0.001, "tokens": 1e13}, "L103", "more days"),
        ({"model": "gpt2", "seq_len": 4096}, "B204", "1024"),
        ({"cluster": "local"}, "H502", "preset"),
        ({"cluster": "v100"}, "H503", "dtype = float16"),
        ({"target": "megatron"}, "X351", "megatron-core"),
    ],
)
def test_bad_input_is_coded_and_says_what_helps(options: dict[str, object], code: str, helps: str) -> None:
    given: dict[str, object] = {"model": "llama3-8b", "cluster": "h100", "nodes": 2, "global_batch": 64}
    given |= {"seq_len": 4096} | options
    if options.get("cluster") == "local":
        given["nodes"] = 1
    with pytest.raises(Refused) as caught:
        api.search(given.pop("model"), given.pop("cluster"), **given)  # type: ignore[arg-type]
    text = str(caught.value)
    assert code in text
    assert helps in text


def test_nothing_fits_names_the_nearest_and_a_hint_that_works() -> None:
    with pytest.raises(Refused, match=r"GiB more than the 79\.2 GiB there are") as caught:
        api.search("llama3-70b", "h100", nodes=1, global_batch=64, seq_len=8192)
    hint = caught.value.faults[0].hint
    nodes = int(hint.split("nodes = ")[1].split(",")[0])
    assert api.search("llama3-70b", "h100", nodes=nodes, global_batch=64, seq_len=8192, top=1).plans


def test_fewest_nodes_that_train_in_time() -> None:
    ask = {"global_batch": 64, "seq_len": 4096, "tokens": 5e10}
    found = api.search("llama3-8b", "h100", nodes=8, days=3, **ask)  # type: ignore[arg-type]
    nodes = found.best.setup.cluster.nodes
    assert found.totals["days"] <= 3
    assert 0.9 < found.totals["goodput"] < 1
    assert nodes > 1
    assert api.search("llama3-8b", "h100", nodes=nodes - 1, **ask).totals["days"] > 3  # type: ignore[arg-type]
    cheapest = api.search("llama3-8b", "h100", nodes=8, days=3, goal="cheapest", **ask)  # type: ignore[arg-type]
    assert cheapest.totals["device_hours"] <= found.totals["device_hours"] * 1.001


def test_goodput_falls_with_devices_and_can_end() -> None:
    some = [Failures().goodput(n) for n in (8, 1024, 16384)]
    assert some == sorted(some, reverse=True)
    assert Failures().goodput(16384) == pytest.approx(0.92, abs=0.05)
    with pytest.raises(Refused, match="L301"):
        Failures(device_hours=10).goodput(1024)


def test_the_verb_prints_the_promised_keys_and_a_plan_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "plan.toml"
    line = "plan --model llama3-8b --cluster h100 --global-batch 32 --seq-len 4096 --top 2 --json --out"
    done = CliRunner().invoke(main, [*line.split(), str(out)])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert {"plans", "searched", "priced", "dismissed", "seconds", "pareto", "robust"} <= set(data)
    promised = {"plan", "step_time_s", "interval_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "memory_gib"}
    assert promised | {"breakdown", "rules"} <= set(data["plans"][0])
    setup = read_setup(out)
    assert str(setup.plan) == data["plans"][0]["plan"]
    assert not [f for f in examine(setup).faults if f.severity == "error"]
    shown = CliRunner().invoke(main, [*line.split()[:-2], "--explain"])
    assert shown.exit_code == 0
    assert "one step away from the best plan" in shown.output
