"""Samples: documents in windows or whole, blends, and what is held out."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardsmith.engine.dataset.indexed import TokenFile, TokenWriter, beside, dtype_for
from shardsmith.engine.dataset.open import open_data, split
from shardsmith.engine.dataset.order import samples_at, whole_weights
from shardsmith.engine.dataset.samples import (
    IGNORED,
    Blend,
    Documents,
    Synthetic,
    WholeDocuments,
    Windows,
    best_fit,
    next_tokens,
    positions_in,
)
from shardsmith.errors import Refused
from shardsmith.specs.job import Data

EOD = 999


def write(prefix: Path, lengths: list[int], *, prompts: int = 0) -> TokenFile:
    """Documents of these lengths (their end included), numbered through; the first `prompts` of each are not learnt."""
    token = 0
    with beside(prefix, ".bin").open("wb") as stream:
        writer = TokenWriter(stream, dtype_for(1000), mask=beside(prefix, ".mask.bin"))
        for length in lengths:
            tokens = np.arange(token, token + length - 1) % EOD
            writer.add(tokens[:prompts], target=False)
            writer.add(tokens[prompts:])
            writer.end_document(EOD)
            token += length - 1
        writer.close()
    beside(prefix, ".idx").write_bytes(writer.index())
    return TokenFile(prefix)


def test_f03_no_target_across_a_border() -> None:
    # documents [0, 1, 2] and [A, B, C] and one token of padding
    tokens, documents = np.array([0, 1, 2, 10, 11, 12, 0]), np.array([0, 0, 0, 1, 1, 1, 2])
    labels = next_tokens(tokens, documents)
    assert labels.tolist() == [1, 2, IGNORED, 11, 12, IGNORED]
    assert (labels != IGNORED).sum() == 4
    counted = np.array([0, 0, 1, 0, 1, 1, 1], dtype=bool)
    assert next_tokens(tokens, documents, counted).tolist() == [IGNORED, 2, IGNORED, 11, 12, IGNORED]


def test_f02_positions_restart() -> None:
    assert positions_in(np.array([0, 0, 0, 1, 1, 2])).tolist() == [0, 1, 2, 0, 1, 0]
    assert positions_in(np.array([[7, 7, 8], [1, 2, 2]])).tolist() == [[0, 1, 0], [0, 0, 1]]


def test_f01_f02_f03_whole_documents_of_a_file(tmp_path: Path) -> None:
    source = WholeDocuments(Documents(write(tmp_path / "t", [3, 2])), 6)
    assert source.samples == 1
    sample = source.sample(0)
    assert sample.documents is not None
    assert sample.tokens.tolist() == [0, 1, EOD, 2, EOD, 0]
    assert sample.labels.tolist() == [1, EOD, IGNORED, EOD, IGNORED, IGNORED]
    assert positions_in(sample.documents).tolist() == [0, 1, 2, 0, 1, 0]


def test_masked_windows_cut_documents_but_keep_them_apart(tmp_path: Path) -> None:
    documents = Documents(write(tmp_path / "t", [3, 5, 2]))
    source = Windows(documents=documents, seq_len=4, samples=2, masked=True)
    first, second = source.sample(0), source.sample(1)
    assert first.tokens.tolist() == [0, 1, EOD, 2]
    assert first.documents is not None
    assert first.documents.tolist() == [0, 0, 0, 1]
    assert first.labels.tolist() == [1, EOD, IGNORED, 3]  # the last target is still of its document
    assert second.tokens.tolist() == [3, 4, 5, EOD]
    assert second.labels.tolist() == [4, 5, EOD, IGNORED]
    plain = Windows(documents=documents, seq_len=4, samples=2).sample(0)
    assert plain.documents is None
    assert plain.labels.tolist() == [1, EOD, 2, 3]


@pytest.mark.parametrize("masked", [False, True])
def test_prompts_are_not_targets_in_windows(tmp_path: Path, masked: bool) -> None:
    source = Windows(documents=Documents(write(tmp_path / "t", [4, 4], prompts=2)), seq_len=7, samples=1, masked=masked)
    assert source.sample(0).labels.tolist() == [IGNORED, 2, EOD, IGNORED, IGNORED, 5, EOD]


def test_prompts_are_not_targets_in_whole_documents(tmp_path: Path) -> None:
    source = WholeDocuments(Documents(write(tmp_path / "t", [4, 4], prompts=2)), 8)
    one = [IGNORED, None, EOD, IGNORED]
    labels = source.sample(0).labels.tolist()
    assert [label if wanted is not None else None for label, wanted in zip(labels, one * 2, strict=True)] == one * 2


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(2, 12))
def test_whole_documents_hold_every_target_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int
) -> None:
    file = write(tmp_path_factory.mktemp("whole") / "t", lengths)
    source = WholeDocuments(Documents(file), seq_len)
    pairs = []
    for index in range(source.samples):
        sample = source.sample(index)
        assert sample.documents is not None
        assert len(sample.tokens) == len(sample.labels) == len(sample.documents) == seq_len
        kept = sample.labels != IGNORED
        pairs += list(zip(sample.tokens[kept].tolist(), sample.labels[kept].tolist(), strict=True))
        inner = kept[:-1] & (sample.documents[1:] == sample.documents[:-1])
        assert (sample.labels[:-1][inner] == sample.tokens[1:][inner]).all()
    wanted = []
    for start, stop in zip(file.boundaries[:-1].tolist(), file.boundaries[1:].tolist(), strict=True):
        tokens = file.tokens(start, stop).tolist()
        wanted += pairwise(tokens)
    assert sorted(pairs) == sorted(wanted)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_best_fit_fills_bins_and_no_two_could_be_one(lengths: list[int]) -> None:
    bins = best_fit(np.array(lengths), 20)
    fill = np.bincount(bins, weights=lengths)
    assert fill.max() <= 20
    assert fill.min() > 0
    assert len(fill) == 1 or sum(sorted(fill)[:2]) > 20


def test_some_documents_read_as_if_the_others_were_not_there(tmp_path: Path) -> None:
    file = write(tmp_path / "t", [3, 2, 4, 2, 3], prompts=1)
    chosen = np.array([0, 2, 3])
    documents = Documents(file, chosen)
    joined = np.concatenate([file.tokens(int(file.boundaries[d]), int(file.boundaries[d + 1])) for d in chosen])
    assert len(documents) == 9
    for start in range(9):
        for stop in range(start + 1, 10):
            assert documents.tokens(start, stop).tolist() == joined[start:stop].tolist()
            counted = documents.counted(start, stop)
            assert counted is not None
            assert len(counted) == stop - start
    assert documents.numbers(2, 9).tolist() == [0, 1, 1, 1, 1, 2, 2]


def test_blend_keeps_its_weights_exactly_and_evenly() -> None:
    assert whole_weights([0.7, 0.3]) == (7, 3)
    assert whole_weights([2, 4.0, 1e-1]) == (20, 40, 1)
    ids = samples_at(np.arange(1000), seed=3, sizes=(50, 1000), weights=(7, 3))
    first = ids < 50
    for start in range(0, 1000, 10):
        assert first[start : start + 10].sum() == 7
    for stop in range(1, 1001):
        assert abs(first[:stop].sum() - 0.7 * stop) < 1
    drawn = ids[first]  # 700 draws from 50 samples: 14 epochs, each whole
    for epoch in range(14):
        assert sorted(drawn[epoch * 50 : (epoch + 1) * 50]) == list(range(50))
    assert len(set(ids[~first].tolist())) == 300


def test_blend_is_the_same_however_it_is_read() -> None:
    whole = samples_at(np.arange(200), seed=5, sizes=(7, 11, 13), weights=(1, 2, 3))
    parts = [samples_at(np.arange(s, s + 25), seed=5, sizes=(7, 11, 13), weights=(1, 2, 3)) for s in range(0, 200, 25)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    with pytest.raises(Refused, match="G302"):
        whole_weights([0.123456789, 1.0])


def test_blend_finds_the_sample_of_each_part() -> None:
    parts = (Synthetic(seed=0, vocab=9, seq_len=4, samples=3), Synthetic(seed=1, vocab=9, seq_len=4, samples=2))
    blend = Blend(parts=parts)
    assert (blend.samples, blend.seq_len) == (5, 4)
    assert blend.sample(3).tokens.tolist() == parts[1].sample(0).tokens.tolist()


def test_held_out_documents_are_disjoint_and_the_same_every_time(tmp_path: Path) -> None:
    file = write(tmp_path / "t", [4] * 50)
    kept, held = split(file, fraction=0.1, seed=1)
    kept_tokens, held_tokens = (set(d.tokens(0, len(d)).tolist()) - {EOD} for d in (kept, held))
    assert not kept_tokens & held_tokens
    assert len(kept_tokens | held_tokens) == 150
    assert len(held) == 20
    again, _ = split(file, fraction=0.1, seed=1)
    assert again.tokens(0, 50).tolist() == kept.tokens(0, 50).tolist()
    _, other = split(file, fraction=0.1, seed=2)
    assert other.tokens(0, 20).tolist() != held.tokens(0, 20).tolist()
    with pytest.raises(Refused, match="G303"):
        split(write(tmp_path / "one", [9]), fraction=0.5, seed=0)


def test_open_data_blends_and_holds_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, [9] * 20)
    paths = (str(tmp_path / "a"), str(tmp_path / "b"))
    found = open_data(Data(path=paths, weights=(3.0, 1.0), packing="whole", eval_fraction=0.1), vocab=1000, seq_len=9)
    assert isinstance(found.train, Blend)
    assert (found.train.weights, found.train.samples) == ((3, 1), 36)
    assert found.held_out is not None
    assert found.held_out.samples == 4
    separate = open_data(Data(path=paths[0], eval_path=paths[1]), vocab=1000, seq_len=9)
    assert separate.held_out is not None
    assert (separate.train.samples, separate.held_out.samples) == (19, 19)
    plain = open_data(Data(), vocab=9, seq_len=4)
    assert plain.held_out is None
    held = open_data(Data(eval_fraction=0.25), vocab=9, seq_len=4)
    assert held.held_out is not None
    assert held.train.samples + held.held_out.samples == plain.train.samples
    assert held.held_out.sample(0).tokens.tolist() == plain.train.sample(held.train.samples).tokens.tolist()


def test_f09_tokenizer_of_the_job_is_checked(tmp_path: Path) -> None:
    write(tmp_path / "t", [9] * 5)
    with pytest.raises(Refused, match="G204"):
        open_data(Data(path=str(tmp_path / "t"), tokenizer="byte"), vocab=256, seq_len=4)
    with pytest.raises(Refused, match="G205"):
        open_data(Data(path=str(tmp_path / "t")), vocab=999, seq_len=4)


def test_packed_synthetic_samples_keep_a_target_and_no_border() -> None:
    source = Synthetic(seed=0, vocab=50, seq_len=8, ignored=1.0, packed=True)
    plain = Synthetic(seed=0, vocab=50, seq_len=8)
    counts = set()
    for i in range(300):
        sample = source.sample(i)
        assert sample.documents is not None
        assert (sample.labels != IGNORED).any()
        border = np.flatnonzero(np.diff(sample.documents))
        assert (sample.labels[border] == IGNORED).all()
        kept = sample.labels != IGNORED
        assert (sample.labels[kept] == plain.sample(i).labels[kept]).all()
        counts.add(len(border) + 1)
    assert {2, 3, 4} <= counts <= {1, 2, 3, 4}
