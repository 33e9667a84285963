"""Packing of tensors over ranks: what is packed comes back, every row on one rank, padding is nothing."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardsmith.engine.runtime.packing import Packing, flat_views, rows_of
from shardsmith.layout.axes.data import chunk_elements, data_rows

SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 9), st.integers(1, 4))), min_size=1, max_size=5
)
CPU = torch.device("cpu")
RANKS = st.integers(1, 5)


def numbered(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Tensors of `shapes` whose elements are 1, 2, 3, ...: none is 0, no two are equal."""
    total = sum(prod(s) for s in shapes)
    flat = torch.arange(1, total + 1, dtype=torch.float64)
    return [part.view(shape) for part, shape in zip(flat.split([prod(s) for s in shapes]), shapes, strict=True)]


def buffer(packing: Packing) -> Tensor:
    return torch.full((packing.ranks * packing.chunk,), -1.0, dtype=torch.float64)


@given(SHAPES, RANKS)
@settings(deadline=None)
def test_packing_and_unpacking_is_nothing(shapes: list[tuple[int, ...]], ranks: int) -> None:
    tensors, packing = numbered(shapes), Packing(shapes=tuple(shapes), ranks=ranks)
    flat = buffer(packing)
    packing.pack(tensors, flat)
    assert (flat >= 0).all(), "the whole buffer is written"
    assert sorted(flat[flat > 0].tolist()) == [float(i) for t in tensors for i in t.flatten()]
    back = [torch.zeros_like(t) for t in tensors]
    packing.unpack(flat, back)
    assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))


@given(SHAPES, RANKS)
@settings(deadline=None)
def test_a_ranks_part_is_its_rows_of_every_tensor(shapes: list[tuple[int, ...]], ranks: int) -> None:
    tensors, packing = numbered(shapes), Packing(shapes=tuple(shapes), ranks=ranks)
    flat, mine = buffer(packing), torch.empty(packing.chunk, dtype=torch.float64)
    packing.pack(tensors, flat)
    for rank in range(ranks):
        part = flat.view(ranks, packing.chunk)[rank]
        shards = [rows_of(t, ranks, rank) for t in tensors]
        packing.pack_shards(shards, mine.fill_(-1.0))
        assert torch.equal(mine, part)
        _, written = flat_views([tuple(t.shape) for t in shards], torch.float64, CPU)
        packing.write_shards(part, written)
        assert all(torch.equal(a, b) for a, b in zip(shards, written, strict=True))
        packing.add_shards(part, written)
        assert all(torch.equal(2 * a, b) for a, b in zip(shards, written, strict=True))


@given(SHAPES, RANKS, st.data())
@settings(deadline=None)
def test_adding_one_by_one_is_packing_all(shapes: list[tuple[int, ...]], ranks: int, data: st.DataObject) -> None:
    tensors, packing = numbered(shapes), Packing(shapes=tuple(shapes), ranks=ranks)
    whole, added = buffer(packing), torch.zeros(ranks * packing.chunk, dtype=torch.float64)
    packing.pack(tensors, whole)
    for position in data.draw(st.permutations(range(len(shapes)))):
        packing.add(position, tensors[position], added)
    assert torch.equal(whole, added)


@given(st.integers(0, 40), st.integers(1, 3), RANKS)
@settings(deadline=None)
def test_runtime_and_layout_cut_the_same_rows(rows: int, columns: int, ranks: int) -> None:
    tensor = torch.arange(rows * columns).view(rows, columns)
    parts = [rows_of(tensor, ranks, index) for index in range(ranks)]
    assert torch.equal(torch.cat(parts), tensor)
    for index, part in enumerate(parts):
        first, count = data_rows(rows, ranks, index)
        assert torch.equal(part, tensor[first : first + count])
    packing = Packing(shapes=((rows, columns), (columns,)), ranks=ranks)
    assert packing.chunk == chunk_elements([(rows, columns), (columns,)], ranks)


def test_d03_short_tensors_leave_the_last_ranks_nothing() -> None:
    assert [rows_of(torch.arange(6), 4, i).tolist() for i in range(4)] == [[0, 1], [2, 3], [4, 5], []]
    assert [rows_of(torch.arange(1), 4, i).tolist() for i in range(4)] == [[0], [], [], []]
    packing = Packing(shapes=((6,), (1, 2)), ranks=4)
    flat = torch.full((4 * packing.chunk,), -1.0)
    packing.pack([torch.arange(1.0, 7.0), torch.tensor([[8.0, 9.0]])], flat)
    assert flat.view(4, -1).tolist() == [[1, 2, 8, 9], [3, 4, 0, 0], [5, 6, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packing_casts_to_the_dtype_that_travels(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1.0, 1 / 3], [2.0, 5.0], [1e-3, 7.0]])
    packing = Packing(shapes=((3, 2),), ranks=2)
    flat = torch.empty(2 * packing.chunk, dtype=dtype)
    packing.pack([tensor], flat)
    assert torch.equal(flat[:6].view(3, 2), tensor.to(dtype))
    assert flat[6:].tolist() == [0, 0]
    wide = torch.zeros(3, 2)
    packing.unpack(flat, [wide])
    assert torch.equal(wide, tensor.to(dtype).float())


def test_flat_views_are_one_buffer() -> None:
    flat, (a, b) = flat_views([(2, 3), (4,)], torch.float32, CPU)
    assert flat.tolist() == [0.0] * 10
    b.fill_(2.0)
    a[1, 2] = 5.0
    assert flat.tolist() == [0, 0, 0, 0, 0, 5, 2, 2, 2, 2]
    empty, none = flat_views([], torch.float32, CPU)
    assert (empty.numel(), none) == (0, [])
