"""The data axis: replicas work on different sequences, and their gradients are summed.

Level 0 keeps everything on every replica. ZeRO shards over the data axis alone, never over tensor or
pipeline: level 1 the optimiser state, 2 also the gradients, 3 also the weights (Rajbhandari et al. 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardsmith.errors import Code, Fault
from shardsmith.layout.facts import CollectiveCount
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
ZERO_WITHOUT_SHARDS = Code(
    code="D103",
    title="ZeRO has no effect",
    because="ZeRO shards over data ranks only, never over tensor or pipeline ranks; one rank has nothing to share",
    severity="warning",
)


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


@dataclass(frozen=True, kw_only=True)
class Divisors:
    """Over how many ranks ZeRO spreads each kind of state."""

    weights: int
    gradients: int
    optimizer: int


def zero_divisors(setup: Setup) -> Divisors:
    """The divisor of each kind of state at the plan's ZeRO level; it shards over data.shard x context."""
    plan = setup.plan
    shards = plan.shard * plan.context
    return Divisors(
        optimizer=shards if plan.zero >= 1 else 1,
        gradients=shards if plan.zero >= 2 else 1,
        weights=shards if plan.zero >= 3 else 1,
    )


def states(setup: Setup, parameters: int, moments: int = 2) -> States:
    """Bytes of weights, gradients and optimiser state of a rank that owns `parameters` before ZeRO.

    AdamW keeps two `moments` of each parameter, and any optimiser a master copy where weights are narrower
    than its dtype: 16 bytes a parameter in float32, 18 with bfloat16 weights and float32 gradients.
    """
    kinds, over = precision(setup.plan, setup.workload), zero_divisors(setup)
    copies = moments + kinds.master
    return States(
        weights=-(-parameters // over.weights) * DTYPE_BYTES[kinds.param],
        gradients=-(-parameters // over.gradients) * DTYPE_BYTES[kinds.grad],
        optimizer=-(-parameters // over.optimizer) * DTYPE_BYTES[kinds.optimizer] * copies,
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


def data_collectives(setup: Setup, sizes: Sequence[tuple[str, int]]) -> list[CollectiveCount]:
    """The gradient buckets of one stage, all-reduced once a step over the data axis."""
    if setup.plan.data == 1:
        return []
    count = len(buckets(sizes, setup.plan.bucket_mb * MIB))
    size = sum(bytes_ for _, bytes_ in sizes)
    return [CollectiveCount(axis="data", kind="all_reduce", purpose="gradients", count=count, bytes=size)]


def data_faults(setup: Setup) -> list[Fault]:
    """What the data axis forbids, and ZeRO levels that would shard nothing."""
    plan, faults = setup.plan, []
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
