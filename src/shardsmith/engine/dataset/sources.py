"""Where text comes from: finding files in a fixed order and reading them piece by piece."""

from __future__ import annotations

import codecs
import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardsmith.errors import Code, Fault, raise_errors

TEXT_PATTERNS = (
    *("*.txt", "*.text", "*.md", "*.rst", "*.org", "*.tex", "*.html", "*.xml", "*.toml", "*.yaml"),
    *("*.py", "*.pyi", "*.c", "*.h", "*.cc", "*.cpp", "*.hpp", "*.cu", "*.rs", "*.go", "*.js", "*.ts"),
    *("*.java", "*.rb", "*.sh", "*.sql", "*.jsonl", "*.parquet"),
)
"""What is read of a folder when no pattern is given: endings of files that hold text or records of it."""

PIECE = 2**16
"""Characters of a piece. A longer document is cut before a space, where byte-level BPE patterns cut in any case;
a tokenizer that marks the start of its input (SentencePiece style) marks each piece."""

_SNIFF = 8192

NO_INPUT = Code(
    code="G001",
    title="no such input",
    because="every input must name a file, a folder or a pattern that matches one; a misspelt one would go unnoticed",
)
NO_TEXT = Code(code="G002", title="no text", because="without a single document of text there is nothing to prepare")
UNREADABLE = Code(
    code="G003",
    title="unreadable input",
    because="leaving out a file that was asked for would change the data silently",
)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One file: its first `size` bytes are read; `cut` says that the file goes on behind them."""

    path: Path
    size: int
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A file that was found and not read, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The documents in the order they are read, and the files left out."""

    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...]

    @property
    def size(self) -> int:
        """Bytes of all documents."""
        return sum(document.size for document in self.documents)


@dataclass
class Tally:
    """What was read so far: `read` bytes of files, which held `text` bytes of text.

    `replaced` counts runs of bytes that were not UTF-8, in `malformed` files; `empty` records without text.
    """

    read: int = 0
    text: int = 0
    replaced: int = 0
    malformed: int = 0
    empty: int = 0


def find(
    inputs: Sequence[str], *, patterns: Sequence[str] = (), limit: int | None = None, exclude: Sequence[Path] = ()
) -> Corpus:
    """All text files that `inputs` name, each once: inputs in the order given, files of a folder or pattern sorted.

    Folders are walked without hidden folders and links to folders, taking what matches `patterns`
    (default `TEXT_PATTERNS`). Empty files and files with a NUL byte near the start (binary, or text that
    is not UTF-8; Parquet aside) are skipped and listed. `limit` bounds the bytes: the last document is cut there.
    Raises `Refused` (G001, G002, G003), with all faults at once.
    """
    faults: list[Fault] = []
    found: dict[Path, Path] = {}
    for entry in inputs:
        matches = _expand(entry, patterns or TEXT_PATTERNS)
        if not matches:
            faults.append(_nothing_at(entry, patterns))
        for path in matches:
            found.setdefault(path.resolve(), path)
    documents: list[Document] = []
    skipped: list[Skipped] = []
    left = limit
    for resolved, path in found.items():
        if left == 0:
            break
        try:
            reason = "is an output" if resolved in exclude else _unfit(path)
            size = path.stat().st_size
        except OSError as error:
            faults.append(unreadable(path, error))
            continue
        if reason:
            skipped.append(Skipped(path=path, reason=reason))
            continue
        taken = size if left is None else min(size, left)
        left = None if left is None else left - taken
        documents.append(Document(path=path, size=taken, cut=taken < size))
    raise_errors(faults)
    if not documents:
        reasons = tuple((str(s.path), s.reason) for s in skipped[:5])
        raise NO_TEXT.refuse("none of the inputs holds text", *reasons, hint="name files of UTF-8 text")
    return Corpus(documents=tuple(documents), skipped=tuple(skipped))


