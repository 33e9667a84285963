"""The expert axis: every rank holds some of the routed experts, and tokens travel to the experts they chose.

The expert mesh is a second cut of the ranks of one pipeline rank: replica x shard x expert x expert_tensor =
data x context x tensor (`plan.mesh.expert_coord`). Rank e of `expert` holds count / expert experts, and
`expert_tensor` cuts each of them as the tensor axis cuts an MLP: gate and up by rows, down by columns. Ranks
that hold the same part sum its gradients and share its states under ZeRO; since each sees other tokens of a loss
that is already divided by the tokens of the whole step, sums are plain.

All ranks of a dispatch group (expert x expert_tensor) own different tokens: tensor ranks, which share the tokens
of an attention block, take 1/tensor of a sequence each. One all-to-all brings a token's row to every rank that
holds a part of an expert it chose, and one brings the partial outputs back, where they are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, gcd

from shardsmith.errors import Code, Fault
from shardsmith.layout.facts import CollectiveCount, CommKind, Shard
from shardsmith.plan.batch import batching, divisors
from shardsmith.plan.mesh import Coord, expert_coord, expert_sizes
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import Stage
from shardsmith.specs.model import Experts, ModelSpec, Weight
from shardsmith.units import DTYPE_BYTES, counted

DENSE = Code(
    code="E101",
    title="expert settings on a model without experts",
    because="a dense model has no experts to place, to split or to limit, so the field would be ignored",
)
COUNT = Code(
    code="E102",
    title="expert does not divide the experts",
    because="each expert rank holds an equal number of whole experts",
)
RANKS = Code(
    code="E103",
    title="expert x expert_tensor does not divide the ranks it is carved from",
    because="the expert mesh cuts the same ranks a second time: data.shard x context x tensor of each replica",
)
WIDTH = Code(
    code="E104",
    title="expert_tensor does not divide the width of an expert",
    because="each rank that holds a part of an expert computes an equal share of its inner width",
)
TOKENS = Code(
    code="E105",
    title="tensor does not divide the sequence of a model with experts",
    because="tensor ranks route different tokens, an equal share of each sequence (of its part, with context)",
)
CAPACITY = Code(
    code="E106",
    title="capacity_factor is not above 0",
    because="an expert takes capacity_factor x top_k / experts of the tokens of a sequence, rounded up",
)

GATED: tuple[str, ...] = ("expert_gate", "expert_up")
COUNT_BYTES = 8
"""Counts and choices travel as int64."""


def is_routed(weight: Weight) -> bool:
    """Whether `weight` holds routed experts, stacked as [experts, rows, columns]."""
    return weight.role.startswith("expert_")


def expert_shards(plan: Plan) -> int:
    """Over how many ranks ZeRO spreads the states of an expert; nobody at level 0."""
    return expert_sizes(plan).shard if plan.zero else 1


def expert_shard(weight: Weight, plan: Plan, coord: Coord) -> Shard:
    """The part of the stacked experts `weight` that the rank at `coord` holds.

    ZeRO cuts its experts where they share out evenly, else the rows of each.
    """
    assert is_routed(weight), f"{weight.name} holds no routed experts"
    place = expert_coord(plan, coord)
    dim = 1 if weight.role in GATED else 2
    offsets, shape = [0, 0, 0], list(weight.shape)
    for at, degree, index in ((0, plan.expert, place.expert), (dim, plan.expert_tensor, place.tensor)):
        shape[at] //= degree
        offsets[at] = index * shape[at]
    even = shape[0] % expert_shards(plan) == 0
    return Shard(offsets=tuple(offsets), shape=tuple(shape), expert=True, zero_dim=0 if even else 1)


def capacity(experts: Experts, factor: float | None, seq_len: int) -> int | None:
    """How many tokens of a sequence of `seq_len` an expert takes at most; None: all that choose it.

    ceil(factor x seq_len x top_k / count), as GShard (Lepikhin et al. 2020) counts it, for each sequence by
    itself, so that it depends on no layout.
    """
    if factor is None:
        return None
    fair = factor * seq_len * experts.top_k / experts.count
    return max(1, ceil(min(fair, seq_len)))


def takes_grouped(bytes_per_element: int, *widths: int) -> bool:
    """Whether torch's grouped product takes matrices of these widths: no float64, rows in multiples of 16 bytes."""
    return bytes_per_element < DTYPE_BYTES["float64"] and all(w * bytes_per_element % 16 == 0 for w in widths)


def local_tokens(setup: Setup) -> int:
    """Tokens of a microbatch that one rank routes: 1/(context x tensor) of each of its sequences."""
    plan, work = setup.plan, setup.workload
    return batching(plan, work).microbatch * work.seq_len // (plan.context * plan.tensor)


