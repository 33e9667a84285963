"""Text to token ids and back: bytes, a BPE trained on the input, or any `tokenizer.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardsmith.errors import Code

Tokens = npt.NDArray[np.int64]

END_OF_DOCUMENT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")  # noqa: RUF001
"""Names under which published tokenizers keep their end-of-document token, tried in this order."""

BYTES = 256

UNKNOWN_TOKENIZER = Code(
    code="G101",
    title="unknown tokenizer",
    because="a tokenizer is `byte`, `bpe:VOCAB`, a tokenizer.json, or a folder that holds one",
)
SMALL_VOCABULARY = Code(
    code="G102",
    title="vocabulary smaller than the bytes",
    because="a byte-level BPE holds all 256 bytes and one end-of-document token before any merge",
)
NO_LIBRARY = Code(
    code="G103",
    title="tokenizers is not installed",
    because="training a BPE and reading a tokenizer.json is done by the `tokenizers` library",
)
BAD_TOKENIZER = Code(
    code="G104",
    title="not a tokenizer file",
    because="the file must be a tokenizer.json as the `tokenizers` library writes it",
)
NO_END = Code(
    code="G105",
    title="no end-of-document token",
    because="every document is followed by one token that says so, and its name differs between tokenizers",
)


class Tokenizer(Protocol):
    """What turns text into ids in [0, vocab) and back; the id `eod` ends a document."""

    @property
    def name(self) -> str:
        """What a person calls it: `byte`, `bpe:VOCAB`, or the path of its file."""

    @property
    def vocab(self) -> int:
        """The largest id that can occur, plus one; added tokens included."""

    @property
    def eod(self) -> int:
        """Id of the end-of-document token."""

    @property
    def eod_token(self) -> str | None:
        """Text of the end-of-document token; None where it has none."""

    def encode(self, texts: Sequence[str], *, markup: bool = False) -> list[Tokens]:
        """Ids of each text; nothing is added, cut or padded.

        Special tokens that a text mentions stay text, unless it is `markup`.
        """

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ids; special tokens and ids that the tokenizer does not know are left out."""


def open_tokenizer(name: str, *, eod: str | None = None) -> Tokenizer:
    """The tokenizer called `byte`, or the one in a tokenizer.json or a folder with one.

    `eod` names the end-of-document token of a tokenizer.json; without it, the `eos_token` of a
    tokenizer_config.json beside it, then `KNOWN_ENDS`. Raises `Refused` (G101, G103, G104, G105).
    """
    if name == "byte":
        if eod is not None:
            raise NO_END.refuse(
                "the byte tokenizer has its own end-of-document id",
                ("--eod", f"eod = {eod}"),
                hint=f"leave --eod out: the id is {BYTES}",
            )
        return ByteTokenizer()
    path = Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise UNKNOWN_TOKENIZER.refuse(
            f"no tokenizer {name!r}", ("tokenizer", f"{path} is not a file"), hint="byte, bpe:4096, or a path"
        )
    raw, content = _load(path)
    return _wrap(raw, content=content, name=str(path), eod=eod or _configured_end(path))


def bpe_vocab(name: str) -> int | None:
    """The VOCAB of `bpe:VOCAB`, or None for any other tokenizer. Raises `Refused` (G101, G102)."""
    head, _, size = name.partition(":")
    if head != "bpe":
        return None
    if not size.isdecimal():
        raise UNKNOWN_TOKENIZER.refuse(
            f"{name!r} does not say how large its vocabulary is", ("tokenizer", name), hint="bpe:4096"
        )
    if int(size) <= BYTES:
        raise SMALL_VOCABULARY.refuse(
            f"a vocabulary of {size} does not hold the bytes",
            ("tokenizer", f"vocabulary = {size}"),
            ("byte-level BPE", f"at least {BYTES + 1}"),
            hint=f"bpe:{BYTES + 1} or more, or byte",
        )
    return int(size)


