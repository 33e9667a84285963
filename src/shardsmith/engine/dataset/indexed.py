"""Token files: a `.bin` of ids and an `.idx` of where sequences and documents stand, as Megatron-LM reads them.

Layout of the index, little endian: magic (9 bytes), version 1 (uint64), dtype code (uint8), number of
sequences (uint64), number of document borders (uint64), then tokens per sequence (int32), byte offset per
sequence (int64), and the borders (int64): document d is the sequences [border d, border d + 1).
A third file of ours, `.mask.bin`, has one byte a token: 1 for a target, 0 for what is only read (prompts).
Checked against `megatron.core.datasets.indexed_dataset` of megatron-core 0.16.1.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import MISSING as MISSING_VALUE
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from shardsmith.engine.dataset.tokenizer import Tokenizer, fingerprint, open_tokenizer
from shardsmith.errors import Code, Fault
from shardsmith.units import counted

Ints = npt.NDArray[np.int64]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Integer dtypes by their code; 6 and 7 are floating point and hold no token ids."""

LONGEST_SEQUENCE = 2**31 - 1
"""Tokens that one int32 size can state; a longer document takes several sequences."""

_SCAN = 2**24

MISSING = Code(
    code="G201",
    title="token file missing",
    because="tokens are a pair of files: PREFIX.bin (ids) and PREFIX.idx (where documents stand)",
)
NOT_TOKENS = Code(
    code="G202",
    title="not a token file",
    because="the index must begin with the header of the indexed format, version 1, with an integer dtype",
)
DAMAGED = Code(
    code="G203",
    title="token file damaged",
    because="the index says how long both files are; a file of another length was truncated or does not belong to it",
)
TOKENIZER_TOO_LARGE = Code(
    code="G204",
    title="tokenizer larger than the model's vocabulary",
    because="every id that the tokenizer can give, added tokens included, needs a row of the embedding table",
)
ID_TOO_LARGE = Code(
    code="G205",
    title="token id beyond the model's vocabulary",
    because="an id without a row in the embedding table fails deep inside a run, or reads a wrong row",
)

NO_TOKENIZER = Code(
    code="G206",
    title="tokenizer of the data unknown",
    because="text can be made of ids only by the tokenizer that made them, which PREFIX.json names",
)


def dtype_for(vocab: int) -> np.dtype[np.generic]:
    """uint16 below 65,500 ids, else int32: the choice that Megatron-LM makes."""
    return np.dtype("<u2" if vocab < 65500 else "<i4")


def index_bytes(sizes: Sequence[int], borders: Sequence[int], dtype: np.dtype[np.generic]) -> bytes:
    """The whole `.idx` file: tokens per sequence, and borders of documents counted in sequences, from 0."""
    counts = np.asarray(sizes, dtype="<i8")
    offsets = np.zeros(len(counts), dtype="<i8")
    np.cumsum(counts[:-1] * dtype.itemsize, out=offsets[1:])
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
    header = HEADER.pack(MAGIC, VERSION, code, len(counts), len(borders))
    return header + counts.astype("<i4").tobytes() + offsets.tobytes() + np.asarray(borders, dtype="<i8").tobytes()


def prefix_of(path: str | Path) -> Path:
    """The common prefix of a token file, from the prefix itself or from one of its two files."""
    path = Path(path).expanduser()
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def beside(prefix: Path, ending: str) -> Path:
    """The file of a prefix with an ending (`.bin`, `.idx`, `.mask.bin`, `.json`); dots inside the prefix are kept."""
    return prefix.with_name(prefix.name + ending)


def check_vocabulary(
    *, file: TokenFile | None, tokenizer: Tokenizer | None, vocab: int, source: str = "model"
) -> list[Fault]:
    """Faults if the tokenizer (G204) or an id in the file (G205) needs more than `vocab` embedding rows.

    The largest id comes from the sidecar where it belongs to the file, else from a scan of the file.
    `source` says where `vocab` was stated.
    """
    faults = []
    mine = (source, f"vocab = {vocab}")
    if tokenizer is not None and tokenizer.vocab > vocab:
        faults.append(
            TOKENIZER_TOO_LARGE.fault(
                f"the tokenizer has {tokenizer.vocab} ids, the model {vocab}",
                (f"tokenizer {tokenizer.name}", f"vocab = {tokenizer.vocab}"),
                mine,
                hint=f"vocab = {tokenizer.vocab}",
            )
        )
    if file is not None and file.max_id() >= vocab:
        faults.append(
            ID_TOO_LARGE.fault(
                f"the data holds the id {file.max_id()}, the model ends at {vocab - 1}",
                (str(file.prefix), f"largest id = {file.max_id()}"),
                mine,
                hint=f"vocab = {file.max_id() + 1} or more, or prepare the data with this model's tokenizer",
            )
        )
    return faults


