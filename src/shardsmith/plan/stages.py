"""Which layers stand on which global stage, and on which pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heapreplace
from math import ceil

from shardsmith.errors import Code, Fault
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.schedule import orders
from shardsmith.specs.flops import model_flops
from shardsmith.specs.model import ModelSpec
from shardsmith.units import counted

TOO_MANY_STAGES = Code(
    code="P301",
    title="more stages than layers",
    because="a stage without a layer would only pass tensors on, and the pipeline would wait for it all the same",
)
LAYERS_LENGTH = Code(
    code="P302",
    title="layers does not name every stage once",
    because="layers holds one count for each global stage: pipeline x stages_per_rank of them",
)
LAYERS_SUM = Code(
    code="P303",
    title="layers does not add up to the model",
    because="every layer of the model stands on exactly one stage, or it would silently be left out",
)
EMPTY_STAGE = Code(
    code="P304",
    title="a stage with nothing to do",
    because="a stage holds at least a layer, the embedding or the head",
)
UNBALANCED = Code(
    code="P305",
    title="another split of the layers has a cheaper largest stage",
    because="the slowest stage sets the pace of the pipeline, and the head costs as much as several layers",
    severity="warning",
)

EMBEDDING_FLOPS = 1024.0
"""What the embedding costs per hidden element and token, forward and backward, in FLOPs of the same duration.

It computes nothing but moves 4 elements (read, write; read gradient, add it to the table), and devices do
on the order of 256 FLOPs in the time in which they move one element (A100: 312e12 FLOP/s against 1.0e12
bfloat16 elements/s). Far below one layer for any real model, so the exact figure decides ties only."""

WORTH_SAYING = 0.02
"""Share by which the largest stage must become cheaper before another split is proposed."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Global stage `index` on pipeline `rank`: its layers, and whether the embedding or the head stands there.

    Position embeddings go with the embedding, the final norm with the head.
    """

    index: int
    rank: int
    layers: tuple[int, ...]
    embedding: bool
    head: bool


def stages(plan: Plan, model: ModelSpec) -> tuple[Stage, ...]:
    """The stages of a legal plan, in the order of the forward pass: every layer exactly once.

    `plan.layers` decides where it is given, else layers are spread evenly (`even_layers`). A plan that
    asks for "weighed" layers must have gone through `settled`, which needs the sequence length.
    """
    assert plan.layers != "weighed", "weighed layers depend on the workload: settle the setup first"
    placement = placement_of(plan)
    counts = plan.layers if plan.layers is not None else even_layers(model.layers, len(placement))
    assert len(counts) == len(placement), f"{len(counts)} layer counts for {len(placement)} stages"
    assert sum(counts) == model.layers, f"stages hold {sum(counts)} of {model.layers} layers"
    found, first = [], 0
    for index, (rank, count) in enumerate(zip(placement, counts, strict=True)):
        layers = tuple(range(first, first + count))
        last = index == len(placement) - 1
        found.append(Stage(index=index, rank=rank, layers=layers, embedding=index == 0, head=last))
        first += count
    return tuple(found)


def stages_per_rank(plan: Plan) -> int:
    """How many global stages each pipeline rank owns: as stated, or what the schedule usually takes."""
    if plan.stages_per_rank is not None:
        return plan.stages_per_rank
    return int(orders.load(plan.schedule).DEFAULT_STAGES_PER_RANK)


def placement_of(plan: Plan) -> tuple[int, ...]:
    """The pipeline rank of every global stage, as the plan's schedule places them."""
    order = orders.load(plan.schedule)
    return tuple(order.placement(pipeline=plan.pipeline, stages_per_rank=stages_per_rank(plan)))


def stage_of_layer(plan: Plan, model: ModelSpec, layer: int) -> Stage:
    """The one stage that holds `layer`."""
    return next(stage for stage in stages(plan, model) if layer in stage.layers)


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """`layers` over `stages` with sizes that differ by at most one, earlier stages taking the remainder."""
    each, rest = divmod(layers, stages)
    return tuple(each + (stage < rest) for stage in range(stages))


def weighed_layers(model: ModelSpec, stages: int, seq_len: int) -> tuple[int, ...]:
    """The layers of each stage such that the most expensive stage, embedding and head included, costs least.

    Layers cost the same, so giving each next layer to the stage that is cheapest so far is optimal. Ties
    go to the earlier stage.
    """
    layer, costs = layer_cost(model, seq_len), stage_costs(model, (0,) * stages, seq_len)
    # Up to a level that the total cannot fall short of, every stage below it is filled before any goes beyond it.
    below: Sequence[float] = costs
    while True:
        level = (sum(below) + model.layers * layer) / len(below) - layer
        fewer = [cost for cost in below if cost < level]
        if len(fewer) in (0, len(below)):
            break
        below = fewer
    counts = [max(0, ceil((level - cost) / layer)) for cost in costs]
    queue = [(cost + count * layer, stage) for stage, (cost, count) in enumerate(zip(costs, counts, strict=True))]
    heapify(queue)
    for _ in range(model.layers - sum(counts)):
        cost, cheapest = queue[0]
        counts[cheapest] += 1
        heapreplace(queue, (cost + layer, cheapest))
    return tuple(counts)


