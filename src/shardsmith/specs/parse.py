"""Strict reading of tables (TOML, JSON, overrides) into dataclasses, all faults at once."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from shardsmith.errors import Code, Fault, Refused

T = TypeVar("T")

UNKNOWN_KEY = Code(
    code="F101",
    title="unknown key",
    because="a key that nothing reads would be silently ignored, and the run would use a default instead",
)
WRONG_VALUE = Code(
    code="F102",
    title="value of the wrong type or outside the allowed values",
    because="values are taken as written: nothing is converted or guessed",
)
MISSING_KEY = Code(code="F103", title="missing key", because="this key has no default that would be right for everyone")
NO_FILE = Code(
    code="F110", title="no such file", because="only local files are read; nothing is fetched from a network"
)
NOT_TOML = Code(code="F111", title="file is not valid TOML", because="model, cluster, plan and job files are TOML")

ALIASES = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "sp": "sequence_parallel",
    "vpp": "stages_per_rank",
    "vp": "stages_per_rank",
    "zero_stage": "zero",
    "mbs": "microbatch",
    "micro_batch": "microbatch",
    "micro_batch_size": "microbatch",
    "gbs": "global_batch",
    "gradient_accumulation_steps": "microbatches",
    "grad_accum": "microbatches",
    "gas": "microbatches",
    "num_microbatches": "microbatches",
    "seqlen": "seq_len",
    "seq_length": "seq_len",
    "learning_rate": "lr",
    "max_steps": "steps",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "1f1b": "one_f_one_b",
    "interleaved_1f1b": "interleaved",
    "zb1p": "zb_h1",
    "zbv": "zb_v",
    "zbh1": "zb_h1",
    "dualpipev": "dualpipe_v",
    "bfs": "looped_bfs",
    "adam": "adamw",
}
"""What other tools call keys and values, and the name here: said as a hint, never taken for it."""

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "dataclass_type": "a table",
}


def parse_table(
    cls: type[T], data: Mapping[str, Any], *, source: str, section: str, sources: Mapping[str, str] | None = None
) -> T:
    """`cls` built from `data`, taking every value as written.

    `cls` is a dataclass, nested dataclasses included. `source` names the file (or option) and `section`
    the table inside it, "" for the whole file; `sources` names another origin for single keys, such as
    an override. Whole numbers pass for floats and lists for tuples; nothing else is converted.
    Raises `Refused` with every unknown key (F101), wrong value (F102) and missing key (F103).
    """
    try:
        parsed: T = _adapter(cls).validate_json(json.dumps([data], default=str))[0]  # type: ignore[arg-type]
    except ValidationError as error:
        details = error.errors(include_url=False)
    else:
        return parsed
    wrong: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in _of_meant_tables(data, details):
        wrong.setdefault(_path(data, detail), []).append(detail)
    # Of the alternatives of a union, the one that fits further in is the one that was meant.
    meant = [path for path in wrong if not any(other[: len(path)] == path != other for other in wrong)]
    origins = [origin_of(path, source, sources or {}) for path in meant]
    raise Refused(
        _fault(cls, data, wrong[path], path, origin, section) for path, origin in zip(meant, origins, strict=True)
    )


def origin_of(path: Sequence[str], source: str, sources: Mapping[str, str]) -> str:
    """Where the value at `path` was written: what `sources` say of it, around it or inside it, else `source`."""
    known = (".".join(path[:length]) for length in range(len(path), 0, -1))
    inner = (key for key in sources if path and key.startswith(".".join(path) + "."))
    return next((sources[key] for key in (*known, *inner) if key in sources), source)


def field_types(cls: type[Any]) -> dict[str, Any]:
    """The type of each field of a dataclass."""
    return get_type_hints(cls)


def type_at(cls: type[Any], path: Sequence[str]) -> Any:
    """The type of the value at `path` (`device`, `memory_gib`) inside dataclass `cls`; None where there is none."""
    hint: Any = cls
    for step in path:
        hint = next((found for found in (_type_in(kind, step) for kind in _alternatives(hint)) if found), None)
    return hint


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type that `hint` is."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _type_in(kind: Any, step: str) -> Any:
    """The type of what stands at `step` in a dataclass, a list or a mapping; None where nothing does."""
    if is_dataclass(kind) and isinstance(kind, type):
        return field_types(kind).get(step)
    if get_origin(kind) is tuple and step.isdigit():
        return get_args(kind)[0]
    return get_args(kind)[1] if get_origin(kind) is Mapping else None


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises `Refused` for a missing (F110) or malformed (F111) file."""
    file = Path(path)
    if not file.is_file():
        raise NO_FILE.refuse(f"there is no file {str(path)!r}")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise NOT_TOML.refuse(f"{path} cannot be read as TOML: {error}") from error


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A hint for a misspelt `word`: its closest `choices`, or all of them where none is close."""
    known = sorted(choices)
    if ALIASES.get(word.lower().replace("-", "_")) in known:
        return f"did you mean {ALIASES[word.lower().replace('-', '_')]}?"
    close = get_close_matches(word, known, n=3, cutoff=0.8)
    # "tensor_paralel" looks more like "sequence_parallel" letter by letter, but means "tensor".
    close = close or [k for k in known if word.startswith(k) or k.startswith(word)]
    close = close or get_close_matches(word, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else "one of " + ", ".join(known)


@cache
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    # A dataclass takes no configuration from outside, but inherits that of a container around it.
    return TypeAdapter(tuple[cls], config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))  # type: ignore[valid-type]


def _path(data: Any, detail: ErrorDetails) -> tuple[str, ...]:
    """The keys and places that lead to an error in `data`, without the union members that pydantic names between."""
    path: list[str] = []
    steps = detail["loc"][1:]
    for at, step in enumerate(steps):
        if isinstance(data, Mapping):
            # The last step of a missing key is not in the data either.
            if step not in data and not (detail["type"] == "missing" and at == len(steps) - 1):
                continue
            data = data.get(step)
        elif isinstance(data, (list, tuple)) and isinstance(step, int):
            data = data[step] if step < len(data) else None
        else:
            continue
        path.append(str(step))
    return tuple(path)


def _of_meant_tables(data: Any, details: list[ErrorDetails]) -> list[ErrorDetails]:
    """`details` without those of tables that were not meant: of alternatives, the one whose `kind` is right was."""
    tables = {table: False for detail in details if (table := _alternative(data, detail))}
    for detail in details:
        if detail["loc"][-1] == "kind" and (table := _alternative(data, detail)):
            tables[table] = True
    fits = {table[:-1] for table, misfit in tables.items() if not misfit}
    return [d for d in details if not tables.get(table := _alternative(data, d), False) or table[:-1] not in fits]


def _alternative(data: Any, detail: ErrorDetails) -> tuple[str | int, ...]:
    """The start of an error's place up to the name of the union member that pydantic put there; () without one."""
    steps = detail["loc"][1:]
    for at, step in enumerate(steps[:-1]):
        if not isinstance(data, Mapping):
            break
        if step not in data:
            return steps[: at + 1]
        data = data[str(step)]
    return ()


