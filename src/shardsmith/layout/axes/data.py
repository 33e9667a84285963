"""The data axis: replicas work on different sequences, and their gradients are summed.

Level 0 keeps everything on every replica. ZeRO shards over the data axis alone, never over tensor or
pipeline: level 1 the optimiser state, 2 also the gradients, 3 also the weights (Rajbhandari et al. 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardsmith.errors import Code, Fault
from shardsmith.layout.facts import CollectiveCount, CommKind
from shardsmith.plan.mesh import Coord, mesh_of
from shardsmith.plan.plan import Plan
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.units import DTYPE_BYTES, MIB

REPLICATE = Code(
    code="D101",
    title="replicate does not divide data",
    because="data = replicate x shard: ZeRO shards inside each of `replicate` equal groups of data ranks",
)
BUCKET = Code(
    code="D102",
    title="bucket_mb is not above 0",
    because="a bucket is sent when its gradients reach bucket_mb MiB",
)
PARAM_DTYPE = Code(
    code="D104",
    title="weights in another dtype than the computation",
    because="a rank computes with the weights it keeps; a wider master copy is the optimiser's (optimizer_dtype)",
)
OPTIMIZER_DTYPE = Code(
    code="D105",
    title="an optimiser narrower than the weights",
    because="updates below the last place of the optimiser's dtype would be lost, the weights' own places wasted",
)
HALF_OPTIMIZER = Code(
    code="D106",
    title="optimiser state in float16",
    because="float16 ends at 6e-8: squares of small gradients and an epsilon of 1e-8 are 0 in it, and steps explode",
    severity="warning",
)
ZERO_WITHOUT_SHARDS = Code(
    code="D103",
    title="ZeRO has no effect",
    because="ZeRO shards over data ranks only, never over tensor or pipeline ranks; one rank has nothing to share",
    severity="warning",
)


IN_FLIGHT = 2
"""Reductions of one stage that may be under way at once, where each holds a buffer of its own."""


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes that a rank keeps between steps, by kind."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: States) -> States:
        """Both together, kind by kind."""
        return States(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
        )


def shard_ranks(plan: Plan) -> int:
    """Over how many ranks ZeRO spreads states: data.shard x context; nobody at level 0."""
    return plan.shard * plan.context if plan.zero else 1


def shard_index(plan: Plan, coord: Coord) -> int:
    """Which of the `shard_ranks` parts the rank at `coord` keeps: its position among them, by `order`."""
    return mesh_of(plan).place(coord, "shard", "context") if plan.zero else 0


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How states of some tensors are spread: ZeRO shards them over `ranks`, of which this is `index`.

    `replicas` ranks hold the same rows, and sum their gradients.
    """

    ranks: int
    index: int
    replicas: int


