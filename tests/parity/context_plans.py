"""Rows of the table of plans that cut sequences over the context axis: rings, Ulysses, both, with everything else."""

from __future__ import annotations

from plans import GPT, LLAMA, TIED, Row, llama, row

MQA = LLAMA.with_(name="mqa", heads=4, kv_heads=1)
WINDOWED = LLAMA.with_(name="windowed", window=5, qk_norm=True)
DROPPING = LLAMA.with_(name="dropping", dropout=0.3, attention_dropout=0.2)
LONG = GPT.with_(name="long-gpt", context=24)
"""Learned positions, LayerNorm, biases, tied; 12 heads are dealt to 2, 3 and 4 ranks."""

NEAR = "tensor-data-context-pipeline"
SEQ_LEN = 24
"""Cut into 2 x 2, 2 x 3 and 2 x 4 chunks, and further over two tensor ranks."""


def cut(name: str, line: str, model: object = LLAMA, *, seq_len: int = SEQ_LEN, **more: object) -> Row:
    """A row of sequences that any context degree up to 4 cuts; two layers are enough without a pipeline."""
    layers = 4 if "pipeline" in line or "stages" in line else 2
    return row(name, line, model, seq_len=seq_len, layers=layers, **more)  # type: ignore[arg-type]


TWO = (
    cut("context 2", "context=2"),
    cut("context 2, tied", "context=2", LONG),
    cut("context 2, packed", "context=2,microbatch=2", packed=True),
    cut("context 2, packed, tied", "context=2", LONG, packed=True),
    cut("context 2, one key/value head", "context=2", MQA),
    cut("context 2, window", "context=2", WINDOWED),
    cut("context 2, window, packed", "context=2,microbatch=2", WINDOWED, packed=True),
    cut("context 2, chunks of one token", "context=2", seq_len=4),
    cut("context 2, full", "context=2,recompute=full", packed=True),
    cut("context 2, selective", "context=2,recompute=selective"),
    cut("context 2, loss by chunks", "context=2,loss_chunk=5", TIED),
    cut("context 2, dropout", "context=2", DROPPING),
    cut("context 2, dropout, packed, full", "context=2,recompute=full", DROPPING, packed=True),
    cut("context 2, float32", "context=2", dtype="float32"),
    *(cut(f"context 2, zero {z}", f"context=2,zero={z},bucket_mb=0.001") for z in (1, 2, 3)),
    cut("context 2, zero 3 gathered per step, tied", "context=2,zero=3,zero_gather=per_step", LONG),
    cut("context 2, two stages on one rank, tied", "context=2,schedule=interleaved,stages_per_rank=2", TIED),
    cut("ulysses 2", "context=2,ulysses=2"),
    cut("ulysses 2, packed, tied", "context=2,ulysses=2,microbatch=2", LONG, packed=True),
    cut("ulysses 2, one key/value head, full", "context=2,ulysses=2,recompute=full", MQA),
    cut("ulysses 2, window", "context=2,ulysses=2", WINDOWED),
    cut("ulysses 2, dropout", "context=2,ulysses=2", DROPPING),
    cut("ulysses 2, zero 2, float32", "context=2,ulysses=2,zero=2", dtype="float32"),
)

THREE = (
    cut("context 3", "context=3"),
    cut("context 3, packed, zero 3, tied", "context=3,zero=3", LONG, packed=True),
    cut("ulysses 3, packed", "context=3,ulysses=3", llama(3), packed=True),
)

