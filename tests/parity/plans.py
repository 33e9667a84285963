"""ONE table of plans: each row is a model, a plan and a workload that must compute what one process computes.

Every row states microbatch and microbatches, from which the global batch follows. Models are as small as
their plan allows; `llama(heads=2 * t, kv_heads=t)` splits over t tensor ranks and groups its key/value heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardsmith.plan.file import parse_plan_line
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Dtype, Workload
from shardsmith.specs.library import cluster_named
from shardsmith.specs.model import ModelSpec, RopeScaling

SEQ_LEN = 12
"""Divides by 2, 3 and 4, as sequence parallelism asks."""

LLAMA = ModelSpec(
    name="llama", layers=4, hidden=20, heads=4, kv_heads=2, head_dim=4, ffn=24, vocab=29, context=32, init_std=0.2
)
"""Rotary positions, RMSNorm, gated MLP, untied; 29 tokens divide by no tensor degree, and 20 is not 4 x 4."""

GPT = ModelSpec(
    name="gpt",
    layers=4,
    hidden=24,
    heads=12,
    kv_heads=12,
    head_dim=2,
    ffn=24,
    vocab=29,
    context=16,
    norm="layernorm",
    activation="gelu_tanh",
    positions="learned",
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    tied=True,
    init_std=0.2,
)
"""Learned positions, LayerNorm, biases everywhere, tied; 12 heads split over 2, 3 and 4 ranks."""

TIED = LLAMA.with_(name="tied-llama", tied=True)
SCALED = LLAMA.with_(
    name="scaled-llama", rope_scaling=RopeScaling(factor=4.0, original_context=8), attention_bias=True, heads=6
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; `steps` optimiser steps are compared, with several documents in a sequence if `packed`."""

    name: str
    setup: Setup
    steps: int = 2
    packed: bool = False


def row(
    name: str,
    line: str,
    model: ModelSpec = LLAMA,
    *,
    seq_len: int = SEQ_LEN,
    dtype: Dtype = "float64",
    steps: int = 2,
    packed: bool = False,
    **changes: object,
) -> Row:
    """A row whose plan is `line`, by default with 3 microbatches of one sequence; `changes` go into the model."""
    plan = parse_plan_line(line)
    plan = replace(plan, microbatch=plan.microbatch or 1, microbatches=plan.microbatches or 3)
    assert plan.microbatch is not None, "stated above"
    assert plan.microbatches is not None, "stated above"
    workload = Workload(seq_len=seq_len, global_batch=plan.data * plan.microbatch * plan.microbatches, dtype=dtype)
    setup = Setup(model=model.with_(**changes), workload=workload, cluster=cluster_named("local"), plan=plan)
    return Row(name=name, setup=setup, steps=steps, packed=packed)


def llama(tensor: int, **changes: object) -> ModelSpec:
    """A LLAMA whose grouped heads split over `tensor` ranks."""
    return LLAMA.with_(heads=2 * tensor, kv_heads=tensor, **changes)


AXES = (
    row("one rank", ""),
    row("one rank, tied", "", GPT),
    *(row(f"data {n}", f"data={n}") for n in (2, 3, 4)),
    *(row(f"tensor {n}", f"tensor={n}", llama(n)) for n in (2, 3, 4)),
    *(row(f"tensor {n} sp", f"tensor={n},sequence_parallel=true", llama(n)) for n in (2, 3, 4)),
    *(row(f"pipeline {n}", f"pipeline={n},microbatches=4") for n in (2, 3, 4)),
    *(row(f"data {n}, tied", f"data={n}", GPT) for n in (2, 3)),
    *(row(f"tensor {n}, tied", f"tensor={n}", GPT) for n in (2, 3, 4)),
    *(row(f"tensor {n} sp, tied", f"tensor={n},sequence_parallel=true", GPT) for n in (2, 3, 4)),
    *(row(f"pipeline {n}, tied", f"pipeline={n},microbatches=4", GPT) for n in (2, 3, 4)),
    row("pipeline 2, tied llama", "pipeline=2", TIED),
    row("tensor 2, rope scaling and biases", "tensor=2", SCALED),
    row("microbatches of 2, normalised heads that nothing rotates", "microbatch=2,microbatches=1", GPT, qk_norm=True),
)