def pieces(document: Document, *, tally: Tally, size: int = PIECE) -> Iterator[str]:
    """The text of a document in pieces of at most `size` characters, which joined are the text.

    A byte order mark is dropped; bytes that are not UTF-8 become U+FFFD and are counted in `tally`.
    A character that the end of a cut document splits is left out. Raises `Refused` (G003).
    """
    text = ""
    for block in _decoded(document, tally, size):
        text += block
        while len(text) > size:
            at = border(text, size)
            yield text[:at]
            text = text[at:]
    if text:
        yield text


def _decoded(document: Document, tally: Tally, block: int) -> Iterator[str]:
    left, rest, first, replaced = document.size, b"", True, 0
    try:
        with document.path.open("rb") as stream:
            while left:
                raw = stream.read(min(block, left))
                left = left - len(raw) if raw else 0
                tally.read += len(raw)
                tally.text += len(raw)
                text, used, wrong = decode(rest + raw, final=not left and not document.cut)
                rest = (rest + raw)[used:]
                replaced += wrong
                yield text.removeprefix("\ufeff") if first else text
                first = first and not text
    except OSError as error:
        raise_errors([unreadable(document.path, error)])
    tally.replaced += replaced
    tally.malformed += replaced > 0


def decode(raw: bytes, *, final: bool) -> tuple[str, int, int]:
    """Text, bytes used, and how many U+FFFD stand for bytes that are not UTF-8 (and not for U+FFFD itself)."""
    try:
        text, used = codecs.utf_8_decode(raw, "strict", final)
        return text, used, 0
    except UnicodeDecodeError:
        text, used = codecs.utf_8_decode(raw, "replace", final)
        return text, used, text.count("\ufffd") - raw[:used].count("\ufffd".encode())


def border(text: str, size: int) -> int:
    """The last place up to `size` before a space that follows a non-space, else `size`.

    There a word with its leading space begins, so the GPT-2 and Llama 3 word patterns cut there in any case.
    """
    at = text.rfind(" ", 0, size + 1)
    while at > 0:
        if not text[at - 1].isspace():
            return at
        at = text.rfind(" ", 0, at)
    return size


def _expand(entry: str, patterns: Sequence[str]) -> list[Path]:
    path = Path(entry).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return _walk(path, patterns)
    out: list[Path] = []
    for match in sorted(glob.glob(str(path), recursive=True)):
        out.extend(_walk(Path(match), patterns) if Path(match).is_dir() and "**" not in entry else [Path(match)])
    return [found for found in out if found.is_file()]


def _walk(folder: Path, patterns: Sequence[str]) -> list[Path]:
    out = []
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            relative = (Path(at) / name).relative_to(folder).as_posix()
            if any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(relative, p) for p in patterns):
                out.append(Path(at) / name)
    return sorted(path for path in out if path.is_file())


def _unfit(path: Path) -> str:
    with path.open("rb") as stream:
        head = stream.read(_SNIFF)
    if not head:
        return "is empty"
    binary = b"\0" in head and path.suffix != ".parquet"
    return "is not UTF-8 text (it holds NUL bytes)" if binary else ""


def _nothing_at(entry: str, patterns: Sequence[str]) -> Fault:
    path = Path(entry).expanduser()
    if path.is_dir():
        shown = ", ".join(patterns) if patterns else "endings of text files"
        return NO_INPUT.fault(
            f"nothing in the folder {entry} matches",
            ("--glob" if patterns else "patterns", shown),
            hint="--glob '*' takes every file",
        )
    what = "matches no file" if glob.has_magic(entry) else "does not exist"
    return NO_INPUT.fault(f"{entry} {what}", ("inputs", entry), hint="a file, a folder, or a quoted pattern")


def unreadable(path: Path, error: Exception) -> Fault:
    """The fault (G003) of a file whose reading failed with `error`."""
    return UNREADABLE.fault(f"{path} cannot be read", ("system", getattr(error, "strerror", None) or str(error)))