def _fault(
    cls: type[Any], data: Any, details: list[ErrorDetails], path: tuple[str, ...], origin: str, section: str
) -> Fault:
    kind, key = details[0]["type"], ".".join(path)
    place = f"[{section}]" if section else "the file"
    if kind == "missing" and path[-1].isdigit():
        short, value = ".".join(path[:-1]), _show(_at(data, path[:-1]))
        return WRONG_VALUE.fault(f"{short} in {place} has too few values", (origin, f"{short} = {value}"))
    if kind == "missing":
        return MISSING_KEY.fault(f"{place} lacks {key}", (origin, f"{place} without {key}"), hint=f"add {key} = ...")
    if not path:
        return WRONG_VALUE.fault(f"{place} must be a table", (origin, f"{section} = {_show(data)}"))
    value = _show(_at(data, path))
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        hint = _known_key(_owner(cls, details[0]["loc"][1:]), path)
        return UNKNOWN_KEY.fault(f"{place} has no key {key}", (origin, f"{key} = {value}"), hint=hint)
    alias = ALIASES.get(value.strip('"').lower(), "")
    allowed = any(alias and f"'{alias}'" in _wanted(detail) for detail in details)
    meant = f"; did you mean {alias}?" if allowed else ""
    return WRONG_VALUE.fault(
        f"{key} = {value} in {place} is not allowed",
        (origin, f"{key} = {value}"),
        hint=f"{key} takes " + " or ".join(dict.fromkeys(_wanted(detail) for detail in details)) + meant,
    )


def _known_key(owner: type[Any], path: tuple[str, ...]) -> str:
    """A hint for an unknown key of `owner` at `path`: the table inside that has it, or keys with names like it."""
    inner = [
        f"{name}.{'0.' if get_origin(hint) is tuple else ''}{path[-1]}"
        for name, hint in field_types(owner).items()
        if any(path[-1] in field_types(table) for table in _dataclasses_in(hint))
    ]
    around = "".join(f"{step}." for step in path[:-1])
    if inner:
        return "did you mean " + " or ".join(around + name for name in inner) + "?"
    return did_you_mean(path[-1], [f.name for f in fields(owner)])


def _wanted(detail: ErrorDetails) -> str:
    if detail["type"] == "literal_error":
        return str(detail["ctx"]["expected"])
    return _EXPECTED.get(detail["type"], detail["msg"])


def _at(data: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        if isinstance(data, Mapping) and step in data:
            data = data[step]
        elif isinstance(data, (list, tuple)) and step.isdigit() and int(step) < len(data):
            data = data[int(step)]
        else:
            break
    return data


def _owner(cls: type[Any], steps: tuple[str | int, ...]) -> type[Any]:
    """The dataclass that an error at `steps`, seen from `cls`, is about: of alternatives the one that is named."""
    named: list[type[Any]] = []
    for step in steps:
        if step in (hints := get_type_hints(cls)):
            named = list(_dataclasses_in(hints[str(step)]))
            cls = named[0] if named else cls
        else:
            cls = next((c for c in named if c.__name__ == step), cls)
    return cls


def _dataclasses_in(hint: Any) -> Iterable[type[Any]]:
    if is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for inner in get_args(hint):
        yield from _dataclasses_in(inner)


def _show(value: Any) -> str:
    """`value` as TOML writes it, for messages."""
    return json.dumps(value, default=str)
