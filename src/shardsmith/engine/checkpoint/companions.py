"""What stands beside weights and belongs to them: the tokenizer's files, and the ids of its special tokens."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardsmith.engine.dataset.tokenizer import Tokenizer, open_tokenizer
from shardsmith.errors import Code, Refused

NOT_KNOWN = Code(
    code="G106",
    title="no tokenizer beside the weights",
    because="ids mean text only in the tokenizer that the model was trained with",
)

TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"
FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    GENERATION_FILE,
)
"""Files of a Hugging Face folder that are about tokens: they mean the same whatever format the weights have."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

TokenIds = Mapping[str, Any]
"""Ids of special tokens by their Hugging Face names; `eos_token_id` may be a list."""


def carry(source: Path, target: Path) -> tuple[str, ...]:
    """Copy the tokenizer's files of `source` into `target`, byte for byte; returns their names.

    Ids that only a config.json states are kept too, in a generation_config.json.
    """
    names = tuple(name for name in FILES if (source / name).is_file())
    for name in names:
        shutil.copyfile(source / name, target / name)
    stated = _ids(source / "config.json")
    if stated and GENERATION_FILE not in names:
        (target / GENERATION_FILE).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
        names = (*names, GENERATION_FILE)
    return names


def token_ids(folder: Path, vocab: int) -> TokenIds:
    """Ids of special tokens below `vocab`: as generation_config.json states them, else the tokenizer's own end."""
    found = _ids(folder / GENERATION_FILE)
    if "eos_token_id" not in found and (folder / TOKENIZER_FILE).is_file():
        try:
            found["eos_token_id"] = open_tokenizer(str(folder)).eod
        except Refused:  # a tokenizer without an end, or no library to read it: then nothing is known
            return found
    return {key: value for key, value in found.items() if _fits(value, vocab)}


def tokenizer_for(folder: Path) -> Tokenizer:
    """The tokenizer of the weights in `folder`: its own, that of a checkpoint's run, or what run.toml says.

    Raises `Refused` (G106) where none is known, and what `open_tokenizer` raises.
    """
    for place in (folder, folder.resolve().parent.parent):
        if (place / TOKENIZER_FILE).is_file():
            return open_tokenizer(str(place))
        try:
            stated = tomllib.loads((place / "run.toml").read_text(encoding="utf-8"))["data"]["tokenizer"]
            return open_tokenizer(str(stated))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    raise NOT_KNOWN.refuse(
        f"{folder} has no {TOKENIZER_FILE}",
        (str(folder), f"no {TOKENIZER_FILE}"),
        hint="name one: --tokenizer PATH, or byte",
    )


def _ids(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return {key: table[key] for key in IDS if table.get(key) is not None}
    except (OSError, ValueError, AttributeError):
        return {}


def _fits(value: Any, vocab: int) -> bool:
    """Whether `value` is one or several ids below `vocab`; a config.json with others is refused by its readers."""
    several = value if isinstance(value, list) else [value]
    return all(isinstance(one, int) and 0 <= one < vocab for one in several)
