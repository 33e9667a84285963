"""Make a plan and its model small enough to be proven on one machine, without changing what is proven."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from shardsmith.plan.batch import batching
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import stages_per_rank
from shardsmith.specs.model import Experts, Latent, ModelSpec


def shrink(setup: Setup) -> Setup:
    """`setup` with every degree above 1 at 2 (3 where it is an odd multiple of 3), on a model of the same kind.

    Ring and ulysses are shrunk each, so context is 4 where both are above 1. ZeRO level, schedule, sequence
    parallelism and stages per rank stay as they are; microbatches stay fewer than stages where they were, and
    become at most two rounds of the pipeline where they were not. The model keeps its family, biases, tying and
    grouping of heads; only its sizes shrink. Where key/value heads are copied they stay fewer than tensor ranks,
    and a sliding window stays shorter than the sequence. Experts keep their scores, groups, balancing, shared and
    first dense layers; data grows where it is needed to hold the shrunk expert mesh.
    """
    plan = setup.plan
    degrees = {axis: _smaller(getattr(plan, axis)) for axis in ("tensor", "pipeline", "replicate")}
    degrees["data"] = degrees["replicate"] * _smaller(plan.shard)
    ring, degrees["ulysses"] = _smaller(plan.context // plan.ulysses), _smaller(plan.ulysses)
    degrees["context"] = ring * degrees["ulysses"]
    degrees |= {axis: _smaller(getattr(plan, axis)) for axis in ("expert", "expert_tensor")}
    inner = degrees["expert"] * degrees["expert_tensor"]
    ranks = degrees["data"] // degrees["replicate"] * degrees["context"] * degrees["tensor"]
    degrees["data"] *= lcm(ranks, inner) // ranks
    pipeline, before = degrees["pipeline"], batching(plan, setup.workload).microbatches
    microbatches = max(1, pipeline - 1) if before < plan.pipeline else min(before, 2 * pipeline)
    if before >= plan.pipeline and before % plan.pipeline == 0:
        microbatches -= microbatches % pipeline
    stages = pipeline * stages_per_rank(plan)
    small = plan.with_(**degrees, microbatch=1, microbatches=microbatches, layers=None)
    uneven = setup.model.layers % (plan.pipeline * stages_per_rank(plan)) != 0
    work = replace(
        setup.workload,
        seq_len=8 * degrees["tensor"] * degrees["context"],
        global_batch=degrees["data"] * microbatches,
        dtype="float64",
    )
    copied = plan.replicate_kv and setup.model.kv_heads < plan.tensor
    dense = setup.model.experts is not None and setup.model.experts.first_dense > 0
    layers = max(stages + int(uneven), 2 if dense else 1)
    model = _small_model(setup.model, degrees["tensor"], layers, degrees["ulysses"], copied=copied)
    model = model.with_(context=8 * work.seq_len)
    if model.experts is not None:
        experts = _small_experts(model.experts, degrees["expert"], degrees["expert_tensor"], degrees["tensor"])
        model = model.with_(experts=experts)
    return replace(setup, plan=small, workload=work, model=model)


def _smaller(degree: int) -> int:
    if degree == 1:
        return 1
    return 3 if degree % 3 == 0 and degree % 2 else 2


def _small_model(model: ModelSpec, tensor: int, layers: int, ulysses: int, *, copied: bool) -> ModelSpec:
    group = tensor if copied else min(model.heads // model.kv_heads, 4)
    kv_heads = 1 if copied else tensor * (max(2, ulysses) if model.kv_heads > tensor else 1)
    if kv_heads * group // tensor % ulysses:
        group *= ulysses
    heads, head_dim = kv_heads * group, 8
    latent = model.latent
    if latent is not None:
        latent = Latent(kv_rank=6, nope=4, rope=4, value=6, q_rank=None if latent.q_rank is None else 10)
    return model.with_(
        name=f"{model.name}-shrunk",
        layers=layers,
        hidden=heads * head_dim if model.hidden == model.heads * model.head_dim else heads * head_dim + 8,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=24 * tensor,
        # Not a multiple of the degree where the model's own vocabulary is none.
        vocab=96 * tensor + int(model.vocab % tensor != 0),
        window=None if model.window is None else 5,
        latent=latent,
        mtp_layers=0,
    )


def _small_experts(experts: Experts, expert: int, expert_tensor: int, tensor: int) -> Experts:
    """Experts of the same kind: at least two a group and a rank, where there were more than one."""
    groups = min(experts.groups, 2)
    limited = experts.top_groups < experts.groups
    top_groups = 1 if limited else groups
    count = lcm(expert, groups) * (2 if experts.count > lcm(expert, groups) else 1)
    return replace(
        experts,
        count=count,
        top_k=min(experts.top_k, 2, count // groups * top_groups),
        ffn=8 * expert_tensor,
        first_dense=min(experts.first_dense, 1),
        groups=groups,
        top_groups=top_groups,
        shared_ffn=8 * tensor if experts.shared_ffn else 0,
    )
