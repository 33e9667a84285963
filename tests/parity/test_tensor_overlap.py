"""Overlap changes when something is sent, never what is computed."""

from __future__ import annotations

import pytest
from plans import GPT, Row, row
from together import Together

pytestmark = pytest.mark.ranks

POLICIES = (
    "weight_gradient",
    "chunks",
    "half_microbatches",
    "weight_gradient+chunks",
    "weight_gradient+half_microbatches",
)
PARALLEL = ",sequence_parallel=true"
TABLE = [
    *(
        row(f"{policy}{', sequence parallel' * bool(sp)}", f"tensor=2,microbatch=2,microbatches=2,overlap={policy}{sp}")
        for policy in POLICIES
        for sp in ("", PARALLEL)
    ),
    row(
        "halves, biases, learned positions, dropout",
        "tensor=2,microbatch=4,overlap=half_microbatches",
        GPT,
        dropout=0.3,
        attention_dropout=0.2,
    ),
    row("chunks, biases, full recompute", "tensor=3,microbatch=2,overlap=chunks,recompute=full", GPT),
    row(
        "halves, full recompute",
        "tensor=2,microbatch=2,overlap=half_microbatches,recompute=full,sequence_parallel=true",
    ),
    row("halves, selective recompute", "tensor=2,microbatch=2,overlap=half_microbatches,recompute=selective"),
    row("halves, packed", "tensor=2,microbatch=2,overlap=half_microbatches", packed=True),
    row(
        "halves under ZB-H1",
        "tensor=2,pipeline=2,microbatch=2,schedule=zb_h1,overlap=half_microbatches,sequence_parallel=true",
    ),
    # A bucket that one half has filled waits for the other one.
    row("halves, a bucket a matrix", "tensor=2,data=2,zero=2,microbatch=2,overlap=half_microbatches,bucket_mb=0.001"),
    row("chunks under DualPipeV", "tensor=2,pipeline=2,microbatches=5,schedule=dualpipe_v,overlap=chunks"),
    row(
        "all with ZeRO-3",
        "tensor=2,data=2,zero=3,microbatch=2,overlap=weight_gradient+half_microbatches,sequence_parallel=true",
    ),
    row(
        "chunks, three rows a rank", "tensor=4,overlap=chunks+weight_gradient,sequence_parallel=true,replicate_kv=true"
    ),
]


CERTIFICATES = Together(TABLE)


@pytest.mark.parametrize("found", TABLE, ids=lambda found: found.name)
def test_overlap_equals_one_process(found: Row) -> None:
    CERTIFICATES.holds(found)
