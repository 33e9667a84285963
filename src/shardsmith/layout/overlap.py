"""Overlap: what hides the collectives of the tensor axis, and what each policy forbids.

Every policy is exact: it changes when something is sent, never what is added up. `half_microbatches` computes one
half of a microbatch while what the other half made is sent; `weight_gradient` sends the input gradient of a
column-parallel matrix while its weight gradients are computed; `chunks` cuts a product along the sequence and sends
each part while the next is computed. A residual stream that runs ahead of its sums is another model, not a policy.
"""

from __future__ import annotations

from itertools import pairwise

from shardsmith.errors import Code, Fault
from shardsmith.plan.batch import batch_faults, batching
from shardsmith.plan.setup import Setup

ALONE = Code(
    code="T301",
    title="overlap without tensor ranks",
    because="overlap hides the collectives of the tensor axis, and an axis of one rank has none",
)
HALVES = Code(
    code="T302",
    title="a microbatch that cannot be halved",
    because="half_microbatches computes one half of a microbatch while what the other half made is sent",
)
HALVES_AND_CHUNKS = Code(
    code="T303",
    title="half_microbatches with chunks",
    because="both hide the same sums over tensor ranks: one behind the other half, one behind the rest of the product",
)
NOTHING_BEHIND = Code(
    code="T304",
    title="weight_gradient where weight gradients come later",
    because="a schedule that splits the backward computes weight gradients in actions of their own, long after the "
    "input gradient was sent",
)
COMPILED = Code(
    code="T305",
    title="overlap with compile",
    because="a compiled block issues its collectives where its graph has them; what overlaps is the compiler's choice",
)

MIXED = Code(
    code="T306",
    title="halves or chunks of a layer that is more than attention and an MLP",
    because="half_microbatches and chunks know how the sums of plain attention and a dense MLP follow each other; "
    "experts and latent attention have exchanges of their own between them",
)

TWICE = Code(
    code="T307",
    title="an overlap policy named twice",
    because="a policy is in use or not: naming it again changes nothing, and another one may have been meant",
)

CHUNKS = 4
"""Parts into which `chunks` cuts a product, where it has so many rows."""

_SPECIAL = {"experts": "experts", "latent": "latent attention"}

SPLIT_SCHEDULES = ("zb_h1", "zb_v", "dualpipe_v")
"""Schedules in which weight gradients are an action of their own."""


def parts(rows: int) -> list[slice]:
    """The chunks of `rows` rows: at most CHUNKS, as even as can be."""
    count = min(CHUNKS, rows)
    edges = [rows * at // count for at in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def pieces(setup: Setup, *, for_weights: bool) -> int:
    """Calls into which the plan's overlap turns one of a layer; those `for_weights` are not cut into chunks.

    Chunks are rows of the sequence that a rank sends, `CHUNKS` of them where it has as many.
    """
    plan = setup.plan
    if "half_microbatches" in plan.overlap:
        return 2
    if "chunks" not in plan.overlap or for_weights:
        return 1
    rows = setup.workload.seq_len // plan.context
    return min(CHUNKS, rows // plan.tensor if plan.sequence_parallel else rows)


def overlap_faults(setup: Setup) -> list[Fault]:
    """What the plan's overlap policies forbid."""
    plan, faults = setup.plan, []
    if not plan.overlap:
        return []
    said = setup.said("plan.overlap")
    named = "+".join(plan.overlap)
    if len(set(plan.overlap)) < len(plan.overlap):
        once = "+".join(dict.fromkeys(plan.overlap))
        twice = next(policy for policy in plan.overlap if plan.overlap.count(policy) > 1)
        faults.append(TWICE.fault(f"overlap names {twice} more than once", *said, hint=f"overlap = {once}"))
    if plan.tensor == 1:
        message = f"overlap = {named}, but tensor = 1"
        hint = "tensor = 2 or more, or leave overlap out"
        faults.append(ALONE.fault(message, *said, *setup.said("plan.tensor"), hint=hint))
    whole = not batch_faults(plan, setup.workload, setup.origin)
    if "half_microbatches" in plan.overlap and whole and batching(plan, setup.workload).microbatch % 2:
        size = batching(plan, setup.workload).microbatch
        message = f"half_microbatches, but a microbatch has {size} sequence{'s' if size > 1 else ''}"
        values = setup.said("plan.microbatch", "plan.microbatches", "workload.global_batch")
        faults.append(HALVES.fault(message, *said, *values, hint=f"microbatch = {size + 1}, or overlap = chunks"))
    if {"half_microbatches", "chunks"} <= set(plan.overlap):
        message = "half_microbatches and chunks at once"
        faults.append(HALVES_AND_CHUNKS.fault(message, *said, hint="one of the two"))
    if "weight_gradient" in plan.overlap and plan.schedule in SPLIT_SCHEDULES:
        message = f"weight_gradient, but {plan.schedule} puts weight gradients off"
        plain = setup.model.experts is None and setup.model.latent is None
        hint = ("overlap = chunks" if plain else "leave overlap out") + ", or schedule = one_f_one_b"
        faults.append(NOTHING_BEHIND.fault(message, *said, *setup.said("plan.schedule"), hint=hint))
    special = [key for key in ("experts", "latent") if getattr(setup.model, key) is not None]
    if special and {"half_microbatches", "chunks"} & set(plan.overlap):
        message = f"overlap = {named}, but {setup.model.name} has {' and '.join(_SPECIAL[key] for key in special)}"
        left = "leave overlap out" if plan.schedule in SPLIT_SCHEDULES else "overlap = weight_gradient, or leave it out"
        faults.append(MIXED.fault(message, *said, hint=left))
    if plan.compile:
        message = f"overlap = {named} in compiled blocks"
        faults.append(COMPILED.fault(message, *said, *setup.said("plan.compile"), hint="compile = false"))
    return faults
