"""Sizes that planners have got wrong in public, with their right values: cases of kind G."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardsmith.design.cost.estimate import rank_memory
from shardsmith.design.cost.layouts import batch_of, layouts_of
from shardsmith.design.cost.memory import kept_per_layer
from shardsmith.design.cost.subject import subject_of
from shardsmith.layout.collectives import collectives
from shardsmith.plan.file import make_setup
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.specs.library import model_named


def priced(line: str, model: str, seq_len: int, dtype: str, **sizes: int) -> Setup:
    found = make_setup(plan=line, model=model, cluster="a100", nodes=1, seq_len=seq_len, global_batch=1, dtype=dtype)
    return replace(found, model=found.model.with_(**sizes))


def test_g04_attention_that_is_not_fused_keeps_its_scores() -> None:
    setup = make_setup(
        plan="microbatch=4", model="gpt2-xl", cluster="a100", nodes=1, seq_len=1024, global_batch=4, dtype="float16"
    )
    setup = replace(
        setup, model=setup.model.with_(layers=36, hidden=1280, heads=20, kv_heads=20, head_dim=64, ffn=5120)
    )
    subject = subject_of(setup)
    batch = batch_of(
        subject, layouts_of([setup.plan], setup.model, setup.workload), precision(setup.plan, setup.workload)
    )
    fused, _ = kept_per_layer(replace(batch, flash=np.ones(1)))
    plain, _ = kept_per_layer(replace(batch, flash=np.zeros(1)))
    # s b h (34 + 5 a s / h): the second term is that of the scores; the 34 holds two dropout masks of h bytes each,
    # which a model without dropout does not keep.
    assert plain[0] - fused[0] == pytest.approx(5 * 20 * 1024**2 * 4)
    assert fused[0] == pytest.approx(1024 * 4 * 1280 * 32)
    assert 36 * (plain[0] - fused[0]) == pytest.approx(21.52e9 - 6.42e9, rel=1e-3)
    dropped, _ = kept_per_layer(replace(batch, flash=np.ones(1), dropout=np.ones(1)))
    assert dropped[0] == pytest.approx(1024 * 4 * 1280 * 34)
    assert 36 * dropped[0] == pytest.approx(6.42e9, rel=1e-3)


@pytest.mark.parametrize(
    ("line", "gib"), [("", 4.637), ("tensor=2", 2.318), ("loss_chunk=1024", 0.580)], ids=["whole", "tensor 2", "chunks"]
)
def test_g05_logits_are_an_item_of_the_last_stage(line: str, gib: float) -> None:
    setup = priced(line, "qwen3-8b", 8192, "bfloat16")
    (rank,) = rank_memory(subject_of(setup), setup)
    # Two bytes an entry as computed; then the float32 copy that is softmaxed, the case's own, and its gradient.
    assert rank.items["logits"] / 2**30 * 4 / (2 + 4 + 4) == pytest.approx(gib, rel=1e-3)
    staged = priced("pipeline=2", "qwen3-8b", 8192, "bfloat16")
    first, last = rank_memory(subject_of(staged), staged)
    assert first.items["logits"] == 0 < last.items["logits"]


@pytest.mark.parametrize(
    ("tokens", "tensor_bytes", "tensor_ms", "hop_bytes", "hop_ms"),
    [(32, 151.0e6, 11.08, 786e3, 0.0577), (2048, 9.664e9, 709.0, 50.3e6, 3.69)],
)
def test_g06_tensor_ranks_send_far_more_than_stages(
    tokens: int, tensor_bytes: float, tensor_ms: float, hop_bytes: float, hop_ms: float
) -> None:
    link = 109e9 / 8  # bytes/s
    tensor = collectives(priced("tensor=2", "gpt3-175b", tokens, "bfloat16"), 0)
    (sums,) = (c for c in tensor if c.purpose == "layer_forward")
    assert (sums.kind, sums.count) == ("all_reduce", 2 * 96)
    assert sums.bytes == pytest.approx(tensor_bytes, rel=1e-3)
    assert 1e3 * sums.bytes / link == pytest.approx(tensor_ms, rel=1e-2)
    staged = collectives(priced("pipeline=2", "gpt3-175b", tokens, "bfloat16"), 0)
    (hop,) = (c for c in staged if c.kind == "send")
    assert hop.count == 1
    assert hop.bytes == pytest.approx(hop_bytes, rel=1e-3)
    assert 1e3 * hop.bytes / link == pytest.approx(hop_ms, rel=1e-2)


def test_the_model_of_g05_has_the_vocabulary_of_its_case() -> None:
    assert model_named("qwen3-8b").vocab == 151_936