FOUR = (
    cut("context 4", "context=4"),
    cut("context 4, packed", "context=4,microbatch=2", packed=True),
    cut("ulysses 2 in context 4", "context=4,ulysses=2"),
    cut("ulysses 2 in context 4, packed, window", "context=4,ulysses=2,microbatch=2", WINDOWED, packed=True),
    cut("ulysses 2 in context 4, dropout", "context=4,ulysses=2", DROPPING),
    cut("ulysses 4, one key/value head, packed", "context=4,ulysses=4", MQA, packed=True),
    cut("data 2, context 2", "data=2,context=2"),
    *(cut(f"data 2, context 2, zero {z}", f"data=2,context=2,zero={z}", packed=True) for z in (1, 2, 3)),
    *(
        cut(f"data ranks are nearer than context ranks, zero {z}", f"data=2,context=2,zero={z},order={NEAR}")
        for z in (1, 2, 3)
    ),
    cut("replicate 2, context 2, zero 3, tied", "data=2,replicate=2,context=2,zero=3", LONG),
    cut("data 2, ulysses 2, zero 1", "data=2,context=2,ulysses=2,zero=1"),
    cut("tensor 2, context 2", "tensor=2,context=2"),
    cut("tensor 2 sp, context 2, packed, tied", "tensor=2,context=2,sequence_parallel=true", LONG, packed=True),
    cut(
        "tensor 2 sp, ulysses 2",
        "tensor=2,context=2,ulysses=2,sequence_parallel=true",
        llama(4),
    ),
    cut("tensor 2, copied heads, ulysses 2", "tensor=2,context=2,ulysses=2,replicate_kv=true", MQA),
    cut("context ranks are far apart", "tensor=2,context=2,order=tensor-data-pipeline-context"),
    cut(
        "halves of microbatches, packed, dropout",
        "tensor=2,context=2,microbatch=2,overlap=half_microbatches",
        DROPPING,
        packed=True,
    ),
    cut(
        "chunks, ulysses 2",
        "tensor=2,context=2,ulysses=2,sequence_parallel=true,overlap=chunks+weight_gradient",
        llama(4),
    ),
    cut("pipeline 2, context 2, gpipe, tied", "pipeline=2,context=2,schedule=gpipe", LONG),
    cut("pipeline 2, context 2", "pipeline=2,context=2,zero=1", packed=True),
    cut("pipeline 2, ulysses 2", "pipeline=2,context=2,ulysses=2", LONG),
    cut("pipeline 2, context 2, interleaved", "pipeline=2,context=2,schedule=interleaved,microbatches=4,zero=2"),
    cut("pipeline 2, context 2, looped_bfs", "pipeline=2,context=2,schedule=looped_bfs,microbatches=4,zero=3"),
    cut("pipeline 2, context 2, zb_h1", "pipeline=2,context=2,schedule=zb_h1,microbatches=4,zero=2", packed=True),
    cut("pipeline 2, context 2, zb_v, tied", "pipeline=2,context=2,schedule=zb_v,microbatches=4,zero=3", TIED),
    cut("pipeline 2, ulysses 2, dualpipe_v", "pipeline=2,context=2,ulysses=2,schedule=dualpipe_v,microbatches=4"),
    cut("a05 4 sequences of 8 tokens, data 2", "data=2,context=2,microbatches=2", seq_len=8),
    cut("a05 4 sequences of 8 tokens, context 4", "context=4,microbatches=4", seq_len=8),
)

EIGHT = (
    cut("data 2, context 2, tensor 2", "data=2,context=2,tensor=2"),
    cut(
        "data 2, context 2, tensor 2 sp, zero 2", "data=2,context=2,tensor=2,sequence_parallel=true,zero=2", packed=True
    ),
    cut("context 4, tensor 2, zero 3, tied", "context=4,ulysses=2,tensor=2,sequence_parallel=true,zero=3", LONG),
    cut(
        "data 2, context 2, pipeline 2, zb_v, zero 3", "data=2,context=2,pipeline=2,schedule=zb_v,zero=3,microbatches=4"
    ),
    cut(
        "context 2, tensor 2 sp, pipeline 2", "context=2,tensor=2,sequence_parallel=true,pipeline=2", TIED, packed=True
    ),
)

COMPILED = (
    cut("compiled, packed, dropout", "context=2,compile=true", DROPPING, packed=True),
    cut("compiled, ulysses 2, full, window", "context=2,ulysses=2,compile=true,recompute=full", WINDOWED),
)

CONTEXT_TABLE: tuple[Row, ...] = (*TWO, *THREE, *FOUR, *EIGHT, *COMPILED)
