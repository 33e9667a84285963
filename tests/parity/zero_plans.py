"""Rows of the table of plans that shard over the data axis: HSDP, gathers per step, tied ends, odd sizes."""

from __future__ import annotations

from plans import GPT, LLAMA, TIED, Row, row

SHORT = LLAMA.with_(layers=1, hidden=3, heads=1, kv_heads=1, head_dim=2, ffn=1, vocab=3)
"""No tensor has four rows, one has a single row: four shards leave some ranks nothing of each."""

SHORT_GPT = GPT.with_(layers=1, hidden=3, heads=1, kv_heads=1, head_dim=1, ffn=2, vocab=3, context=3)

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved")

PER_STEP = (
    *(
        row(
            f"{schedule}, zero {zero} gathered per step",
            f"data=2,pipeline=2,zero={zero},zero_gather=per_step,schedule={schedule}",
        )
        for schedule in SCHEDULES
        for zero in (2, 3)
    ),
    row("zero 3 gathered per step, tied, tensor 2", "data=2,pipeline=2,tensor=2,zero=3,zero_gather=per_step", GPT),
    row("zero 3 gathered per step, one stage, tied", "data=2,zero=3,zero_gather=per_step", GPT),
)

HYBRID = (
    *(row(f"c10 data 4, replicate 2, zero {zero}", f"data=4,replicate=2,zero={zero}") for zero in (1, 2, 3)),
    row("replicate 2, zero 3 gathered per step", "data=4,replicate=2,zero=3,zero_gather=per_step"),
    row("replicate 2, zero 2 gathered per step", "data=4,replicate=2,zero=2,zero_gather=per_step"),
    row("replicate 2, zero 2, pipeline 2, tied", "data=4,replicate=2,zero=2,pipeline=2", GPT),
    row("replicate 2, zero 3, small buckets", "data=4,replicate=2,zero=3,bucket_mb=0.001"),
    row("replicate 4 leaves one shard", "data=4,replicate=4,zero=3"),
)

ONE_STAGE = (
    *(row(f"data 3, zero {zero}", f"data=3,zero={zero}") for zero in (1, 2, 3)),
    *(row(f"data 2, zero {zero}, tied", f"data=2,zero={zero}", GPT) for zero in (1, 2, 3)),
    row("data 3, zero 3, tied", "data=3,zero=3", GPT),
    row("one rank, zero 3", "zero=3"),
    row("microbatches of 2, zero 2", "data=2,zero=2,microbatch=2,microbatches=2"),
    row("one microbatch, zero 3", "data=2,zero=3,microbatches=1"),
)

TIED_ENDS = (
    *(
        row(f"a10 tied, pipeline 2, tensor 2, zero {zero}", f"data=2,pipeline=2,tensor=2,zero={zero}", GPT)
        for zero in (1, 2, 3)
    ),
    row("a10 tied, pipeline 2, data 3, zero 1", "data=3,pipeline=2,zero=1", GPT),
    row(
        "tied, interleaved, tensor 2 sp, zero 3",
        "data=2,pipeline=2,tensor=2,zero=3,schedule=interleaved,sequence_parallel=true",
        TIED,
    ),
    row("both ends on one rank, tied, zero 3", "data=2,schedule=interleaved,stages_per_rank=2,zero=3", GPT),
    row("both ends on one rank, tied, zero 2", "data=2,schedule=interleaved,stages_per_rank=2,zero=2", GPT),
    row("no layer at either end, tied, zero 3", "data=2,pipeline=3,layers=0+4+0,zero=3", GPT),
)

SIZES = (
    *(row(f"a24 5 tokens on tensor 2, zero {zero}", f"data=2,tensor=2,zero={zero}", vocab=5) for zero in (1, 2, 3)),
    row(
        "a24 5 tokens on tensor 2 sp, data 3, zero 3, tied",
        "data=3,tensor=2,zero=3,sequence_parallel=true",
        GPT,
        vocab=5,
    ),
    *(row(f"fewer rows than 4 shards, zero {zero}", f"data=4,zero={zero}", SHORT) for zero in (1, 2, 3)),
    row("fewer rows than 4 shards, zero 3, tied", "data=4,zero=3", SHORT_GPT, seq_len=3),
    row(
        "fewer rows than 4 shards, zero 2, tied, pipeline 2",
        "data=4,pipeline=2,layers=1+0,zero=2",
        SHORT_GPT,
        seq_len=3,
    ),
    *(row(f"small buckets, zero {zero}", f"data=2,zero={zero},bucket_mb=0.001") for zero in (1, 2, 3)),
    row("a bucket for each tensor, tied, pipeline 2, zero 3", "data=2,pipeline=2,zero=3,bucket_mb=0.00001", GPT),
    row("partial gradients of rows, zero 3", "data=2,tensor=2,zero=3,sequence_parallel=true", GPT),
    row("partial gradients of rows, zero 1", "data=2,tensor=2,zero=1,sequence_parallel=true", GPT),
    row("data ranks are neighbours, zero 3", "data=2,tensor=2,pipeline=2,zero=3,order=data-tensor-pipeline-context"),
)

ACCUMULATION = (
    *(
        row(f"a05 4 sequences of 8 tokens, {line}", line, seq_len=8)
        for line in (
            "data=4,zero=1,microbatches=1",
            "data=4,zero=3,microbatches=1",
            "data=4,replicate=2,zero=2,microbatches=1",
            "data=2,zero=2,microbatches=2",
            "zero=2,microbatches=4",
        )
    ),
    row("a07 pipeline 2, 2 microbatches, zero 1", "data=2,pipeline=2,zero=1,microbatches=2", seq_len=3),
    row("a08 pipeline 2, 8 microbatches, zero 2", "data=2,pipeline=2,zero=2,microbatches=8", seq_len=3),
    row("a08 pipeline 2, 8 microbatches, zero 3", "data=2,pipeline=2,zero=3,microbatches=8", seq_len=3),
)

DTYPES = (
    row("float32, zero 3", "data=2,pipeline=2,zero=3,schedule=interleaved", dtype="float32"),
    row("float32, replicate 2, zero 2, tied", "data=4,replicate=2,zero=2", GPT, dtype="float32"),
)

ZERO_TABLE: tuple[Row, ...] = (*PER_STEP, *HYBRID, *ONE_STAGE, *TIED_ENDS, *SIZES, *ACCUMULATION, *DTYPES)
