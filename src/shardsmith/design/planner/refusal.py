"""Refusal: why a question has no plan, and what would help, tried before it is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import ceil, gcd, lcm, prod

from shardsmith.design.cost.subject import Subject, make_subject
from shardsmith.design.planner.bounded import Bounded
from shardsmith.design.planner.found import Found
from shardsmith.design.planner.plans import setup_of
from shardsmith.design.planner.question import Question, fixed_faults, held_ranks
from shardsmith.design.planner.space import SHAPE, Space
from shardsmith.design.planner.tables import frames_of
from shardsmith.errors import Code, Fault, raise_errors
from shardsmith.layout.check import MOST, MOST_DATA
from shardsmith.plan.fixed import combinations, held_values, shown_value
from shardsmith.plan.plan import Plan
from shardsmith.units import GIB, counted

NO_LAYOUT = Code(
    code="L101",
    title="no legal layout",
    because="every rank needs a device, every data rank an equal part of the batch, every stage a layer or an "
    "end of the model",
)
NOTHING_FITS = Code(
    code="L102",
    title="no layout fits",
    because="on every rank weights, states, activations, logits and buffers have to fit into the device's memory",
)


def subject_asked(q: Question) -> Subject:
    """What is priced beside the plan. Raises `Refused`: E107, H501 to H503."""
    return make_subject(q.model, q.workload, q.cluster, q.target, imbalance=q.imbalance)


def space_asked(q: Question, s: Subject) -> Space:
    """All plans that the question is about."""
    assert s.cluster.devices, "a cluster of unknown size has been refused"
    return Space(subject=s, world=s.cluster.devices, fixed=q.varied, base=q.base)


def refuse(s: Subject, q: Question, space: Space, found: Found) -> None:
    """Say why there is no plan, and what would help."""
    world = space.world
    said = [(s.cluster.name, f"devices = {world}"), (s.model.name, f"layers = {s.model.layers}")]
    said.append(("--global-batch", f"global_batch = {s.workload.global_batch}"))
    said += [("--fix", f"{key} = {shown_value(value)}") for key, value in q.fixed.items()]
    if found.total == 0:
        _refuse_shapes(s, q, space, said)
    smallest, size = smallest_plan(s, q, space)
    need = size / GIB
    more = _enough(q)
    hints = [f"nodes = {more}"] if more else []
    capped = q.memory_gib is not None and need <= (s.cluster.device.memory_gib or 0.0)
    enough = ceil(need * 10) / 10
    hints.append(f"memory_gib = {enough:g}" if capped else f"a device with {enough:.1f} GiB")
    hints.append("a shorter sequence, or a smaller model" if s.workload.seq_len > 1 else "a smaller model")
    limit = q.limit / GIB
    # A gap that one digit would round away is told with more.
    digits = 1 if need - limit >= 0.1 else 4
    raise NOTHING_FITS.refuse(
        f"{s.model.name} on {counted(world, 'device')}: the nearest layout, {smallest}, "
        f"holds {need:.{digits}f} GiB on its fullest rank, {need - limit:.{digits}f} GiB more than the "
        f"{limit:.{digits}f} GiB there are",
        (s.cluster.name if q.memory_gib is None else "--memory-gib", f"memory_gib = {limit:g}"),
        *said,
        hint=", or ".join(hints),
    )


def _refuse_shapes(s: Subject, q: Question, space: Space, said: Sequence[tuple[str, str]]) -> None:
    """Say why nothing is legal: fields that exclude one another, or a batch or number of ranks that degrees divide."""
    raise_errors(fixed_faults(q))
    raise_errors(_too_many(space.world, q))
    batch, free = _nearest_batch(s, q, space), _one_too_many(q, space)
    nodes = None if batch else _nearest_nodes(q)
    message = f"no product of degrees makes {counted(space.world, 'rank')} with a batch of {s.workload.global_batch}"
    if q.fixed and not batch:
        message = "nothing that is legal has all fields that are held"
    hints = [f"{key} = {value}" for key, value in (("global_batch", batch), ("nodes", nodes)) if value]
    if free:
        hints.append("leave out " + " or ".join(free))
    elif len(q.fixed) > 1:
        hints.append("fix fewer fields")
    raise NO_LAYOUT.refuse(message, *said, hint=", or ".join(hints) or "another number of nodes")


def _too_many(world: int, q: Question) -> list[Fault]:
    """Degrees that are held and make more ranks than there are devices, or a number that does not divide them."""
    degrees = {key: value for key, value in q.fixed.items() if key in ("tensor", "context", "pipeline", "data")}
    least = held_ranks(q)
    if any(world % prod(held.values()) == 0 for held in combinations(degrees)):
        return []
    each = q.cluster.devices_per_node or 1
    named = " x ".join(f"{key} = {value}" for key, value in degrees.items())
    message = f"{named}: {counted(least, 'rank')}, " + (
        f"more than the {counted(world, 'device')}"
        if least > world
        else f"which {counted(world, 'device')} are no multiple of"
    )
    said = [("--fix", f"{key} = {value}") for key, value in degrees.items()]
    nodes = lcm(least, each) // each
    hint = f"nodes = {nodes}, or smaller degrees" if least > world else f"degrees whose product divides {world}"
    return [NO_LAYOUT.fault(message, *said, (q.cluster.name, f"devices = {world}"), hint=hint)]


def _one_too_many(q: Question, space: Space) -> list[str]:
    """Held fields without any one of which something is legal."""
    others = {key: {name: value for name, value in q.varied.items() if name != key} for key in q.varied}
    return [key for key, fixed in others.items() if _legal(replace(space, fixed=fixed))]


TRIED = 16
"""Batches, or numbers of nodes, that a hint looks at."""


def _nearest_nodes(q: Question) -> int | None:
    """The least number of nodes on which the held fields are legal, as far as one is found soon."""
    held, each = held_ranks(q), q.cluster.devices_per_node or 1
    step = held // gcd(held, each)
    for nodes in range(step, MOST // each + 1, step)[:TRIED]:
        on = q.on(nodes)
        if _legal(space_asked(on, subject_asked(on))):
            return nodes
    return None


def _nearest_batch(s: Subject, q: Question, space: Space) -> int | None:
    """The least batch from the one asked for on, but no more than fixed fields say, with which something is legal."""
    batch, fixed = s.workload.global_batch, q.varied

    def of(size: int) -> Space:
        work = replace(s.workload, global_batch=size)
        return replace(space, subject=make_subject(s.model, work, s.cluster, s.target.name, imbalance=s.imbalance))

    # As many sequences as there are ranks can be shared by any number of data ranks.
    degrees = of(space.world).shapes[:, SHAPE.index("data")]
    parts = [held_values(fixed, key) for key in ("microbatch", "microbatches") if fixed.get(key)]
    units = {int(data) * prod(one) for data in degrees for one in product(*parts)}
    first = {unit: unit if len(parts) > 1 else ceil(batch / unit) * unit for unit in units}
    sizes = sorted({*first.values(), *(size + unit for unit, size in first.items() if len(parts) < 2)})
    return next((size for size in sizes[:TRIED] if size <= MOST_DATA and _legal(of(size))), None)


def _legal(space: Space) -> bool:
    """Whether a space holds any plan."""
    return bool(frames_of(space).below.any())


def smallest_plan(s: Subject, q: Question, space: Space) -> tuple[Plan, float]:
    """The plan that comes nearest to fitting, of the usual ones, and bytes of its fullest rank."""
    found = Bounded(space=space.thin(), limit=q.limit).leanest()
    if not found.plans:
        # What is held can rule out all of the usual ones.
        found = Bounded(space=space, limit=q.limit).leanest()
    (plan,) = found.plans.values()
    return setup_of(s, plan, 0, q.base).plan, found.limit


LARGEST_FACTOR = 32
"""Times the nodes asked for, beyond which nobody looks for a number on which something fits."""
EACH_TRIED = 8
"""Numbers of nodes that are tried one by one; more are halved first."""


def _enough(q: Question) -> int | None:
    """The fewest nodes, of those tried, on which one of the usual plans fits.

    Doublings until one fits; then halves of what lies below it, as long as there are many numbers, and at last one by
    one, since some numbers divide worse than smaller ones.
    """
    low, high = q.cluster.nodes, 2 * q.cluster.nodes
    while not _fits(q.on(high)):
        low, high = high, 2 * high
        if high > LARGEST_FACTOR * q.cluster.nodes:
            return None
    while high - low > EACH_TRIED + 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(q.on(middle)) else (middle, high)
    return next((nodes for nodes in range(low + 1, high) if _fits(q.on(nodes))), high)


def _fits(q: Question) -> bool:
    """Whether one of the usual plans is legal and fits."""
    space = space_asked(q, subject_asked(q)).thin()
    return bool(len(space.shapes)) and Bounded(space=space, limit=q.limit).leanest(q.limit).limit <= q.limit
