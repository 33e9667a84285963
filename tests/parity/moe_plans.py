"""Rows of the table of plans for models with experts: every pair of axes with expert, ZeRO, schedules, families."""

from __future__ import annotations

from dataclasses import replace

from plans import LLAMA, Row, row

from shardsmith.specs.model import Experts, Latent, ModelSpec

MIXTRAL = LLAMA.with_(name="mixtral", layers=2, experts=Experts(count=4, top_k=2, ffn=12, aux_loss=0.3, z_loss=0.2))
"""All layers have experts; the coefficients are large enough for their gradients to matter."""

QWEN = LLAMA.with_(
    name="qwen-moe",
    layers=3,
    qk_norm=True,
    tied=True,
    experts=Experts(
        count=6, top_k=3, ffn=8, first_dense=1, normalise=False, shared_ffn=16, shared_gate=True, aux_loss=0.3
    ),
)

DEEPSEEK = LLAMA.with_(
    name="deepseek",
    layers=3,
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
    row("pipeline 3, expert 2, sp", "pipeline=3,tensor=2,expert=2,sequence_parallel=true", QWEN),
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

MOE_TABLE = (*ONE_RANK, *AXES, *FAMILIES)