PAIRS = (
    row("data 2, tensor 2", "data=2,tensor=2"),
    row("data 2, tensor 2 sp", "data=2,tensor=2,sequence_parallel=true"),
    row("data 2, pipeline 2", "data=2,pipeline=2"),
    row("tensor 2, pipeline 2", "tensor=2,pipeline=2"),
    row("tensor 2 sp, pipeline 2", "tensor=2,pipeline=2,sequence_parallel=true"),
    row("data 2, tensor 2 sp, tied", "data=2,tensor=2,sequence_parallel=true", GPT),
    row("a10 data 2, pipeline 2, tied", "data=2,pipeline=2", GPT),
    row("tensor 2, pipeline 2, tied", "tensor=2,pipeline=2", GPT),
    row("tensor 2 sp, pipeline 2, tied", "tensor=2,pipeline=2,sequence_parallel=true", TIED),
    row("data 3, pipeline 2, tied", "data=3,pipeline=2", GPT),
    row("tensor 3, pipeline 2", "tensor=3,pipeline=2", llama(3)),
    row("data 2, tensor 3 sp", "data=2,tensor=3,sequence_parallel=true", llama(3)),
)

TRIPLES = (
    row("2 x 2 x 2", "data=2,tensor=2,pipeline=2"),
    row("2 x 2 x 2 sp", "data=2,tensor=2,pipeline=2,sequence_parallel=true"),
    row("2 x 2 x 2, tied", "data=2,tensor=2,pipeline=2", GPT),
    row("2 x 2 x 2 sp, tied", "data=2,tensor=2,pipeline=2,sequence_parallel=true,bucket_mb=0.001", GPT),
    row(
        "2 x 2 x 2 interleaved sp, tied",
        "data=2,tensor=2,pipeline=2,sequence_parallel=true,schedule=interleaved,stages_per_rank=2",
        TIED,
    ),
)

SCHEDULES = (
    *(row(f"gpipe {p}, m = {m}", f"pipeline={p},schedule=gpipe,microbatches={m}") for p, m in ((2, 4), (3, 4), (4, 4))),
    *(row(f"1f1b {p}, m = {m}", f"pipeline={p},microbatches={m}") for p, m in ((2, 5), (3, 6), (4, 5))),
    *(
        row(
            f"interleaved {p} x {v}, m = {m}",
            f"pipeline={p},schedule=interleaved,stages_per_rank={v},microbatches={m}",
            layers=p * v,
        )
        for p, v, m in ((2, 2, 4), (2, 2, 3), (2, 3, 4), (2, 3, 5), (3, 2, 3), (3, 2, 5), (4, 2, 4), (3, 3, 4))
    ),
    row("interleaved 2 x 2, tied", "pipeline=2,schedule=interleaved,stages_per_rank=2,microbatches=4", GPT),
    row("interleaved 2 x 3, tied", "pipeline=2,schedule=interleaved,stages_per_rank=3,microbatches=3", GPT, layers=6),
    row("gpipe 3, tied", "pipeline=3,schedule=gpipe,microbatches=3", GPT),
    row("b17 gpipe 2, m = 3", "pipeline=2,schedule=gpipe,microbatches=3"),
    row("b07 four microbatches, three steps", "pipeline=2,microbatches=4", steps=3),
    row("both ends on one rank, tied", "schedule=interleaved,stages_per_rank=2", GPT),
    row("both ends on one data rank of 2, tied", "data=2,schedule=interleaved,stages_per_rank=2", GPT),
)

FEW_MICROBATCHES = (
    row("b01 1f1b 4, m = 2", "pipeline=4,microbatches=2"),
    row("b01 1f1b 4, m = 1", "pipeline=4,microbatches=1"),
    row("b01 gpipe 4, m = 2", "pipeline=4,schedule=gpipe,microbatches=2"),
    row("b01 interleaved 4 x 2, m = 2", "pipeline=4,schedule=interleaved,microbatches=2", layers=8),
    row("b01 1f1b 3, m = 2, tied", "pipeline=3,microbatches=2", GPT),
)

