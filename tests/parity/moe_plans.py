"""Rows of the table of plans for models with experts: every pair of axes with expert, ZeRO, schedules, families."""

from __future__ import annotations

from dataclasses import replace

from plans import LLAMA, Row, row

from shardsmith.plan.file import make_setup
from shardsmith.plan.shrink import shrink
from shardsmith.specs.model import Experts, Latent, ModelSpec

MIXTRAL = LLAMA.with_(name="mixtral", layers=2, experts=Experts(count=4, top_k=2, ffn=12, aux_loss=0.3, z_loss=0.2))
"""All layers have experts; the coefficients are large enough for their gradients to matter."""

QWEN = LLAMA.with_(
    name="qwen-moe",
    layers=2,
    qk_norm=True,
    tied=True,
    experts=Experts(
        count=6, top_k=3, ffn=8, first_dense=1, normalise=False, shared_ffn=16, shared_gate=True, aux_loss=0.3
    ),
)

DEEPSEEK = LLAMA.with_(
    name="deepseek",
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=6,
    latent=Latent(kv_rank=5, nope=2, rope=4, value=3, q_rank=7),
    experts=Experts(
        count=8,
        top_k=3,
        ffn=8,
        first_dense=1,
        score="sigmoid",
        scale=2.5,
        groups=4,
        top_groups=2,
        shared_ffn=8,
        balance="bias",
        aux_loss=0.2,
        bias_rate=0.05,
    ),
)

LITE = DEEPSEEK.with_(
    name="deepseek-lite",
    latent=Latent(kv_rank=5, nope=2, rope=4, value=3),
    experts=Experts(count=4, top_k=2, ffn=8, first_dense=1, normalise=False, groups=2, top_groups=1, aux_loss=0.3),
)


def sized(model: ModelSpec, **experts: object) -> ModelSpec:
    """`model` with other sizes of its experts."""
    assert model.experts is not None, "a model with experts"
    return model.with_(experts=replace(model.experts, **experts))  # type: ignore[arg-type]


TWO = sized(MIXTRAL, count=2, top_k=1)
"""As many experts as expert ranks: each rank holds one, of which ZeRO cuts the rows."""

WIDE = sized(QWEN.with_(name="wide", hidden=16, head_dim=4), count=4, ffn=16, z_loss=0.1)
"""Rows whose bytes are multiples of 16 in float32, as the grouped product asks."""


ONE_RANK = tuple(row(f"{m.name}, one rank", "microbatch=2,microbatches=2", m) for m in (MIXTRAL, QWEN, DEEPSEEK, LITE))

AXES = (
    *(row(f"a16 expert {n} of data {n}", f"data={n},expert={n}", MIXTRAL) for n in (2, 4)),
    row("expert 3 of data 3", "data=3,expert=3", QWEN),
    row("data 2, experts everywhere", "data=2", MIXTRAL),
    row("tensor 2, experts everywhere", "tensor=2", MIXTRAL),
    row("expert 2 of tensor 2", "tensor=2,expert=2", MIXTRAL),
    row("expert 2 of tensor 2 sp", "tensor=2,expert=2,sequence_parallel=true", MIXTRAL),
    row("expert_tensor 2 of data 2", "data=2,expert_tensor=2", MIXTRAL),
    row("expert_tensor 2 of tensor 2", "tensor=2,expert_tensor=2", QWEN),
    row("expert_tensor 2 of tensor 2 sp", "tensor=2,expert_tensor=2,sequence_parallel=true", QWEN),
    row("expert 2, expert_tensor 2, data 2, tensor 2", "data=2,tensor=2,expert=2,expert_tensor=2", MIXTRAL),
    row("expert 4 of data 2 x tensor 2 sp", "data=2,tensor=2,expert=4,sequence_parallel=true", DEEPSEEK),
    row("pipeline 2, expert 2 of data 2", "pipeline=2,data=2,expert=2", MIXTRAL),
    row("pipeline 2, expert 2 of tensor 2", "pipeline=2,tensor=2,expert=2", QWEN),
    row("pipeline 3, expert 2, sp", "pipeline=3,tensor=2,expert=2,sequence_parallel=true", QWEN.with_(layers=3)),
)

FAMILIES = tuple(
    row(f"{m.name}, {line}", line, m)
    for m in (QWEN, DEEPSEEK, LITE)
    for line in (
        "data=2,expert=2,microbatch=2,microbatches=2",
        "tensor=2,expert=2,microbatch=2,microbatches=2",
        "data=2,tensor=2,expert=2,sequence_parallel=true,microbatches=2",
    )
)

ZERO = (
    *(row(f"zero {z}, expert 2 of data 4", f"data=4,expert=2,zero={z}", MIXTRAL) for z in (1, 2, 3)),
    *(row(f"zero {z}, 4 experts on 3 shards", f"data=3,zero={z}", MIXTRAL) for z in (1, 2, 3)),
    *(row(f"zero {z}, an expert a rank, rows cut", f"data=4,expert=2,zero={z}", TWO) for z in (1, 2, 3)),
    row("zero 3 per step, rows cut", "data=4,expert=2,zero=3,zero_gather=per_step", TWO),
    row("zero 2, replicate 2", "data=4,replicate=2,expert=2,zero=2", MIXTRAL),
    row("zero 3, replicate 2, experts everywhere", "data=4,replicate=2,zero=3", DEEPSEEK),
    row("zero 1, tensor 2 alone shards experts", "tensor=2,zero=1", QWEN),
    row("zero 3, expert_tensor 2 sp", "data=2,tensor=2,expert_tensor=2,zero=3,sequence_parallel=true", DEEPSEEK),
    row("zero 3, small buckets", "data=4,expert=2,zero=3,bucket_mb=0.001", QWEN),
)

