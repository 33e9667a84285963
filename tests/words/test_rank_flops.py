"""FLOPs of the ranks add up to those of the model, whatever the layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardsmith.layout.flops import rank_flops
from shardsmith.plan.file import make_setup
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import settled
from shardsmith.specs.flops import hardware_flops, model_flops

SEQ_LEN = 64


def total(setup: Setup) -> int:
    return sum(sum(rank_flops(setup, rank).values()) for rank in range(setup.plan.world))


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt"])
@pytest.mark.parametrize(
    "line",
    ["", "tensor=2,pipeline=2,data=2", "tensor=2,sequence_parallel=true,zero=3,data=4", "pipeline=2,schedule=zb_v"],
)
def test_ranks_add_up_to_the_model(model: str, line: str) -> None:
    setup = settled(make_setup(plan=line, model=model, seq_len=SEQ_LEN, global_batch=8))
    assert total(setup) == model_flops(setup.model, seq_len=SEQ_LEN, tokens=8 * SEQ_LEN).total


def test_full_recompute_is_one_more_pass_through_the_layers() -> None:
    setup = make_setup(plan="tensor=2,recompute=full", seq_len=SEQ_LEN, global_batch=4)
    tokens = 4 * SEQ_LEN
    assert total(setup) == hardware_flops(setup.model, seq_len=SEQ_LEN, tokens=tokens, recompute="full").total


def test_selective_recompute_multiplies_nothing() -> None:
    plain, selective = (
        make_setup(plan=f"recompute={r}", seq_len=SEQ_LEN, global_batch=4) for r in ("none", "selective")
    )
    assert total(plain) == total(selective)


def test_copied_heads_and_chunked_losses_cost_more() -> None:
    base = make_setup(plan="tensor=4", seq_len=SEQ_LEN, global_batch=4)
    model = base.model.with_(heads=4, kv_heads=2)
    copied = replace(base, model=model, plan=replace(base.plan, replicate_kv=True))
    tokens, width = 4 * SEQ_LEN, 2 * model.kv_heads * model.head_dim
    more = 6 * tokens * model.layers * width * model.hidden
    assert total(copied) == model_flops(model, seq_len=SEQ_LEN, tokens=tokens).total + more
    chunked = make_setup(plan="loss_chunk=16", seq_len=SEQ_LEN, global_batch=4)
    head = 2 * chunked.model.vocab * chunked.model.hidden * tokens
    assert total(chunked) == model_flops(chunked.model, seq_len=SEQ_LEN, tokens=tokens).total + head


def test_chunked_logits_are_made_a_third_time_where_their_weight_gradient_waits() -> None:
    """Under ZeRO 3 it does not wait: the head would have to be gathered again."""
    waits, whole = (
        make_setup(plan=f"data=2,pipeline=2,schedule=zb_h1,loss_chunk=16,zero={zero}", seq_len=SEQ_LEN, global_batch=8)
        for zero in (1, 3)
    )
    assert total(waits) - total(whole) == 2 * waits.model.vocab * waits.model.hidden * 8 * SEQ_LEN


def test_a_mask_is_not_skipped() -> None:
    """With a window the kernel is given a mask, and multiplies what the mask then drops."""
    base = make_setup(plan="", seq_len=SEQ_LEN, global_batch=2)
    windowed = replace(base, model=base.model.with_(window=SEQ_LEN // 2))
    assert rank_flops(windowed, 0)["scores"] == 2 * rank_flops(base, 0)["scores"]