SPLIT_SCHEDULES = tuple(
    row(
        f"{name} {pipeline} with {microbatches}{', tied' if tied else ''}",
        f"pipeline={pipeline},schedule={name},microbatches={microbatches}",
        TIED if tied else LLAMA,
        layers=8,
    )
    for name, least in (("zb_h1", 1), ("zb_v", 1), ("looped_bfs", 1), ("dualpipe_v", 4))
    for pipeline, microbatches, tied in ((2, 4, True), (2, 5, False), (3, 7, False), (4, 8, True), (4, 2, False))
    if microbatches >= (2 * pipeline if least > 1 else 1)
)

STAGES = (
    row("5 layers on 2 stages", "pipeline=2", layers=5),
    row("5 layers on 3 stages", "pipeline=3", layers=5),
    row("5 layers on 3 stages, tied", "pipeline=3", GPT, layers=5),
    row("5 layers on 2 x 2 stages", "pipeline=2,schedule=interleaved,microbatches=4", layers=5),
    row("listed stages", "pipeline=2,layers=3+1"),
    row("no layer beside the embedding", "pipeline=2,layers=0+4"),
    row("no layer at either end", "pipeline=4,layers=0+2+2+0"),
    row("no layer at either end, tied", "pipeline=3,tensor=2,layers=0+4+0,sequence_parallel=true", GPT),
    row("weighed stages", "pipeline=2,layers=weighed", vocab=101),
)

BATCHES = (
    row("microbatches of 2", "pipeline=2,microbatch=2"),
    row("microbatches of 2, 2 x 2 x 2 sp", "data=2,tensor=2,pipeline=2,sequence_parallel=true,microbatch=2", TIED),
    row("microbatches of 3 on data 2", "data=2,microbatch=3,microbatches=1"),
    row("sequences of 1 token", "tensor=2,pipeline=2", seq_len=1),
)

VOCABULARIES = (
    row("a24 5 tokens on 2 ranks", "tensor=2", vocab=5),
    row("a24 5 tokens on 2 ranks sp, tied", "tensor=2,sequence_parallel=true", GPT, vocab=5),
    row("a rank without a token", "tensor=4", llama(4, vocab=5)),
    row("a rank without a token, pipeline 2, tied", "tensor=4,pipeline=2", GPT, vocab=5),
)

DETAILS = (
    row("several buckets", "data=2,bucket_mb=0.001"),
    row("a bucket for each tensor, tied", "data=2,pipeline=2,bucket_mb=0.00001", GPT),
    row("pipeline ranks are neighbours", "data=2,tensor=2,pipeline=2,order=pipeline-data-context-tensor"),
    row("data ranks are neighbours, tied", "data=2,tensor=2,pipeline=2,order=data-tensor-pipeline-context", GPT),
    row("tensor ranks are far apart", "tensor=2,pipeline=3,order=context-pipeline-data-tensor"),
)

FLOAT32 = (
    row("float32", "data=2,tensor=2,pipeline=2", dtype="float32"),
    row("float32 sp, tied", "tensor=4,pipeline=2,sequence_parallel=true", llama(4, tied=True), dtype="float32"),
    row("float32 interleaved", "data=2,pipeline=2,schedule=interleaved,microbatches=4", dtype="float32"),
)

PACKED = (
    row("packed, data 2", "data=2,microbatch=2", packed=True),
    row("packed, tensor 2 sp, tied", "tensor=2,sequence_parallel=true", GPT, packed=True),
    row("packed, pipeline 2", "pipeline=2,microbatch=2,microbatches=2", packed=True),
    row(
        "packed, 2 x 2 x 2 interleaved sp",
        "data=2,tensor=2,pipeline=2,sequence_parallel=true,schedule=interleaved,stages_per_rank=2",
        packed=True,
    ),
)

TABLE = (
    *AXES,
    *PAIRS,
    *TRIPLES,
    *SCHEDULES,
    *SPLIT_SCHEDULES,
    *FEW_MICROBATCHES,
    *STAGES,
    *BATCHES,
    *VOCABULARIES,
    *DETAILS,
    *FLOAT32,
    *PACKED,
)