SAVERS = (
    row("full recompute, expert 2, sp", "data=2,tensor=2,expert=2,recompute=full,sequence_parallel=true", QWEN),
    row("full recompute, expert 2, zero 3", "data=2,expert=2,recompute=full,zero=3", DEEPSEEK),
    row("selective recompute, expert 2", "data=2,expert=2,recompute=selective", DEEPSEEK),
    row("loss by chunks, expert 2 of tensor 2", "tensor=2,expert=2,loss_chunk=5", LITE),
    row("packed, expert 2", "data=2,expert=2,microbatch=2", MIXTRAL, packed=True),
    row("weight gradients overlapped", "tensor=2,expert=2,overlap=weight_gradient,sequence_parallel=true", DEEPSEEK),
    row("expert ranks far apart", "data=2,tensor=2,expert=2,order=data-tensor-pipeline-context", MIXTRAL),
)

CAPACITY = tuple(
    row(f"capacity {factor}, {line}", f"{line},capacity_factor={factor}", model)
    for factor, line, model in (
        (0.7, "microbatch=2,microbatches=2", MIXTRAL),
        (0.7, "data=2,expert=2,microbatch=2,microbatches=2", MIXTRAL),
        (0.7, "tensor=2,expert=2,microbatch=2,microbatches=2", MIXTRAL),
        (1.0, "data=2,tensor=2,expert=2,expert_tensor=2,sequence_parallel=true", QWEN),
        (1.0, "data=2,expert=2,recompute=full,zero=2", DEEPSEEK),
    )
)

FLOAT32 = (
    row("float32, expert 2 of data 2", "data=2,expert=2", WIDE, dtype="float32"),
    row("float32, expert 2 of tensor 2 sp", "tensor=2,expert=2,sequence_parallel=true", WIDE, dtype="float32"),
    row("float32, rows cut, zero 3", "data=4,expert=2,zero=3", sized(WIDE, count=2, top_k=1), dtype="float32"),
    row(
        "float32, pipeline 2, expert 2 and tensor 2",
        "pipeline=2,data=2,tensor=2,expert=2,expert_tensor=2,schedule=zb_h1",
        WIDE,
        dtype="float32",
    ),
    row("float32, loop where rows are not aligned", "data=2,expert=2", sized(WIDE, ffn=10), dtype="float32"),
)

TRIPLES = (
    row("pipeline 2, data 2, tensor 2, expert 2", "pipeline=2,data=2,tensor=2,expert=2,zero=1", QWEN),
    row(
        "pipeline 2, tensor 2 sp, expert 4 of data 2 x tensor 2",
        "pipeline=2,data=2,tensor=2,expert=4,sequence_parallel=true,zero=2,schedule=interleaved,microbatches=4",
        MIXTRAL.with_(layers=4, tied=True),
    ),
)

CONTEXT = (
    row("context 2, expert 2", "context=2,expert=2", MIXTRAL),
    row("context 2 by ulysses, expert 2, packed", "context=2,ulysses=2,expert=2,microbatch=2", QWEN, packed=True),
    row("context 2, latent attention, zero 3", "context=2,expert=2,zero=3", DEEPSEEK),
    row("context 2, capacity", "context=2,expert=2,capacity_factor=0.7,microbatch=2", MIXTRAL),
    row(
        "context 2, tensor 2 sp, capacity",
        "context=2,tensor=2,expert=4,capacity_factor=1.0,sequence_parallel=true",
        LITE,
    ),
    row("context 2, pipeline 2, expert 2", "context=2,pipeline=2,expert=2,schedule=zb_h1,recompute=full", QWEN),
)

EIGHT = (
    row("a18 data 2, context 2, tensor 2, expert 4", "data=2,context=2,tensor=2,expert=4,zero=1", MIXTRAL),
    row(
        "data 2, context 2, tensor 2 sp, expert 2, expert_tensor 2",
        "data=2,context=2,tensor=2,expert=2,expert_tensor=2,zero=3,sequence_parallel=true",
        DEEPSEEK,
    ),
)

LARGE = "pipeline=16,data=32,expert=64,tensor=4,zero=1,schedule=dualpipe_v,microbatches=32"
SHRUNK = (
    Row(
        name="deepseek-v3 on 2048 ranks, shrunk",
        setup=shrink(make_setup(plan=LARGE, model="deepseek-v3", seq_len=4096, global_batch=1024)),
    ),
)

MOE_TABLE = (
    *ONE_RANK,
    *AXES,
    *FAMILIES,
    *ZERO,
    *SAVERS,
    *CAPACITY,
    *FLOAT32,
    *TRIPLES,
    *CONTEXT,
    *EIGHT,
    *SHRUNK,
)
