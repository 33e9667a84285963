"""`prepare` on records: lines of JSONL, rows of Parquet, and which of their tokens are learnt."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from shardsmith.cli.prepare import command
from shardsmith.engine.dataset.indexed import TokenFile, tokenizer_of
from shardsmith.engine.dataset.prepare import Prepared, prepare
from shardsmith.engine.dataset.records import Form, read
from shardsmith.engine.dataset.sources import Document, Tally
from shardsmith.engine.dataset.tokenizer import train_bpe
from shardsmith.errors import Refused

TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
]


def lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(path: Path, **options: Any) -> Prepared:
    return prepare([str(path)], path.parent / "out" / "t", force=True, **options)


def documents(folder: Path) -> list[tuple[str, str]]:
    """Text of each document, and of what is learnt of it; `$` is the end of a document."""
    file = TokenFile(folder / "out" / "t")
    tokenizer, out = tokenizer_of(file), []

    def text(ids: list[int]) -> str:
        return "".join("$" if i == tokenizer.eod else tokenizer.decode([i]) for i in ids)

    for start, stop in zip(file.boundaries[:-1].tolist(), file.boundaries[1:].tolist(), strict=True):
        tokens, counted = file.tokens(start, stop), file.counted(start, stop)
        out.append((text(tokens.tolist()), text(tokens[counted].tolist())))
    return out


def test_lines_of_jsonl_are_documents_and_all_is_learnt(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "one", "id": 1}, {"text": ""}, {"text": "two"}])
    path.write_text(path.read_text().replace("\n", "\n\n", 1))
    found = run(path)
    assert documents(tmp_path) == [("one$", "one$"), ("two$", "two$")]
    assert (found.empty, found.meta.bytes, found.meta.targets) == (1, 6, None)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["t.bin", "t.idx", "t.json"]


def test_answers_are_targets_and_prompts_are_not(tmp_path: Path) -> None:
    records = [{"text": "plain"}, {"prompt": "2+2=", "response": "4"}, {"prompt": "a", "completion": "b"}]
    found = run(lines(tmp_path / "a.jsonl", [*records, {"messages": TALK}]))
    turns = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n$"
    assert documents(tmp_path) == [
        ("plain$", "plain$"),
        ("2+2=4$", "4$"),
        ("ab$", "b$"),
        (turns, "yo<|im_end|>\n$"),
    ]
    file = TokenFile(tmp_path / "out" / "t")
    assert found.meta.targets == int(file.counted(0, len(file)).sum()) == found.as_json()["targets"]
    assert (tmp_path / "out" / "t.mask.bin").stat().st_size == len(file)


def test_a_conversation_that_ends_with_a_question_does_not_learn_to_end_there(tmp_path: Path) -> None:
    run(lines(tmp_path / "a.jsonl", [{"messages": TALK[:2]}]), turn="[{role}]{content};")
    assert documents(tmp_path) == [("[system]S;[user]hi;$", "")]


def test_special_tokens_count_in_the_template_and_not_in_a_message(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    table = json.loads(train_bpe(iter(["abc"]), vocab=257).content)
    added = [{**table["added_tokens"][0], "id": 257 + i, "content": name} for i, name in enumerate(["<s>", "</s>"])]
    (tmp_path / "tokenizer.json").write_text(json.dumps({**table, "added_tokens": [*table["added_tokens"], *added]}))
    path = lines(tmp_path / "a.jsonl", [{"messages": [{"role": "assistant", "content": "x</s>"}]}])
    run(path, tokenizer=str(tmp_path / "tokenizer.json"), turn="<s>{role}:{content}</s>")
    ids = TokenFile(tmp_path / "out" / "t").tokens(0, 18).tolist()
    assert (ids[0], ids[-2], ids.count(257), ids.count(258)) == (257, 258, 1, 1)


def test_parquet_rows_are_records(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"body": "one", "messages": None},
        {"body": None, "messages": TALK[1:]},
        {"body": "ä" * 10, "messages": None},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = prepare([str(tmp_path)], tmp_path / "out" / "t", key="body", turn="{role}>{content}\n")
    assert documents(tmp_path) == [
        ("one$", "one$"),
        ("user>hi\nassistant>yo\n$", "yo\n$"),
        ("\ufffd" * 20 + "$", "\ufffd" * 20 + "$"),  # one byte at a time
    ]
    assert found.meta.bytes == 3 + 22 + 20 - 1
    assert found.skipped == ()


def test_a_cut_file_of_records_ends_with_a_whole_one(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(9)])  # 14 bytes a line
    run(path, limit_mb=30e-6)
    assert [text for text, _ in documents(tmp_path)] == ["0$", "1$"]


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    for record, words in [
        ("[1, 2]", "not a record"),
        ('{"other": "x"}', "it has the keys other"),
        ('{"text": 5}', "text is 5, not text"),
        ('{"messages": "x"}', "messages is not a list"),
        ('{"messages": [{"role": "user"}]}', "content is null, not text"),
        ("{oops", "it is not JSON"),
    ]:
        (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + record + "\n")
        with pytest.raises(Refused, match="G006") as refused:
            run(tmp_path / "a.jsonl")
        assert "a.jsonl, line 2" in refused.value.faults[0].message
        assert words in refused.value.faults[0].message
    assert not list((tmp_path / "out").iterdir())


def test_files_without_any_text_or_template_without_content_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="G002"):
        run(lines(tmp_path / "a.jsonl", [{"text": ""}]))
    with pytest.raises(Refused, match="G008"):
        run(tmp_path / "a.jsonl", turn="{role}")
    (tmp_path / "b.parquet").write_text("no table")
    with pytest.raises(Refused, match=r"G003|G007"):
        run(tmp_path / "b.parquet")


def test_plain_output_over_a_masked_one_leaves_no_mask(tmp_path: Path) -> None:
    run(lines(tmp_path / "a.jsonl", [{"prompt": "p", "response": "r"}]))
    assert TokenFile(tmp_path / "out" / "t").masked
    run(lines(tmp_path / "a.jsonl", [{"text": "pr"}]))
    assert not TokenFile(tmp_path / "out" / "t").masked


def test_a_lost_or_foreign_mask_is_refused(tmp_path: Path) -> None:
    run(lines(tmp_path / "a.jsonl", [{"prompt": "p", "response": "r"}]))
    mask = tmp_path / "out" / "t.mask.bin"
    mask.write_bytes(mask.read_bytes() + b"\1")
    with pytest.raises(Refused, match="G203"):
        TokenFile(tmp_path / "out" / "t")
    mask.unlink()
    with pytest.raises(Refused, match="G201"):
        TokenFile(tmp_path / "out" / "t")


def test_long_texts_come_in_pieces_and_end_once(tmp_path: Path) -> None:
    text = "word " * 40_000
    path = lines(tmp_path / "a.jsonl", [{"prompt": text, "response": text}])
    found = list(read(Document(path=path, size=path.stat().st_size), form=Form(), tally=Tally()))
    assert "".join(p.text for p in found if p.target) == "".join(p.text for p in found if not p.target) == text
    assert [p.last for p in found] == [False] * (len(found) - 1) + [True]
    assert len(found) > 4


def test_command_takes_a_template_with_line_ends(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"messages": TALK}])
    arguments = [str(path), "--out", str(tmp_path / "out" / "t"), "--turn", "{role}\\n{content}\\n", "--json"]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.stdout
    answer = json.loads(done.stdout)
    assert (answer["targets"], answer["paths"]["mask"]) == (4, str(tmp_path / "out" / "t.mask.bin"))
    assert documents(tmp_path) == [("system\nS\nuser\nhi\nassistant\nyo\n$", "yo\n$")]
    assert np.fromfile(tmp_path / "out" / "t.mask.bin", np.uint8).sum() == 4