@cache
def layer_cost(model: ModelSpec, seq_len: int) -> float:
    """FLOPs of one layer per token, forward and backward, with causal attention over `seq_len` keys."""
    items = model_flops(model.with_(layers=1), seq_len=seq_len, tokens=1).items
    return float(sum(count for part, count in items.items() if part != "head"))


def stage_costs(model: ModelSpec, counts: tuple[int, ...], seq_len: int) -> tuple[float, ...]:
    """FLOPs of each stage per token, forward and backward, with `counts` layers a stage.

    The head counts like any matrix, the embedding as `EMBEDDING_FLOPS` weighs it.
    """
    layer = layer_cost(model, seq_len)
    costs = [count * layer for count in counts]
    costs[0] += EMBEDDING_FLOPS * model.hidden
    costs[-1] += head_cost(model, seq_len)
    return tuple(costs)


@cache
def head_cost(model: ModelSpec, seq_len: int) -> float:
    """FLOPs of the head per token, forward and backward."""
    return float(model_flops(model, seq_len=seq_len, tokens=1).items["head"])


def settled(setup: Setup) -> Setup:
    """`setup` with the layers of each stage in numbers, where its plan asked for "weighed" ones."""
    plan = setup.plan
    if plan.layers != "weighed" or plan.pipeline < 1 or (plan.stages_per_rank or 1) < 1:
        return setup
    count = len(placement_of(setup.plan))
    return setup.with_plan(layers=weighed_layers(setup.model, count, setup.workload.seq_len))


def brief(setup: Setup) -> Plan:
    """A legal plan as it reads best: with "weighed" for layers that are what this settles to."""
    plan = setup.plan
    if plan.layers is None or plan.layers == "weighed":
        return plan
    weighed = weighed_layers(setup.model, len(plan.layers), setup.workload.seq_len)
    return plan.with_(layers="weighed") if tuple(plan.layers) == weighed else plan


def stage_faults(setup: Setup) -> list[Fault]:
    """What is wrong with the split into stages; assumes a schedule that exists and degrees of at least 1."""
    plan, model = setup.plan, setup.model
    count = len(placement_of(plan))
    if plan.layers is not None and plan.layers != "weighed":
        return _list_faults(setup, plan.layers, count)
    if count <= model.layers:
        return _balance_warning(setup, count) if plan.layers is None else []
    each = stages_per_rank(plan)
    hints = [f"pipeline = {model.layers // each}"] if model.layers >= each else []
    fewer = model.layers // plan.pipeline
    hints += (
        [f"stages_per_rank = {fewer}"] if each > fewer >= orders.load(plan.schedule).DEFAULT_STAGES_PER_RANK else []
    )
    said = setup.said("plan.pipeline", "plan.schedule", "model.layers")
    product = f"pipeline x stages per rank = {plan.pipeline} x {each} = {counted(count, 'stage')}"
    message = f"{product} for {counted(model.layers, 'layer')}"
    return [TOO_MANY_STAGES.fault(message, *said, hint=", or ".join([*hints, _spread_hint(model.layers, count)]))]


def _spread_hint(layers: int, count: int) -> str:
    """Where only the ends would be without a layer, an explicit list is legal."""
    inner = count - 2
    if not 0 < inner <= layers:
        return f"a model of at least {counted(count, 'layer')}"
    middle = even_layers(layers, inner)
    return "layers = " + "+".join(map(str, (0, *middle, 0))) + " (embedding and head on stages of their own)"


def _list_faults(setup: Setup, counts: tuple[int, ...], count: int) -> list[Fault]:
    model, said = setup.model, setup.said("plan.layers")
    faults = []
    even = "layers = " + "+".join(map(str, even_layers(model.layers, count)))
    hint = even if count <= model.layers else _spread_hint(model.layers, count)
    if len(counts) != count:
        message = f"layers names {counted(len(counts), 'stage')}, but pipeline x stages per rank = {count}"
        values = (*said, *setup.said("plan.pipeline", "plan.stages_per_rank"))
        faults.append(LAYERS_LENGTH.fault(message, *values, hint=hint))
    if sum(counts) != model.layers:
        message = f"layers adds up to {sum(counts)}, but {model.name} has {counted(model.layers, 'layer')}"
        faults.append(LAYERS_SUM.fault(message, *said, *setup.said("model.layers"), hint=hint))
    for index, layers in enumerate(counts):
        ends = index in (0, len(counts) - 1)
        if layers < 0 or (layers == 0 and not ends):
            message = f"stage {index} would hold {counted(layers, 'layer')}"
            faults.append(EMPTY_STAGE.fault(message, *said, hint=hint))
    return faults


def _balance_warning(setup: Setup, count: int) -> list[Fault]:
    model, seq_len = setup.model, setup.workload.seq_len
    even, best = even_layers(model.layers, count), weighed_layers(model, count, seq_len)
    costs = stage_costs(model, even, seq_len)
    now, then = max(costs), max(stage_costs(model, best, seq_len))
    if then >= now * (1 - WORTH_SAYING):
        return []
    message = (
        f"stage {costs.index(now)} costs {now / 1e6:.4g} MFLOP a token with layers = {'+'.join(map(str, even))}; "
        f"with layers = {'+'.join(map(str, best))} the largest stage costs {then / 1e6:.4g} ({then / now - 1:+.1%})"
    )
    said = setup.said("plan.layers", "model.layers", "model.vocab", "workload.seq_len")
    return [UNBALANCED.fault(message, *said, hint='layers = "weighed", or that list')]