def dense_spread(plan: Plan, coord: Coord) -> Spread:
    """The spread of all tensors that the dense mesh cuts, seen from `coord`."""
    ranks = shard_ranks(plan)
    return Spread(ranks=ranks, index=shard_index(plan, coord), replicas=plan.data * plan.context // ranks)


def streams_gradients(plan: Plan) -> bool:
    """Whether each microbatch's gradients are reduced at once, so that they never exist whole between passes."""
    return plan.zero >= 2 and plan.zero_gather == "per_pass"


def states(setup: Setup, parameters: int, moments: int = 2, kept: int | None = None, *, streams: bool = True) -> States:
    """Bytes of weights, gradients and optimiser state of a rank that owns `parameters` before ZeRO.

    AdamW keeps two `moments` of each parameter, and any optimiser a master copy where weights are narrower
    than its dtype: 16 bytes a parameter in float32, 18 with bfloat16 weights and float32 gradients. `kept` is
    the exact number of elements in this rank's rows, where the tensors are known. `streams` is off for a tied
    embedding that waits for both its stages: its gradient stays whole at every level.
    """
    plan, kinds = setup.plan, precision(setup.plan, setup.workload)
    if kept is None:
        kept = -(-parameters // shard_ranks(plan))
    copies = moments + kinds.master
    return States(
        weights=(kept if plan.zero == 3 else parameters) * DTYPE_BYTES[kinds.param],
        gradients=(kept if streams and streams_gradients(plan) else parameters) * DTYPE_BYTES[kinds.grad],
        optimizer=kept * DTYPE_BYTES[kinds.optimizer] * copies,
    )


def buckets(sizes: Sequence[tuple[str, int]], limit: float) -> tuple[tuple[str, ...], ...]:
    """Names of one stage's tensors by bucket, in the order in which the buckets are sent.

    `sizes` are (name, bytes) in the order of the forward pass. Buckets fill in the reverse order, as the
    backward pass makes gradients, and each closes when it reaches `limit` bytes. A tensor of no bytes
    needs no bucket.
    """
    found: list[tuple[str, ...]] = []
    open_names: list[str] = []
    filled = 0
    for name, size in reversed(sizes):
        if size == 0:
            continue
        open_names.append(name)
        filled += size
        if filled >= limit:
            found.append(tuple(open_names))
            open_names, filled = [], 0
    if open_names:
        found.append(tuple(open_names))
    return tuple(found)


def data_rows(rows: int, shards: int, index: int) -> tuple[int, int]:
    """(first row, number of rows) that rank `index` of `shards` keeps of a tensor of `rows` rows.

    Every rank but the last ones keeps ceil(rows / shards); a short tensor leaves the last ranks nothing.
    """
    each = -(-rows // shards)
    first = min(index * each, rows)
    return first, min(first + each, rows) - first


def chunk_elements(shapes: Sequence[tuple[int, ...]], shards: int) -> int:
    """Elements of one rank's part when tensors of `shapes` travel together, each padded to ceil(rows / shards)."""
    return sum(-(-shape[0] // shards) * prod(shape[1:]) for shape in shapes)


def data_collectives(
    setup: Setup,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    passes: int,
    *,
    spread: Spread | None = None,
    streams: bool = True,
) -> list[CollectiveCount]:
    """The gradients of one stage's `tensors` (name, shape before ZeRO), reduced over the data axis in one step.

    Shapes have the dim that ZeRO cuts first.

    A reduce-scatter over the shard ranks and an all-reduce over the replicas, bucket by bucket; level 0 shards
    over nobody. Levels 2 and 3 reduce-scatter each of the `passes` microbatches, unless weights are gathered
    once per step or `streams` is off (a tied embedding waits for both its stages). Replicas sum the rows that
    this rank keeps by its `spread`, which is that of the first rank of the dense mesh unless stated.
    """
    plan, kinds = setup.plan, precision(setup.plan, setup.workload)
    spread = spread or dense_spread(plan, Coord(pipeline=0, replicate=0, shard=0, context=0, tensor=0))
    shards, index = spread.ranks, spread.index
    wide, narrow = DTYPE_BYTES[kinds.grad], DTYPE_BYTES[kinds.reduce]
    shapes = dict(tensors)
    stream = streams and streams_gradients(plan)
    found = []
    for names in buckets([(n, prod(s) * wide) for n, s in tensors], plan.bucket_mb * MIB):
        chunk = chunk_elements([shapes[n] for n in names], shards)
        if shards > 1:
            count = passes if stream else 1
            size = count * shards * chunk * narrow
            found.append(_gradients("reduce_scatter", count, size))
        if spread.replicas > 1:
            kept = sum(data_rows(shapes[n][0], shards, index)[1] * prod(shapes[n][1:]) for n in names)
            found.append(_gradients("all_reduce", 1, kept * narrow))
    return found


@dataclass(frozen=True, kw_only=True)
class UnitUse:
    """Weights that are gathered together over `ranks`: their `shapes` before ZeRO, and uses in a microbatch."""

    shapes: tuple[tuple[int, ...], ...]
    per_microbatch: int
    ranks: int


def weight_collectives(setup: Setup, units: Sequence[UnitUse], passes: int) -> list[CollectiveCount]:
    """The gathers of sharded weights in one step of `passes` microbatches, one call a unit and use.

    Levels 1 and 2 gather once, after the optimiser; level 3 once per step, or for each use.
    """
    plan, kinds = setup.plan, precision(setup.plan, setup.workload)
    found = []
    for unit in units:
        if unit.ranks == 1:
            continue
        count = passes * unit.per_microbatch if plan.zero == 3 and plan.zero_gather == "per_pass" else 1
        size = count * unit.ranks * chunk_elements(unit.shapes, unit.ranks) * DTYPE_BYTES[kinds.param]
        found.append(CollectiveCount(axis="data", kind="all_gather", purpose="weights", count=count, bytes=size))
    return found


def _gradients(kind: CommKind, count: int, size: int) -> CollectiveCount:
    return CollectiveCount(axis="data", kind=kind, purpose="gradients", count=count, bytes=size)


def data_faults(setup: Setup) -> list[Fault]:
    """What the data axis forbids, and ZeRO levels that would shard nothing."""
    plan, faults = setup.plan, precision_faults(setup)
    if plan.data % plan.replicate:
        legal = [r for r in range(1, plan.data + 1) if plan.data % r == 0]
        message = f"replicate = {plan.replicate} does not divide data = {plan.data}"
        hint = "replicate = one of " + ", ".join(map(str, legal))
        return [REPLICATE.fault(message, *setup.said("plan.replicate", "plan.data"), hint=hint)]
    if not plan.bucket_mb > 0:
        message = f"bucket_mb = {plan.bucket_mb} is not above 0"
        faults.append(BUCKET.fault(message, *setup.said("plan.bucket_mb"), hint="bucket_mb = 25.0"))
    shards = plan.shard * plan.context
    if plan.zero and shards == 1:
        message = (
            f"zero = {plan.zero} saves nothing: weights, gradients and optimiser state are each divided by "
            f"data / replicate x context = {plan.data} / {plan.replicate} x {plan.context} = 1"
        )
        said = setup.said("plan.zero", "plan.data", "plan.replicate", "plan.context")
        hint = "data = 2 or more" if plan.data == 1 else f"replicate = 1 (shards over {plan.data})"
        faults.append(ZERO_WITHOUT_SHARDS.fault(message, *said, hint=hint))
    return faults


def precision_faults(setup: Setup) -> list[Fault]:
    """Combinations of dtypes that would waste or lose what they hold."""
    kinds, faults = precision(setup.plan, setup.workload), []
    if kinds.param != setup.workload.dtype:
        message = f"param_dtype = {kinds.param}, but the computation is in {setup.workload.dtype}"
        said = setup.said("plan.param_dtype", "workload.dtype")
        hint = f"leave param_dtype out, or dtype = {kinds.param}"
        faults.append(PARAM_DTYPE.fault(message, *said, hint=hint))
    if DTYPE_BYTES[kinds.optimizer] < DTYPE_BYTES[kinds.param]:
        message = f"optimizer_dtype = {kinds.optimizer} is narrower than weights in {kinds.param}"
        said = setup.said("plan.optimizer_dtype", "plan.param_dtype", "workload.dtype")
        hint = f"leave optimizer_dtype out, or optimizer_dtype = {kinds.param}"
        faults.append(OPTIMIZER_DTYPE.fault(message, *said, hint=hint))
    elif kinds.optimizer == "float16":
        said = setup.said("plan.optimizer_dtype")
        message = "moments and weights of the optimiser are kept in float16"
        faults.append(HALF_OPTIMIZER.fault(message, *said, hint="optimizer_dtype = float32 or bfloat16"))
    return faults