def dispatched_rows(setup: Setup) -> int:
    """Rows that a rank sends in one dispatch of a microbatch: a token to each part of each expert it chose.

    With a capacity fewer travel where experts overflow; how many fewer depends on the routing.
    """
    assert setup.model.experts is not None, "only for models with experts"
    return local_tokens(setup) * setup.model.experts.top_k * setup.plan.expert_tensor


@dataclass(frozen=True, kw_only=True)
class RoutedActivations:
    """Elements that the routed experts of one layer and microbatch keep for backward on one rank.

    `received` are the rows at the experts, `inner` each of gate, up and their product of this rank's part, `combined`
    the outputs at the tokens' owner, which the gradient of the routing weights needs, `scores` those of the router (in
    float32 or wider; logits, too, where there is a z-loss). Not counted are indices and choices.
    """

    received: int
    inner: int
    combined: int
    scores: int

    @property
    def total(self) -> int:
        """All elements."""
        return self.received + 3 * self.inner + self.combined + self.scores


def routed_activations(setup: Setup, *, sent: int | None = None, received: int | None = None) -> RoutedActivations:
    """What the experts of one layer keep for one microbatch; see `RoutedActivations`.

    Unless rows `sent` and `received` are stated, a rank gets as many as it sends, and none is dropped.
    """
    experts = setup.model.experts
    assert experts is not None, "only for models with experts"
    sent = dispatched_rows(setup) if sent is None else sent
    received = sent if received is None else received
    return RoutedActivations(
        received=received * setup.model.hidden,
        inner=received * (experts.ffn // setup.plan.expert_tensor),
        combined=sent * setup.model.hidden,
        scores=(1 + (experts.z_loss > 0)) * local_tokens(setup) * experts.count,
    )


def expert_collectives(setup: Setup, stage: Stage, rows: int | None = None) -> list[CollectiveCount]:
    """The calls for the routed experts of one stage in one step, without gradients and weights.

    A rank sends `rows` in a dispatch (`dispatched_rows` unless stated).
    A dispatch and a combine forward, the reverse of both backward, and both again where the layer is recomputed.
    Ahead of a dispatch go the counts of rows. Where a sequence lies on several ranks, the tokens of each expert
    are counted over all of it for the auxiliary loss, and choices gathered for a capacity.
    """
    plan, model = setup.plan, setup.model
    layers = sum(model.is_sparse(layer) for layer in stage.layers)
    if model.experts is None or not layers:
        return []
    batch = batching(plan, setup.workload)
    passes, again = batch.microbatches * layers, int(plan.recompute == "full")
    found: list[CollectiveCount] = []

    def calls(kind: CommKind, purpose: str, per_pass: int, each: int) -> None:
        count = per_pass * passes
        found.append(CollectiveCount(axis="expert", kind=kind, purpose=purpose, count=count, bytes=count * each))

    if plan.context * plan.tensor > 1:
        sequences = batch.microbatch
        if model.experts.has_aux_loss:
            calls("all_reduce", "sequence_counts", 1 + again, sequences * model.experts.count * COUNT_BYTES)
        if plan.capacity_factor is not None:
            # With each token goes its place in the sequence.
            size = sequences * setup.workload.seq_len * (model.experts.top_k + 1) * COUNT_BYTES
            calls("all_gather", "sequence_choices", 1 + again, size)
    if plan.expert * plan.expert_tensor > 1:
        rows = dispatched_rows(setup) if rows is None else rows
        size = rows * model.hidden * DTYPE_BYTES[setup.workload.dtype]
        calls("all_to_all", "expert_rows", 1 + again, model.experts.count * plan.expert_tensor * COUNT_BYTES)
        for purpose in ("dispatch", "combine"):
            calls("all_to_all", f"{purpose}_forward", 1 + again, size)
            calls("all_to_all", f"{purpose}_backward", 1, size)
    return found


def load_collectives(setup: Setup) -> list[CollectiveCount]:
    """The one all-reduce a step of all routing statistics: tokens of every expert of every layer, and losses."""
    model = setup.model
    if model.experts is None or setup.plan.world == 1:
        return []
    size = load_numbers(model) * DTYPE_BYTES["float64"]
    return [CollectiveCount(axis="data", kind="all_reduce", purpose="expert_loads", count=1, bytes=size)]


def load_numbers(model: ModelSpec) -> int:
    """How many numbers the routing statistics of a step are: a load an expert and layer, two losses, dropped rows."""
    assert model.experts is not None, "only for models with experts"
    return sum(model.is_sparse(layer) for layer in range(model.layers)) * model.experts.count + 3


def legal_expert_degrees(plan: Plan, model: ModelSpec) -> tuple[int, ...]:
    """Every degree of `expert` that the experts and the other degrees of `plan` allow, ascending."""
    if model.experts is None:
        return (1,)
    ranks = plan.shard * plan.context * plan.tensor
    if ranks % plan.expert_tensor:
        return ()
    return divisors(gcd(ranks // plan.expert_tensor, model.experts.count))


def expert_faults(setup: Setup) -> list[Fault]:
    """What the expert axis forbids, each with the nearest legal values."""
    plan, experts = setup.plan, setup.model.experts
    if experts is None:
        return _dense_faults(setup)
    faults: list[Fault] = []
    legal = legal_expert_degrees(plan, setup.model)
    hint = f"expert = {_listed(legal)}" if legal else _parts_hint(plan, experts)
    said = (setup.origin("model.experts"), f"experts.count = {experts.count}")
    if experts.count % plan.expert:
        message = f"expert = {plan.expert} does not divide {counted(experts.count, 'expert')}"
        faults.append(COUNT.fault(message, *setup.said("plan.expert"), said, hint=hint))
    inner = plan.expert * plan.expert_tensor
    if plan.replicate and plan.data % plan.replicate == 0 and _carved(plan) % inner:
        message = (
            f"expert x expert_tensor = {plan.expert} x {plan.expert_tensor} = {inner} does not divide "
            f"data / replicate x context x tensor = {plan.data} / {plan.replicate} x {plan.context} x {plan.tensor} = "
            f"{_carved(plan)}"
        )
        keys = ("expert", "expert_tensor", "data", "replicate", "context", "tensor")
        faults.append(RANKS.fault(message, *setup.said(*(f"plan.{key}" for key in keys)), hint=hint))
    if experts.ffn % plan.expert_tensor:
        message = f"expert_tensor = {plan.expert_tensor} does not divide {counted(experts.ffn, 'column')} of an expert"
        wide = (setup.origin("model.experts"), f"experts.ffn = {experts.ffn}")
        faults.append(WIDTH.fault(message, *setup.said("plan.expert_tensor"), wide, hint=_parts_hint(plan, experts)))
    return faults + _token_faults(setup)


def _parts_hint(plan: Plan, experts: Experts) -> str:
    """Degrees of `expert_tensor` that the experts and the ranks allow, beside the plan's `expert` where it may stay."""
    ranks = _carved(plan)
    degrees = [d for d in divisors(experts.ffn) if ranks % d == 0]
    beside = [d for d in degrees if experts.count % plan.expert == 0 and ranks % (d * plan.expert) == 0]
    return f"expert_tensor = {_listed(beside)}" if beside else f"expert = 1 with expert_tensor = {_listed(degrees)}"


def _token_faults(setup: Setup) -> list[Fault]:
    plan, faults = setup.plan, []
    parts = plan.context * plan.tensor
    if plan.tensor > 1 and setup.workload.seq_len % parts:
        seq_len = setup.workload.seq_len
        near = " or ".join(str(s) for s in (seq_len - seq_len % parts, seq_len - seq_len % parts + parts) if s)
        message = f"context x tensor = {plan.context} x {plan.tensor} = {parts} does not divide seq_len = {seq_len}"
        said = setup.said("plan.context", "plan.tensor", "workload.seq_len")
        faults.append(TOKENS.fault(message, *said, hint=f"seq_len = {near}"))
    if plan.capacity_factor is not None and not plan.capacity_factor > 0:
        message = f"capacity_factor = {plan.capacity_factor} is not above 0"
        hint = "capacity_factor = 1.25, or leave it out: no token is dropped then"
        faults.append(CAPACITY.fault(message, *setup.said("plan.capacity_factor"), hint=hint))
    return faults


def _dense_faults(setup: Setup) -> list[Fault]:
    neutral = {"expert": 1, "expert_tensor": 1, "capacity_factor": None}
    return [
        DENSE.fault(
            f"{setup.model.name} has no experts",
            *setup.said(f"plan.{key}"),
            (setup.model.name, "no [experts]"),
            hint=f"leave {key} out, or a model with experts, such as tiny-moe",
        )
        for key, value in neutral.items()
        if getattr(setup.plan, key) != value
    ]


def _carved(plan: Plan) -> int:
    """Number of ranks that the expert mesh cuts in each replica."""
    return plan.data // plan.replicate * plan.context * plan.tensor


def _listed(degrees: Sequence[int]) -> str:
    return " or ".join(map(str, degrees))
