"""What a job's `[data]` names, opened and checked: the samples to train on and those held out for evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardsmith.engine.dataset.indexed import TokenFile, check_vocabulary
from shardsmith.engine.dataset.order import HELD_OUT, shuffled, whole_weights
from shardsmith.engine.dataset.samples import (
    Blend,
    Documents,
    Source,
    Synthetic,
    cut,
    joined,
)
from shardsmith.engine.dataset.tokenizer import open_tokenizer
from shardsmith.errors import Code, Fault, raise_errors
from shardsmith.specs.job import SYNTHETIC, Data

NOT_DIVISIBLE = Code(
    code="G303",
    title="too few documents to hold some out",
    because="evaluation holds out whole documents, so that none is both trained on and evaluated",
)


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """`train` never ends; `held_out` is evaluated on (None: nothing is)."""

    train: Source
    held_out: Source | None


def open_data(data: Data, *, vocab: int, seq_len: int) -> Datasets:
    """The samples that `data` names, of `seq_len` tokens each.

    Checked before the run: every id and the tokenizer fit the model's `vocab`, and there is at least one
    sample everywhere. What is held out is a function of the files and `data.seed`, and whole documents.
    Raises `Refused` (G101 to G205, G301 to G303).
    """
    tokenizer = open_tokenizer(data.tokenizer) if data.tokenizer is not None else None
    raise_errors(check_vocabulary(file=None, tokenizer=tokenizer, vocab=vocab))
    if data.paths == (SYNTHETIC,):
        return _synthetic(data, vocab=vocab, seq_len=seq_len)
    faults: list[Fault] = []
    files, evaluated = (_open(paths, vocab, faults) for paths in (data.paths, data.eval_paths))
    raise_errors(faults)
    train, held_out = [], [cut(Documents(file), packing=data.packing, seq_len=seq_len) for file in evaluated]
    for file in files:
        kept = Documents(file)
        if data.eval_fraction:
            kept, rest = split(file, fraction=data.eval_fraction, seed=data.seed)
            held_out.append(cut(rest, packing=data.packing, seq_len=seq_len))
        train.append(cut(kept, packing=data.packing, seq_len=seq_len))
    source = joined(train)
    if data.weights:
        source = Blend(parts=tuple(train), weights=whole_weights(data.weights))
    return Datasets(train=source, held_out=joined(held_out) if held_out else None)


def split(file: TokenFile, *, fraction: float, seed: int) -> tuple[Documents, Documents]:
    """Documents to train on and documents held out: round(fraction x documents) of them, at least one of each.

    Raises `Refused` (G303) for a file of one document.
    """
    if file.documents < 2:
        raise NOT_DIVISIBLE.refuse(
            f"{file.prefix} holds one document",
            (str(file.prefix), "documents = 1"),
            ("data.eval_fraction", f"eval_fraction = {fraction}"),
            hint="prepare the text as several documents (one a file, or a line of JSONL), or name data.eval_path",
        )
    count = min(max(1, round(fraction * file.documents)), file.documents - 1)
    places = np.arange(count, dtype=np.int64)
    held = np.zeros(file.documents, dtype=bool)
    held[shuffled(places, seed=seed, epoch=0, samples=file.documents, purpose=HELD_OUT)] = True
    return Documents(file, np.flatnonzero(~held)), Documents(file, np.flatnonzero(held))


def _open(paths: tuple[str, ...], vocab: int, faults: list[Fault]) -> list[TokenFile]:
    files = [TokenFile(path) for path in paths]
    for file in files:
        faults.extend(check_vocabulary(file=file, tokenizer=None, vocab=vocab))
    return files


def _synthetic(data: Data, *, vocab: int, seq_len: int) -> Datasets:
    """Random tokens; numbers that are held out are not trained on."""
    source = Synthetic(seed=data.seed, vocab=vocab, seq_len=seq_len, packed=data.packing != "joined")
    if not data.eval_fraction:
        return Datasets(train=source, held_out=None)
    held = max(1, int(data.eval_fraction * source.samples))
    train = replace(source, samples=source.samples - held)
    return Datasets(train=train, held_out=replace(source, samples=held, first=train.samples))
