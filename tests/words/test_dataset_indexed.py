"""Token files: the layout byte for byte, and what is refused."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest

from shardsmith.engine.dataset import indexed
from shardsmith.engine.dataset.indexed import (
    Meta,
    TokenFile,
    TokenWriter,
    beside,
    check_vocabulary,
    dtype_for,
    prefix_of,
)
from shardsmith.engine.dataset.tokenizer import JsonTokenizer
from shardsmith.errors import Refused


def write(folder: Path, documents: list[list[int]], *, eod: int = 99, vocab: int = 100) -> Path:
    prefix = folder / "tokens"
    with beside(prefix, ".bin").open("wb") as stream:
        writer = TokenWriter(stream, dtype_for(vocab))
        for document in documents:
            writer.add(np.array(document, dtype=np.int64))
            writer.end_document(eod)
    beside(prefix, ".idx").write_bytes(writer.index())
    return prefix


def code_of(prefix: Path) -> str:
    with pytest.raises(Refused) as refused:
        TokenFile(prefix)
    return refused.value.faults[0].code


def test_layout_byte_for_byte(tmp_path: Path) -> None:
    prefix = write(tmp_path, [[1, 2, 515], [7]])
    assert beside(prefix, ".bin").read_bytes() == bytes.fromhex("0100 0200 0302 6300 0700 6300")
    by_hand = (
        "4d4d494449445800 00"  # MMIDIDX and two zero bytes
        "0100000000000000"  # version 1
        "08"  # uint16
        "0200000000000000"  # two sequences
        "0300000000000000"  # three borders
        "04000000 02000000"  # 4 and 2 tokens
        "0000000000000000 0800000000000000"  # at bytes 0 and 8
        "0000000000000000 0100000000000000 0200000000000000"  # documents begin at sequences 0 and 1, end at 2
    )
    assert beside(prefix, ".idx").read_bytes() == bytes.fromhex(by_hand)


@pytest.mark.parametrize(("vocab", "code", "item"), [(65499, 8, 2), (65500, 4, 4), (200_000, 4, 4)])
def test_dtype_follows_the_vocabulary(tmp_path: Path, vocab: int, code: int, item: int) -> None:
    prefix = write(tmp_path, [[vocab - 1, 0]], vocab=vocab)
    assert beside(prefix, ".idx").read_bytes()[17] == code
    assert beside(prefix, ".bin").stat().st_size == 3 * item
    assert TokenFile(prefix).tokens(0, 3).tolist() == [vocab - 1, 0, 99]


def test_round_trip(tmp_path: Path) -> None:
    file = TokenFile(write(tmp_path, [[1, 2, 3], [], [4]]))
    assert (len(file), file.documents) == (7, 3)
    assert file.boundaries.tolist() == [0, 4, 5, 7]
    assert file.tokens(0, 7).tolist() == [1, 2, 3, 99, 99, 4, 99]
    assert file.tokens(2, 6).tolist() == [3, 99, 99, 4]
    assert file.tokens(5, 5).tolist() == []
    assert file.max_id() == 99


def test_long_document_takes_several_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "LONGEST_SEQUENCE", 3)
    prefix = write(tmp_path, [[1, 2, 3, 4, 5, 6], [7]])
    file = TokenFile(prefix)
    assert struct.unpack_from("<QQ", beside(prefix, ".idx").read_bytes(), 18) == (4, 3)
    assert file.boundaries.tolist() == [0, 7, 9]
    assert file.tokens(0, 9).tolist() == [1, 2, 3, 4, 5, 6, 99, 7, 99]


def test_prefix_of_either_file() -> None:
    assert prefix_of("a/b.bin") == prefix_of("a/b.idx") == prefix_of("a/b") == Path("a/b")
    assert beside(prefix_of("a/v1.2.bin"), ".idx") == Path("a/v1.2.idx")


def test_missing_files_refused(tmp_path: Path) -> None:
    assert code_of(tmp_path / "nothing") == "G201"
    prefix = write(tmp_path, [[1]])
    beside(prefix, ".bin").unlink()
    assert code_of(prefix) == "G201"


@pytest.mark.parametrize("ending", [".bin", ".idx"])
@pytest.mark.parametrize("change", [-1, 1])
def test_truncated_or_longer_files_refused(tmp_path: Path, ending: str, change: int) -> None:
    prefix = write(tmp_path, [[1, 2, 3], [4]])
    raw = beside(prefix, ending).read_bytes()
    beside(prefix, ending).write_bytes(raw[:change] if change < 0 else raw + b"\0")
    with pytest.raises(Refused) as refused:
        TokenFile(prefix)
    fault = refused.value.faults[0]
    assert fault.code == "G203"
    assert f"{len(raw) + change} bytes instead of {len(raw)}" in fault.message


def test_index_cut_inside_its_header_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path, [[1]])
    beside(prefix, ".idx").write_bytes(beside(prefix, ".idx").read_bytes()[:20])
    assert code_of(prefix) == "G203"


@pytest.mark.parametrize(("at", "byte", "code"), [(0, b"X", "G202"), (9, b"\2", "G202"), (17, b"\6", "G202")])
def test_other_formats_refused(tmp_path: Path, at: int, byte: bytes, code: str) -> None:
    prefix = write(tmp_path, [[1, 2, 3], [4]])
    raw = bytearray(beside(prefix, ".idx").read_bytes())
    raw[at : at + 1] = byte
    beside(prefix, ".idx").write_bytes(raw)
    assert code_of(prefix) == code


@pytest.mark.parametrize("at", [42, 58])  # the offset of sequence 0; the first border
def test_contradicting_index_refused(tmp_path: Path, at: int) -> None:
    prefix = write(tmp_path, [[1, 2, 3], [4]])
    raw = bytearray(beside(prefix, ".idx").read_bytes())
    raw[at] = 1
    beside(prefix, ".idx").write_bytes(raw)
    assert code_of(prefix) == "G203"


def test_no_token_at_all_refused(tmp_path: Path) -> None:
    prefix = tmp_path / "tokens"
    beside(prefix, ".bin").write_bytes(b"")
    beside(prefix, ".idx").write_bytes(TokenWriter(io.BytesIO(), dtype_for(9)).index())
    assert code_of(prefix) == "G203"


def test_f09_vocabulary_too_small_names_both_numbers(tmp_path: Path) -> None:
    # 10 base ids and 2 added tokens against 10 embedding rows; the data holds the id 11.
    tokenizer = JsonTokenizer(name="t", vocab=12, eod=11, eod_token="<e>", content=b"", raw=None)
    file = TokenFile(write(tmp_path, [[1, 2]], eod=11, vocab=12))
    faults = check_vocabulary(file=file, tokenizer=tokenizer, vocab=10)
    assert [f.code for f in faults] == ["G204", "G205"]
    assert "12 ids" in faults[0].message
    assert "10" in faults[0].message
    assert "the id 11" in faults[1].message
    assert check_vocabulary(file=file, tokenizer=tokenizer, vocab=12) == []
    assert [f.code for f in check_vocabulary(file=file, tokenizer=None, vocab=11)] == ["G205"]


def test_largest_id_from_the_sidecar_only_if_it_counts_these_tokens(tmp_path: Path) -> None:
    prefix = write(tmp_path, [[1, 2]], eod=11, vocab=12)

    def largest(tokens: int) -> int:
        meta = Meta(
            tokenizer="byte",
            tokenizer_file=None,
            fingerprint=None,
            eod=11,
            eod_token=None,
            vocab=12,
            max_id=5,
            documents=1,
            tokens=tokens,
            bytes=2,
        )
        beside(prefix, ".json").write_text(meta.dumps())
        return TokenFile(prefix).max_id()

    assert largest(3) == 5
    assert largest(4) == 11
    beside(prefix, ".json").write_text("[1, 2")
    assert TokenFile(prefix).max_id() == 11
