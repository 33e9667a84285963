"""Attention across ranks against torch's own on one, and its pieces against masks made whole."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import chain, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardsmith.engine.models.attention_mask import attention_mask
from shardsmith.engine.runtime import ring_attention
from shardsmith.engine.runtime.block_attention import Seen, attend, attend_backward, merge
from shardsmith.engine.runtime.block_attention import _attend_by_products as attend_by_products
from shardsmith.engine.runtime.block_attention import _backward_by_products as backward_by_products
from shardsmith.engine.runtime.group import Arriving, Group
from shardsmith.engine.runtime.groups import make_groups
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.engine.runtime.ring_attention import mask_of
from shardsmith.engine.runtime.sequence_parts import Parts
from shardsmith.layout.axes.context import places
from shardsmith.layout.key_blocks import TILE, key_blocks
from shardsmith.plan.mesh import mesh_of
from shardsmith.plan.plan import Plan

pytestmark = pytest.mark.ranks

LENGTH, SEQUENCES, WIDTH = 32, 2, 8

PACKS: dict[str, list[list[int]] | None] = {
    "one document": None,
    "documents": [[5, 11, 16], [20, 1, 11]],
    "documents of one token": [[1] * LENGTH, [1] * LENGTH],
    "one token and all": [[1] * LENGTH, [LENGTH]],
    "borders of chunks": [[8, 8, 8, 8], [4, 24, 4]],
}


def documents_of(pack: list[list[int]] | None) -> Tensor | None:
    if pack is None:
        return None
    return torch.stack([torch.arange(len(p)).repeat_interleave(torch.tensor(p)) for p in pack])


def parts_of(context: int, ulysses: int) -> Parts:
    plan = Plan(context=context, ulysses=ulysses)
    rank = dist.get_rank()
    groups = make_groups(mesh_of(plan), rank, Recorder(rank), ends=(0, 0), kv_copies=1, ulysses=ulysses, timeout_s=60)
    return Parts(ring=groups.ring, ulysses=groups.ulysses)


def drawn(heads: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and the output's gradient, [S, B, heads, E]."""
    generator = torch.Generator().manual_seed(heads * 100 + kv_heads)
    counts = (heads, kv_heads, kv_heads, heads)
    return [
        torch.randn(LENGTH, SEQUENCES, h, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for h in counts
    ]


def on_one(tensors: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Output and gradients by torch's own attention."""
    q, k, v = (t.clone().requires_grad_() for t in tensors[:3])
    permuted = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    out = F.scaled_dot_product_attention(*permuted, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    out = out.permute(2, 0, 1, 3)
    out.backward(tensors[3])
    return [out, *(t.grad for t in (q, k, v))]  # type: ignore[misc]


def across(tensors: list[Tensor], parts: Parts, documents: Tensor | None, window: int | None) -> list[Tensor]:
    """This rank's part of the same."""
    q, k, v = (parts.split(t, 0).requires_grad_() for t in tensors[:3])
    out = parts.view(len(q), documents, window).attend(q, k, v, WIDTH**-0.5)
    out.backward(parts.split(tensors[3], 0))
    return [out, *(t.grad for t in (q, k, v))]  # type: ignore[misc]


def errors() -> dict[str, float]:
    """Largest difference to one rank, over output and gradients, of everything that 4 ranks can be cut into."""
    found = {}
    for ulysses in (1, 2, 4):
        parts = parts_of(4, ulysses)
        for (heads, kv_heads), (name, pack), window in product(((8, 8), (8, 2), (4, 1)), PACKS.items(), (None, 1, 5)):
            documents = documents_of(pack)
            tensors = drawn(heads, kv_heads, torch.float64)
            mask = attention_mask(LENGTH, device=torch.device("cpu"), documents_BS=documents, window=window)
            wanted = on_one(tensors, mask)
            pairs = zip(across(tensors, parts, documents, window), wanted, strict=True)
            error = max((a - parts.split(b, 0)).abs().max().item() for a, b in pairs)
            found[f"ulysses {ulysses}, {heads} and {kv_heads} heads, {name}, window {window}"] = error
    return found


def test_ring_ulysses_and_both_equal_attention_on_one_rank(run_ranks: Callable[..., list[Any]]) -> None:
    for found in run_ranks(4, errors):
        assert len(found) == 3 * 3 * 5 * 3
        assert {name: error for name, error in found.items() if not error < 1e-12} == {}


def half_errors() -> tuple[list[float], list[float]]:
    """Mean errors in bfloat16 against float64: of torch's own attention, and of a ring with Ulysses."""
    exact, half = drawn(8, 2, torch.float64), drawn(8, 2, torch.bfloat16)
    wanted = on_one([t.double() for t in half], None)
    parts = parts_of(4, 2)
    assert exact[0].shape == half[0].shape

    def mean(found: list[Tensor], true: list[Tensor]) -> list[float]:
        return [(a.double() - b).abs().mean().item() for a, b in zip(found, true, strict=True)]

    ours = mean(across(half, parts, None, None), [parts.split(w, 0) for w in wanted])
    assert all(t.dtype == torch.bfloat16 for t in across(half, parts, None, None))
    return mean(on_one(half, None), wanted), ours


def test_bfloat16_loses_no_more_than_on_one_rank(run_ranks: Callable[..., list[Any]]) -> None:
    for one, ring in run_ranks(4, half_errors):
        assert all(b < 2 * a for a, b in zip(one, ring, strict=True)), (one, ring)


def events(context: int) -> tuple[list[str], list[str]]:
    """What happens in which order in a forward and a backward pass of one rank."""
    log: list[str] = []
    parts = parts_of(context, 1)
    real_pass, real_wait = Group.pass_on, Arriving.wait

    def pass_on(self: Group, x: Tensor, purpose: str) -> Arriving:
        log.append("start gradients" if purpose.endswith("gradients") else "start")
        return real_pass(self, x, purpose)

    def wait(self: Arriving) -> Tensor:
        log.append("wait")
        return real_wait(self)

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (log.append("attend"), function(*args))[1]

    Group.pass_on, Arriving.wait = pass_on, wait  # type: ignore[method-assign]
    ring_attention.attend, ring_attention.attend_backward = noted(attend), noted(attend_backward)
    q, k, v, grad = (parts.split(t[:24], 0) for t in drawn(4, 4, torch.float32))
    q.requires_grad_()
    out = parts.view(len(q), None, None).attend(q, k, v, 1.0)
    forward = log.copy()
    log.clear()
    out.backward(grad)
    return forward, log


def test_every_hop_of_keys_and_values_is_under_way_while_attention_is_computed(
    run_ranks: Callable[..., list[Any]],
) -> None:
    for forward, backward in run_ranks(3, events, 3):
        assert forward == ["start", "attend", "wait", "start", "attend", "wait", "attend"]
        hop = ["start gradients"]
        assert backward == [*forward[:5], *hop, "wait", "attend", "wait", *hop, "wait"]


def travelling(context: int) -> tuple[int, int]:
    """Most keys with values, and most of their gradients, that are alive in a backward pass beside what was saved."""
    parts = parts_of(context, 1)
    most = {torch.bfloat16: 0, torch.float32: 0}

    def noted(*args: Any) -> Any:
        gc.collect()
        alive = [t for t in gc.get_objects() if isinstance(t, Tensor) and t.dim() == 5 and t.shape[0] == 2]
        for dtype in most:
            most[dtype] = max(most[dtype], len({t.untyped_storage().data_ptr() for t in alive if t.dtype == dtype}))
        return attend_backward(*args)

    ring_attention.attend_backward = noted
    q, k, v, grad = (parts.split(t, 0).requires_grad_() for t in drawn(4, 4, torch.bfloat16))
    parts.view(len(q), None, None).attend(q, k, v, 1.0).backward(grad)
    return most[torch.bfloat16] - 1, most[torch.float32]


def test_a_ring_keeps_two_parts_and_four_gradients_however_many_ranks_it_has(
    run_ranks: Callable[..., list[Any]],
) -> None:
    """What `layout.axes.context.ring_buffer_bytes` counts."""
    assert run_ranks(4, travelling, 4) == [(2, 4)] * 4


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_blocks_are_exactly_the_mask(data: st.DataObject) -> None:
    """Each visible pair lies in one block, no other pair is seen, and every query meets itself in the own part."""
    ranks, chunk = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    length, own = 2 * ranks * chunk, data.draw(st.integers(0, ranks - 1))
    window = data.draw(st.none() | st.integers(1, length))
    documents = None
    if data.draw(st.booleans()):
        borders = data.draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=2))
        documents = np.cumsum(np.array(borders), axis=1)
    device = torch.device("cpu")
    numbers = torch.zeros(1, length, dtype=torch.int64) if documents is None else torch.from_numpy(documents)
    mask = attention_mask(length, device=device, documents_BS=numbers, window=window)
    assert mask is not None
    held = [places(length, ranks, index) for index in range(ranks)]
    found = torch.zeros(len(numbers), 1, length, length, dtype=torch.int64)
    flat = [torch.tensor([p for part in parts for p in part]) for parts in held]
    tile = data.draw(st.sampled_from((1, 3, 1024)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardsmith.layout.key_blocks.TILE", tile)
        patch.setattr("shardsmith.layout.key_blocks._blocks_of_whole", _uncached)
        every = key_blocks(held, own, documents, window)
    for source, blocks in enumerate(every):
        for block in blocks:
            rows, keys = flat[own][block.rows], flat[source][block.keys]
            assert block.kind != "masked" or len(rows) <= tile
            seen = torch.ones(len(rows), len(keys), dtype=torch.bool)
            seen = seen.tril() if block.kind == "causal" else seen[None, None]
            shown = mask_of(block, device)
            found[:, :, rows[:, None], keys[None]] += (seen if shown is None else shown).long()
    expected = torch.zeros_like(found)
    expected[:, :, flat[own]] = mask[:, :, flat[own]].long()
    assert torch.equal(found, expected)


def _uncached(parts: Any, own: int, window: int | None) -> Any:
    from shardsmith.layout.key_blocks import _blocks

    return _blocks(parts, own, None, window)


def test_a_whole_sequence_takes_one_block_a_part_and_half_the_pairs() -> None:
    """Zig-zag: causal on the own part, then always a full rectangle of half the queries or half the keys."""
    held = [places(64, 4, index) for index in range(4)]
    for own in range(4):
        every = key_blocks(held, own, None, None)
        kinds = [[(b.kind, b.rows, b.keys) for b in blocks] for blocks in every]
        for source, blocks in enumerate(kinds):
            whole, head, tail = slice(0, 16), slice(0, 8), slice(8, 16)
            expected = (
                ("causal", whole, whole) if source == own else ("full", *((whole, head), (tail, whole))[source > own])
            )
            assert blocks == [expected]


def test_documents_that_a_rank_shares_with_no_other_need_no_blocks() -> None:
    held = [places(16, 2, index) for index in range(2)]
    documents = np.repeat(np.arange(4), 4)[None]
    assert [len(blocks) for blocks in key_blocks(held, 0, documents, None)] == [1, 0]
    ones = np.arange(16)[None]
    assert [len(blocks) for blocks in key_blocks(held, 1, ones, None)] == [0, 1]


@pytest.mark.parametrize(("length", "window"), [(4096, None), (None, 4096), (999, 2048)])
def test_long_sequences_on_few_ranks_compute_little_more_than_what_is_seen(
    length: int | None, window: int | None
) -> None:
    """131,072 places on 2 ranks: no mask is larger than a tile of queries and the keys they see."""
    places_in_all = 2**17
    held = [places(places_in_all, 2, index) for index in range(2)]
    documents = None if length is None else (np.arange(places_in_all) // length)[None]
    seen = computed = 0
    for own in range(2):
        for block in chain.from_iterable(key_blocks(held, own, documents, window)):
            rows, keys = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
            computed += rows * keys
            if block.first is None or block.last is None:
                seen += rows * keys if block.kind == "full" else rows * (rows + 1) // 2
                continue
            assert rows <= TILE
            assert keys <= TILE + min(x for x in (length, window) if x is not None)
            seen += int((block.last - block.first).sum())
    each = np.arange(1, places_in_all + 1)
    if documents is not None:
        each = np.arange(places_in_all) % length + 1
    assert seen == np.minimum(each, window or places_in_all).sum()
    assert computed < 3 * seen


@pytest.mark.parametrize("function", [attend, attend_by_products])
def test_a_query_that_sees_nothing_has_no_weight(function: Callable[..., tuple[Tensor, Tensor]]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    blind = mask.clone()
    blind[:, :, 2] = False
    out, lse = function(q, k, v, Seen(mask=mask), 0.5)
    more, more_lse = function(q, k, v, Seen(mask=blind), 0.5)
    assert torch.equal(more[:, :, 2], torch.zeros(1, 2, 8, dtype=torch.float64))
    assert torch.equal(more_lse[:, :, 2], torch.full((1, 2), -torch.inf, dtype=torch.float64))
    nothing, nothing_lse = function(q, k, v, Seen(mask=torch.zeros_like(mask)), 0.5)
    assert not nothing.any()
    assert (nothing_lse == -torch.inf).all()
    merged, merged_lse = out.clone(), lse.clone()
    merge(merged, merged_lse, nothing, nothing_lse)
    assert torch.equal(merged, out)
    assert torch.equal(merged_lse, lse)
    merge(merged, merged_lse, more, more_lse)
    assert torch.allclose(merged[:, :, 2], out[:, :, 2], rtol=1e-14)
    assert torch.allclose(merged_lse, torch.where(more_lse == -torch.inf, lse, lse + np.log(2)), rtol=1e-14)


def test_plain_products_equal_the_kernel() -> None:
    generator = torch.Generator().manual_seed(1)
    q, grad = (torch.randn(2, 4, 5, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 2, 5, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(2, 1, 5, 5, generator=generator) > 0.4
    mask[:, :, range(5), range(5)] = True
    for seen in (Seen(), Seen(causal=True), Seen(mask=mask)):
        out, lse = attend(q, k, v, seen, 0.3)
        for found, wanted in zip(attend_by_products(q, k, v, seen, 0.3), (out, lse), strict=True):
            assert torch.allclose(found, wanted, atol=1e-14)
        args = (grad, q, k, v, out, lse, seen, 0.3)
        for found, wanted in zip(backward_by_products(*args), attend_backward(*args), strict=True):
            assert torch.allclose(found, wanted, atol=1e-13)