def train_bpe(texts: Iterator[str], *, vocab: int, eod: str | None = None) -> JsonTokenizer:
    """A byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) of at most `vocab` ids, a function of `texts` alone.

    Texts are counted as they come and are not kept. The end-of-document token has id 0; a small
    input ends with fewer ids than asked for. Raises `Refused` (G103).
    """
    library = _library()
    end = eod or END_OF_DOCUMENT
    raw = library.Tokenizer(library.models.BPE())
    raw.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[end],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    return _wrap(raw, content=raw.to_str(pretty=True).encode(), name=f"bpe:{vocab}", eod=end)


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """UTF-8 bytes are the ids 0..255, the end of a document is 256."""

    name: str = "byte"
    vocab: int = BYTES + 1
    eod: int = BYTES
    eod_token: str | None = None

    def encode(self, texts: Sequence[str], *, markup: bool = False) -> list[Tokens]:
        """The UTF-8 bytes of each text; no text stands for the end of a document."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of the ids below 256; byte runs that are not UTF-8 show as U+FFFD."""
        return bytes(t for t in tokens if 0 <= t < BYTES).decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class JsonTokenizer:
    """A tokenizer of the `tokenizers` library. `vocab` counts up to the largest id, added tokens included.

    `content` is its tokenizer.json, byte for byte.
    """

    name: str
    vocab: int
    eod: int
    eod_token: str
    content: bytes = field(repr=False)
    raw: Any = field(repr=False)

    def encode(self, texts: Sequence[str], *, markup: bool = False) -> list[Tokens]:
        """Ids of each text, without the tokens a model's template would add."""
        self.raw.encode_special_tokens = not markup  # a document that mentions <|endoftext|> does not end there
        found = self.raw.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int64) for one in found]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of the ids, special tokens left out."""
        text: str = self.raw.decode([t for t in tokens if 0 <= t < self.vocab], skip_special_tokens=True)
        return text


def fingerprint(content: bytes) -> str:
    """A hash of the content of a tokenizer.json, to notice another one in its place."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise NO_LIBRARY.refuse(
            "the library `tokenizers` is missing", hint="pip install 'shardsmith[train]', or --tokenizer byte"
        ) from None
    return tokenizers


def _load(path: Path) -> tuple[Any, bytes]:
    library = _library()
    try:
        content = path.read_bytes()
        return library.Tokenizer.from_str(content.decode()), content
    except Exception as error:  # the library raises bare Exception
        raise BAD_TOKENIZER.refuse(
            f"{path} cannot be read as a tokenizer", ("tokenizers", str(error)), hint="name a tokenizer.json"
        ) from None


def _configured_end(path: Path) -> str | None:
    """`eos_token` of the tokenizer_config.json beside `path`: a string, or a table whose `content` is one."""
    config = path.with_name("tokenizer_config.json")
    try:
        end = json.loads(config.read_text(encoding="utf-8"))["eos_token"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None


def _wrap(raw: Any, *, content: bytes, name: str, eod: str | None) -> JsonTokenizer:
    raw.no_truncation()
    raw.no_padding()
    ids: dict[str, int] = raw.get_vocab(with_added_tokens=True)
    end = eod if eod is not None else next((known for known in KNOWN_ENDS if known in ids), None)
    if end is None or end not in ids:
        added = sorted(str(token.content) for token in raw.get_added_tokens_decoder().values())
        raise NO_END.refuse(
            f"{name} has no token {end!r}" if end else f"{name} has none of the usual end-of-document tokens",
            (name, "added tokens: " + (", ".join(added[:20]) or "none")),
            hint=f"--eod '{added[0]}'" if added else "--eod TOKEN, with a token of that tokenizer",
        )
    vocab = max(ids.values()) + 1
    return JsonTokenizer(name=name, vocab=vocab, eod=ids[end], eod_token=end, content=content, raw=raw)
