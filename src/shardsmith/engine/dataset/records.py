"""Documents as pieces of text: whole text files, lines of JSONL and rows of Parquet; what a model learns is marked.

A record is a text (`{"text": ...}`), a question with its answer (`{"prompt": ..., "response": ...}`; `completion`
names an answer too), or a conversation (`{"messages": [{"role": ..., "content": ...}, ...]}`). Answers are
targets, what they answer is only read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardsmith.engine.dataset.sources import PIECE, Document, Tally, border, decode, pieces, unreadable
from shardsmith.errors import Code, raise_errors

TURN = "<|im_start|>{role}\n{content}<|im_end|>\n"
"""How a message is written unless said otherwise (ChatML)."""

ANSWERS = ("response", "completion")

BAD_RECORD = Code(
    code="G006",
    title="record that cannot be read",
    because="leaving out what was asked for would change the data silently",
)
NO_PYARROW = Code(
    code="G007", title="pyarrow is not installed", because="Parquet files are read by the `pyarrow` library"
)
BAD_TURN = Code(
    code="G008",
    title="template of a message without its content",
    because="each message of a conversation is written by the template, which says where its content goes",
)


@dataclass(frozen=True, kw_only=True)
class Form:
    """How records become text: `key` holds the text of a plain record, `turn` writes a message.

    Of an assistant's message, the content and what `turn` has behind it are targets. Tokens such as <|im_end|>
    are taken as such in `turn`, and as plain text inside a message.
    """

    key: str = "text"
    turn: str = TURN

    def __post_init__(self) -> None:
        if self.turn.count("{content}") != 1:
            raise BAD_TURN.refuse(
                f"the template holds {{content}} {self.turn.count('{content}')} times",
                ("--turn", repr(self.turn)),
                hint=repr(TURN),
            )


class Piece(NamedTuple):
    """A stretch of one document: `target` if a model learns to predict it, `markup` if it may hold special tokens.

    `last` ends the document.
    """

    text: str
    target: bool = True
    markup: bool = False
    last: bool = False


def read(document: Document, *, form: Form, tally: Tally) -> Iterator[Piece]:
    """All documents of one file, piece by piece. Raises `Refused` (G003, G006, G007)."""
    if document.path.suffix == ".jsonl":
        records = _lines(document, tally)
    elif document.path.suffix == ".parquet":
        records = _rows(document, form, tally)
    else:
        yield from _closed(Piece(text) for text in pieces(document, tally=tally))
        return
    for place, record in records:
        found = [piece for piece in _of_record(record, form, f"{document.path}, {place}") if piece.text]
        tally.text += sum(len(piece.text.encode(errors="replace")) for piece in found)
        tally.empty += not found
        yield from _closed(part for piece in found for part in _cut(piece))


def _of_record(record: Any, form: Form, place: str) -> list[Piece]:
    if not isinstance(record, Mapping):
        raise _bad(place, f"it is {json.dumps(record, default=str)[:60]}, not a record with keys")
    if "messages" in record:
        return _conversation(record["messages"], form, place)
    answer = next((key for key in ANSWERS if key in record), None)
    if "prompt" in record and answer is not None:
        texts = [_text(record, key, place) for key in ("prompt", answer)]
        return [Piece(texts[0], target=False), Piece(texts[1])]
    if form.key in record:
        return [Piece(_text(record, form.key, place))]
    raise _bad(place, f"it has the keys {', '.join(map(str, record)) or 'none'}", key=form.key)


def _conversation(messages: Any, form: Form, place: str) -> list[Piece]:
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise _bad(place, "messages is not a list of records with role and content")
    before, after = form.turn.split("{content}")
    out = []
    for message in messages:
        role, content = _text(message, "role", place), _text(message, "content", place)
        target = role == "assistant"
        out.append(Piece(before.replace("{role}", role), target=False, markup=True))
        out.append(Piece(content, target=target))
        out.append(Piece(after.replace("{role}", role), target=target, markup=True))
    return out


def _text(record: Mapping[str, Any], key: str, place: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise _bad(place, f"{key} is {json.dumps(value, default=str)[:60]}, not text")
    return value


def _bad(place: str, what: str, *, key: str = "text") -> Exception:
    return BAD_RECORD.refuse(
        f"{place}: {what}", hint=f"a record has {key}, prompt and response, or messages; --key names another text key"
    )


def _lines(document: Document, tally: Tally) -> Iterator[tuple[str, Any]]:
    """The records of a JSONL file; of a cut one, those whose lines end before the cut."""
    left, replaced = document.size, 0
    try:
        with document.path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if len(line) > left:
                    break
                left -= len(line)
                tally.read += len(line)
                if not line.strip():
                    continue
                text, _, wrong = decode(line, final=True)
                replaced += wrong
                try:
                    record = json.loads(text.removeprefix("\ufeff"))
                except ValueError as error:
                    raise _bad(f"{document.path}, line {number}", f"it is not JSON: {error}") from None
                yield f"line {number}", record
    except OSError as error:
        raise_errors([unreadable(document.path, error)])
    tally.replaced += replaced
    tally.malformed += replaced > 0


def _rows(document: Document, form: Form, tally: Tally) -> Iterator[tuple[str, Any]]:
    """The records of a Parquet file; of a cut one, its first rows, until their text is as long as the file may be."""
    try:
        import pyarrow.parquet as parquet
        from pyarrow import ArrowException
    except ImportError:
        raise NO_PYARROW.refuse(
            "the library `pyarrow` is missing", ("inputs", str(document.path)), hint="pip install 'shardsmith[data]'"
        ) from None
    before, number = tally.read, 0
    began = tally.text
    try:
        with parquet.ParquetFile(document.path) as file:
            wanted = {form.key, "prompt", *ANSWERS, "messages"}
            columns = [name for name in file.schema_arrow.names if name in wanted]
            rows = max(1, file.metadata.num_rows)
            if not columns:
                raise _bad(str(document.path), f"it has the columns {', '.join(file.schema_arrow.names)}", key=form.key)
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for record in batch.to_pylist():
                    number += 1
                    yield f"row {number}", {key: value for key, value in record.items() if value is not None}
                    if document.cut and tally.text - began >= document.size:
                        return
                tally.read = before + document.size * number // rows
    except (OSError, ArrowException) as error:
        raise_errors([unreadable(document.path, error)])


def _cut(piece: Piece) -> Iterator[Piece]:
    """`piece` in parts of at most `PIECE` characters."""
    text = piece.text
    while len(text) > PIECE:
        at = border(text, PIECE)
        yield piece._replace(text=text[:at])
        text = text[at:]
    yield piece._replace(text=text)


def _closed(parts: Iterable[Piece]) -> Iterator[Piece]:
    """`parts` of one document, the last one marked as such."""
    waiting: Piece | None = None
    for piece in parts:
        if waiting is not None:
            yield waiting
        waiting = piece
    if waiting is not None:
        yield waiting._replace(last=True)
