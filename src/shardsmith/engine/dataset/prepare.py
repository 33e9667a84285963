"""`prepare`: text files to a token file, in one pass over the text (two where a BPE is trained)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardsmith.engine.dataset.indexed import Meta, TokenWriter, beside, dtype_for, prefix_of
from shardsmith.engine.dataset.records import TURN, Form, Piece, read
from shardsmith.engine.dataset.sources import NO_TEXT, PIECE, Corpus, Skipped, Tally, find
from shardsmith.engine.dataset.tokenizer import (
    JsonTokenizer,
    Tokenizer,
    Tokens,
    bpe_vocab,
    fingerprint,
    open_tokenizer,
    train_bpe,
)
from shardsmith.errors import Code, Fault, Refused, raise_errors

Watch = Callable[[str, int, int], None]
"""Called with what is being done ("training the BPE", "encoding"), bytes read so far, and all bytes."""

BATCH = 32 * PIECE
"""Characters encoded at once, on all cores; these and their ids are in memory."""

OUTPUT_EXISTS = Code(
    code="G004", title="output exists", because="prepared data that a run may be reading is not overwritten unasked"
)
OUTPUT_FAILED = Code(
    code="G005",
    title="output cannot be written",
    because="nothing is left behind half written: the files get their names when they are whole",
)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` wrote: `meta` as in the sidecar, `paths` by kind, and what of the input is not as it was.

    `replaced` counts runs of bytes that were not UTF-8 and became U+FFFD, in `malformed` files; `empty` counts
    records without text, which were left out.
    `asked_vocab` is the vocabulary a BPE was asked for; a small text gives fewer merges.
    """

    meta: Meta
    paths: dict[str, Path]
    dtype: str
    skipped: tuple[Skipped, ...]
    replaced: int
    malformed: int
    empty: int
    asked_vocab: int | None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; `bytes` is the size of the text."""
        return {
            "documents": self.meta.documents,
            "tokens": self.meta.tokens,
            "targets": self.meta.tokens if self.meta.targets is None else self.meta.targets,
            "bytes": self.meta.bytes,
            "bytes_per_token": self.meta.bytes / self.meta.tokens,
            "vocab": self.meta.vocab,
            "asked_vocab": self.asked_vocab,
            "max_id": self.meta.max_id,
            "eod": self.meta.eod,
            "tokenizer": self.meta.tokenizer,
            "dtype": self.dtype,
            "paths": {kind: str(path) for kind, path in self.paths.items()},
            "replaced": self.replaced,
            "malformed_files": self.malformed,
            "empty_records": self.empty,
            "skipped": [{"path": str(s.path), "reason": s.reason} for s in self.skipped],
        }


def prepare(
    inputs: Sequence[str],
    out: str | Path,
    *,
    tokenizer: str = "byte",
    patterns: Sequence[str] = (),
    eod: str | None = None,
    limit_mb: float | None = None,
    key: str = "text",
    turn: str = TURN,
    force: bool = False,
    watch: Watch | None = None,
) -> Prepared:
    """Write the text of `inputs` to `out`.bin/.idx, each document followed by the end-of-document token.

    A text file is one document; lines of `.jsonl` and rows of `.parquet` files are one each (`records`; `key` and
    `turn` as in `Form`). Where only parts are to be learnt, `out`.mask.bin says which tokens.

    `tokenizer` is `byte`, `bpe:VOCAB` (trained on this text, saved as tokenizer.json beside the output), a
    tokenizer.json or a folder with one; `eod` names its end-of-document token. `limit_mb` (1e6 bytes) bounds the text.
    The same text gives the same files, and memory does not grow with it. Raises `Refused` (G001 to G105).
    """
    prefix = prefix_of(out)
    if not prefix.name:
        raise OUTPUT_FAILED.refuse(f"{str(out)!r} names no file", ("--out", repr(str(out))), hint="--out data/text")
    paths = {"bin": beside(prefix, ".bin"), "idx": beside(prefix, ".idx"), "meta": beside(prefix, ".json")}
    paths["mask"] = beside(prefix, ".mask.bin")
    faults: list[Fault] = []
    form = _collect(faults, lambda: Form(key=key, turn=turn))
    asked = _collect(faults, lambda: bpe_vocab(tokenizer))
    ready: Any = None
    if asked is not None:
        paths["tokenizer"] = prefix.with_name("tokenizer.json")
    faults.extend(_blocked(paths, force=force))
    limit = None if limit_mb is None else int(limit_mb * 1e6)
    exclude = [path.resolve() for path in paths.values()]
    corpus = _collect(faults, lambda: find(inputs, patterns=patterns, limit=limit, exclude=exclude))
    if tokenizer.partition(":")[0] != "bpe":
        ready = _collect(faults, lambda: open_tokenizer(tokenizer, eod=eod))
    raise_errors(faults)
    assert corpus is not None
    assert form is not None

    chosen = ready if asked is None else _train(corpus, form, vocab=asked, eod=eod, watch=watch)
    with _staged(paths) as staged:
        writer, tally = _encode(corpus, form, chosen, staged, watch=watch)
        content, file = None, None
        if isinstance(chosen, JsonTokenizer):
            content = chosen.content
            file = "tokenizer.json" if asked is not None else os.path.relpath(chosen.name, prefix.parent)
        meta = _meta(chosen, writer, tally, name=tokenizer, content=content, file=file)
        staged["idx"].write_bytes(writer.index())
        staged["meta"].write_text(meta.dumps(), encoding="utf-8")
        if asked is not None and content is not None:
            staged["tokenizer"].write_bytes(content)
    return Prepared(
        meta=meta,
        paths={kind: path for kind, path in paths.items() if kind != "mask" or writer.masked},
        dtype=str(writer.dtype.name),
        skipped=corpus.skipped,
        replaced=tally.replaced,
        malformed=tally.malformed,
        empty=tally.empty,
        asked_vocab=asked,
    )


def _collect(faults: list[Fault], step: Callable[[], Any]) -> Any:
    """The result of `step`, or None with its faults added, so that the next check still runs."""
    try:
        return step()
    except Refused as refused:
        faults.extend(refused.faults)
        return None


def _blocked(paths: dict[str, Path], *, force: bool) -> list[Fault]:
    """Faults of the places to write to."""
    folder = paths["bin"].parent
    existing = [path for path in paths.values() if path.exists()]
    folders = [path for path in existing if path.is_dir()]
    if folders:
        return [OUTPUT_FAILED.fault(f"{folders[0]} is a folder", ("--out", str(paths["bin"])), hint="another --out")]
    if existing and not force:
        kept = "--force, another --out" + (
            f", or --tokenizer {paths['tokenizer']} to encode with that tokenizer"
            if paths.get("tokenizer") in existing
            else ""
        )
        return [
            OUTPUT_EXISTS.fault("the output exists", ("--out", ", ".join(str(path) for path in existing)), hint=kept)
        ]
    standing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not standing.is_dir():
        return [_failed(folder, NotADirectoryError(errno.ENOTDIR, f"{standing} is not a folder"))]
    return [] if os.access(standing, os.W_OK) else [_failed(folder, PermissionError(errno.EACCES, "no permission"))]


def _failed(path: Path, error: OSError) -> Fault:
    return OUTPUT_FAILED.fault(
        f"{path} cannot be written", ("system", error.strerror or str(error)), hint="another --out, or free space there"
    )


@contextmanager
def _staged(paths: dict[str, Path]) -> Iterator[dict[str, Path]]:
    """Names to write to, which become `paths` if all goes well and vanish if not.

    The old index goes first and the new one comes last, so that a reader never finds an index with
    another run's tokens; what was not written (a mask that is not needed) is removed. Raises `Refused` (G005)
    where the system refuses to write.
    """
    staged = {kind: path.with_name(f".{path.name}.{os.getpid()}") for kind, path in paths.items()}
    try:
        paths["bin"].parent.mkdir(parents=True, exist_ok=True)
        yield staged
        paths["idx"].unlink(missing_ok=True)
        for kind in sorted(paths, key=lambda kind: kind == "idx"):
            if staged[kind].exists():
                os.replace(staged[kind], paths[kind])
            else:
                paths[kind].unlink(missing_ok=True)
    except OSError as error:
        raise Refused([_failed(paths["bin"].parent, error)]) from error
    finally:
        for path in staged.values():
            path.unlink(missing_ok=True)


def _train(corpus: Corpus, form: Form, *, vocab: int, eod: str | None, watch: Watch | None) -> Tokenizer:
    tally = Tally()

    def texts() -> Iterator[str]:
        for document in corpus.documents:
            yield from (piece.text for piece in read(document, form=form, tally=tally) if not piece.markup)
            if watch is not None:
                watch("training the BPE", tally.read, corpus.size)

    return train_bpe(texts(), vocab=vocab, eod=eod)


def _encode(
    corpus: Corpus, form: Form, tokenizer: Tokenizer, staged: dict[str, Path], *, watch: Watch | None
) -> tuple[TokenWriter, Tally]:
    tally = Tally()
    with staged["bin"].open("wb") as stream:
        writer = TokenWriter(stream, dtype_for(tokenizer.vocab), mask=staged["mask"])
        everything = (piece for document in corpus.documents for piece in read(document, form=form, tally=tally))
        for batch in _batches(everything):
            for piece, tokens in zip(batch, _ids(batch, tokenizer), strict=True):
                writer.add(tokens, target=piece.target)
                if piece.last:
                    writer.end_document(tokenizer.eod, target=piece.target)
            if watch is not None:
                watch("encoding", tally.read, corpus.size)
        writer.close()
    if writer.tokens == 0:
        raise NO_TEXT.refuse("none of the records holds text", hint="--key names the key of the text")
    return writer, tally


def _batches(everything: Iterator[Piece]) -> Iterator[list[Piece]]:
    """The pieces in runs of about `BATCH` characters."""
    batch: list[Piece] = []
    held = 0
    for piece in everything:
        batch.append(piece)
        held += len(piece.text) + 1
        if held >= BATCH:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _ids(batch: list[Piece], tokenizer: Tokenizer) -> list[Tokens]:
    """The ids of each piece; markup, which repeats in every conversation, is encoded once."""
    plain = iter(tokenizer.encode([piece.text for piece in batch if not piece.markup]))
    markup = list(dict.fromkeys(piece.text for piece in batch if piece.markup))
    known = dict(zip(markup, tokenizer.encode(markup, markup=True), strict=True))
    return [known[piece.text] if piece.markup else next(plain) for piece in batch]


def _meta(
    chosen: Tokenizer, writer: TokenWriter, tally: Tally, *, name: str, content: bytes | None, file: str | None
) -> Meta:
    return Meta(
        tokenizer=name,
        tokenizer_file=file,
        fingerprint=None if content is None else fingerprint(content),
        eod=chosen.eod,
        eod_token=chosen.eod_token,
        vocab=chosen.vocab,
        max_id=writer.max_id,
        documents=len(writer.borders) - 1,
        tokens=writer.tokens,
        bytes=tally.text,
        targets=writer.targets if writer.masked else None,
    )
