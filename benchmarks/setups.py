"""The common model, workload and optimiser in Shardsmith's own words."""

from __future__ import annotations

from workload import BETAS, EPS, GLOBAL_BATCH, LR, MICROBATCH, SHAPE, WEIGHT_DECAY

from shardsmith.plan.line import parse_plan_line
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Optimisation, Workload
from shardsmith.specs.library import cluster_named
from shardsmith.specs.model import ModelSpec

MODEL = ModelSpec(
    name="bench-llama",
    layers=SHAPE.layers,
    hidden=SHAPE.hidden,
    heads=SHAPE.heads,
    kv_heads=SHAPE.kv_heads,
    head_dim=SHAPE.head_dim,
    ffn=SHAPE.ffn,
    vocab=SHAPE.vocab,
    context=SHAPE.seq_len,
    norm_eps=SHAPE.norm_eps,
    rope_theta=SHAPE.rope_theta,
)
OPTIMISATION = Optimisation(optimizer="adamw", lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, clip=0.0)


def ours(plan: str) -> Setup:
    """The Setup of one plan in its one-line form."""
    return Setup(
        model=MODEL,
        workload=Workload(seq_len=SHAPE.seq_len, global_batch=GLOBAL_BATCH, dtype="float32"),
        cluster=cluster_named("local"),
        plan=parse_plan_line(plan).with_(microbatch=MICROBATCH),
        source="benchmarks",
    )