def tokenizer_of(file: TokenFile) -> Tokenizer:
    """The tokenizer that made `file`, as its sidecar names it.

    Raises `Refused`: G206 where that is unknown or another file took its place, and as `open_tokenizer`.
    """
    meta = file.meta
    if meta is None:
        raise NO_TOKENIZER.refuse(
            f"{file.prefix} does not say which tokenizer made it",
            ("sidecar", f"{beside(file.prefix, '.json')} is missing or unreadable"),
            hint="data.tokenizer in the job file names one",
        )
    if meta.tokenizer_file is None:
        return open_tokenizer(meta.tokenizer)
    path = file.prefix.parent / meta.tokenizer_file
    found = open_tokenizer(str(path), eod=meta.eod_token)
    if fingerprint(path.read_bytes()) != meta.fingerprint:
        raise NO_TOKENIZER.refuse(
            f"{path} is not the tokenizer that made {file.prefix}",
            (str(beside(file.prefix, ".json")), f"fingerprint = {meta.fingerprint}"),
            (str(path), f"fingerprint = {fingerprint(path.read_bytes())}"),
            hint="put the old file back, or prepare the data again",
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What `PREFIX.json` says about a token file that the format itself cannot.

    `tokenizer` is its name; `tokenizer_file` its tokenizer.json, relative to the token file, with the
    `fingerprint` it had; `bytes` counts the input text. `targets` counts the tokens that `PREFIX.mask.bin`
    marks as targets; None where there is no mask, since all are.
    """

    tokenizer: str
    tokenizer_file: str | None
    fingerprint: str | None
    eod: int
    eod_token: str | None
    vocab: int
    max_id: int
    documents: int
    tokens: int
    bytes: int
    targets: int | None = None

    def dumps(self) -> str:
        """The content of the file."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_meta(prefix: Path) -> Meta | None:
    """The sidecar of a token file, or None where there is none that can be read (files of other tools)."""
    try:
        table = json.loads(beside(prefix, ".json").read_text(encoding="utf-8"))
        return Meta(**{f.name: table[f.name] for f in fields(Meta) if f.default is MISSING_VALUE or f.name in table})
    except (OSError, ValueError, KeyError, TypeError):
        return None


class TokenWriter:
    """Writes ids to an open `.bin` as they come and keeps what the index needs: one size per document.

    The first ids that are no targets open the mask at `mask`: one byte a token, 1 for a target.
    """

    def __init__(self, stream: BinaryIO, dtype: np.dtype[np.generic], mask: Path | None = None) -> None:
        self.stream, self.dtype, self.mask = stream, dtype, mask
        self.sizes, self.borders = array("q"), array("q", [0])
        self.max_id, self.tokens, self.targets, self._open = -1, 0, 0, 0
        self._mask: BinaryIO | None = None

    def add(self, tokens: Ints, *, target: bool = True) -> None:
        """Append ids to the current document; `target` says whether a model learns to predict them."""
        if not len(tokens):
            return
        self.max_id = max(self.max_id, int(tokens.max()))
        assert int(tokens.min()) >= 0, "ids are not negative"
        assert self.max_id < 2 ** (16 if self.dtype.itemsize == 2 else 31), "an id does not fit the dtype"
        self.stream.write(tokens.astype(self.dtype).tobytes())
        if self._mask is None and not target:
            assert self.mask is not None, "this writer keeps no mask"
            self._mask = self.mask.open("wb")
            for at in range(0, self.tokens, _SCAN):
                self._mask.write(b"\1" * min(_SCAN, self.tokens - at))
        if self._mask is not None:
            self._mask.write((b"\1" if target else b"\0") * len(tokens))
        self._open += len(tokens)
        self.tokens += len(tokens)
        self.targets += len(tokens) * target

    def end_document(self, eod: int, *, target: bool = True) -> None:
        """Append the end-of-document token and close the current document."""
        self.add(np.array([eod], dtype=np.int64), target=target)
        while self._open > LONGEST_SEQUENCE:
            self.sizes.append(LONGEST_SEQUENCE)
            self._open -= LONGEST_SEQUENCE
        self.sizes.append(self._open)
        self.borders.append(len(self.sizes))
        self._open = 0

    def close(self) -> None:
        """Finish the mask, if one was begun."""
        if self._mask is not None:
            self._mask.close()

    @property
    def masked(self) -> bool:
        """Whether some ids are no targets, so that there is a mask."""
        return self._mask is not None

    def index(self) -> bytes:
        """The `.idx` that belongs to what was written."""
        assert self._open == 0, "the last document was not ended"
        return index_bytes(self.sizes, self.borders, self.dtype)


class TokenFile:
    """A token file on disk, memory-mapped: ids of all documents one after another.

    `len()` counts tokens; document d holds the tokens [boundaries[d], boundaries[d + 1]). `path` is the
    common prefix, or either file. Raises `Refused`: G201 missing, G202 not this format, G203 damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.prefix = prefix_of(path)
        index, data = beside(self.prefix, ".idx"), beside(self.prefix, ".bin")
        for file in (index, data):
            if not file.is_file():
                raise MISSING.refuse(
                    f"{file} does not exist", ("data", str(path)), hint="shardsmith prepare TEXT --out PREFIX"
                )
        self.dtype, sizes, borders = _read_index(index)
        self.boundaries: Ints = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])[borders]
        _check_length(data, int(self.boundaries[-1]) * self.dtype.itemsize, f"tokens of {index.name}")
        if not len(self):
            raise DAMAGED.refuse(f"{self.prefix} holds no token", (str(index), "tokens = 0"))
        self._ids = np.memmap(data, dtype=self.dtype, mode="r")
        self.meta = read_meta(self.prefix)
        self._mask = self._open_mask()
        self._max_id: int | None = None

    def __len__(self) -> int:
        return int(self.boundaries[-1])

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.boundaries) - 1

    def tokens(self, start: int, stop: int) -> Ints:
        """A copy of the ids [start, stop), counted over all documents; int64."""
        assert 0 <= start <= stop <= len(self), f"tokens [{start}, {stop}) of {len(self)}"
        return self._ids[start:stop].astype(np.int64)

    @property
    def masked(self) -> bool:
        """Whether only some tokens are targets."""
        return self._mask is not None

    def counted(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which of the ids [start, stop) are targets."""
        return np.ones(stop - start, dtype=bool) if self._mask is None else self._mask[start:stop] != 0

    def _open_mask(self) -> npt.NDArray[np.uint8] | None:
        path = beside(self.prefix, ".mask.bin")
        if path.is_file():
            _check_length(path, len(self), f"tokens of {self.prefix.name}.idx")
            return np.memmap(path, dtype=np.uint8, mode="r")
        if self.meta is not None and self.meta.targets is not None and self.meta.tokens == len(self):
            raise MISSING.refuse(
                f"{path} does not exist: without it prompts would be learnt like answers",
                (
                    str(beside(self.prefix, ".json")),
                    f"targets = {self.meta.targets} of {self.meta.tokens} tokens",
                ),
                hint="copy it beside the others, or prepare the data again",
            )
        return None

    def max_id(self) -> int:
        """The largest id: from the sidecar if it counts the same tokens, else scanned once."""
        if self._max_id is None:
            if self.meta is not None and self.meta.tokens == len(self):
                self._max_id = self.meta.max_id
            else:
                self._max_id = max(int(self._ids[at : at + _SCAN].max()) for at in range(0, len(self), _SCAN))
        return self._max_id


def _read_index(path: Path) -> tuple[np.dtype[np.generic], npt.NDArray[np.int32], Ints]:
    """Dtype, tokens per sequence and document borders; refuses what is not whole and consistent."""
    raw = path.read_bytes()
    if not raw.startswith(MAGIC):
        raise NOT_TOKENS.refuse(f"{path} does not begin with {MAGIC!r}", (str(path), f"begins with {raw[:9]!r}"))
    if len(raw) < HEADER.size:
        raise _wrong_length(path, len(raw), HEADER.size, "the header alone")
    _, version, code, sequences, borders_count = HEADER.unpack_from(raw)
    if version != VERSION or code not in DTYPES:
        raise NOT_TOKENS.refuse(
            f"{path} has version {version} and dtype code {code}",
            ("this reader", f"version {VERSION}, dtype codes {', '.join(map(str, DTYPES))}"),
        )
    _check_length(
        path, HEADER.size + 12 * sequences + 8 * borders_count, f"{counted(sequences, 'sequence')} in its header"
    )
    sizes = np.frombuffer(raw, "<i4", sequences, HEADER.size)
    offsets = np.frombuffer(raw, "<i8", sequences, HEADER.size + 4 * sequences)
    borders = np.frombuffer(raw, "<i8", borders_count, HEADER.size + 12 * sequences)
    dtype = np.dtype(DTYPES[code])
    ends = np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
    whole = borders_count > 0 and borders[0] == 0 and borders[-1] == sequences and bool((np.diff(borders) >= 0).all())
    if not whole or (sizes < 0).any() or (offsets != ends - sizes.astype(np.int64) * dtype.itemsize).any():
        raise DAMAGED.refuse(
            f"{path} contradicts itself",
            (str(path), f"{counted(sequences, 'sequence')}, {counted(borders_count, 'border')}"),
            hint="sequences must stand one after another and documents cover them all; prepare the data again",
        )
    return dtype, sizes, borders


def _check_length(path: Path, wanted: int, according_to: str) -> None:
    if path.stat().st_size != wanted:
        raise _wrong_length(path, path.stat().st_size, wanted, according_to)


def _wrong_length(path: Path, found: int, wanted: int, according_to: str) -> Exception:
    return DAMAGED.refuse(
        f"{path} has {counted(found, 'byte')} instead of {wanted}",
        (str(path), f"{counted(found, 'byte')}"),
        (according_to, f"{counted(wanted, 'byte')}"),
        hint="copy both files again, or prepare the data again",
    )
