"""`prepare`: which files become which tokens, and that nothing half done stays behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from shardsmith.cli.prepare import command
from shardsmith.engine.dataset.indexed import TokenFile, tokenizer_of
from shardsmith.engine.dataset.prepare import Prepared, prepare
from shardsmith.engine.dataset.sources import Document, Tally, find, pieces
from shardsmith.engine.dataset.tokenizer import ByteTokenizer, open_tokenizer, train_bpe
from shardsmith.errors import Refused

needs_tokenizers = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import tokenizers"], capture_output=True).returncode != 0,
    reason="the tokenizers library is not installed",
)
TEXT = "the cat sat on the mat and the dog sat on the log\n" * 40


def texts_of(prefix: Path) -> list[str]:
    file, tokenizer = TokenFile(prefix), tokenizer_of(TokenFile(prefix))
    borders = file.boundaries
    documents = [file.tokens(int(borders[d]), int(borders[d + 1])) for d in range(file.documents)]
    assert all(document[-1] == tokenizer.eod for document in documents)
    return [tokenizer.decode(document[:-1].tolist()) for document in documents]


def codes(refused: pytest.ExceptionInfo[Refused]) -> list[str]:
    return [fault.code for fault in refused.value.faults]


def run(folder: Path, *inputs: str, **options: object) -> Prepared:
    return prepare([str(folder / name) for name in inputs], folder / "out" / "t", **options)  # type: ignore[arg-type]


def test_each_file_is_a_document_in_sorted_order(tmp_path: Path) -> None:
    for name, text in [("b.txt", "second"), ("a.txt", "first"), ("sub/c.md", "third: ä 中"), ("x.bin", "no")]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden.txt").write_text("hidden")
    found = run(tmp_path, "")
    assert texts_of(tmp_path / "out" / "t") == ["first", "second", "third: ä 中"]
    answer = found.as_json()  # 5 + 6 + 13 bytes, and an end for each
    assert (answer["documents"], answer["bytes"], answer["tokens"]) == (3, 24, 27)
    assert (answer["bytes_per_token"], answer["vocab"], answer["max_id"], answer["eod"]) == (24 / 27, 257, 256, 256)
    assert (answer["tokenizer"], answer["dtype"], answer["skipped"], answer["replaced"]) == ("byte", "uint16", [], 0)
    assert sorted(os.listdir(tmp_path / "out")) == ["t.bin", "t.idx", "t.json"]


def test_inputs_keep_their_order_and_count_once(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.py"):
        (tmp_path / name).write_text(name)
    run(tmp_path, "b.txt", "*.txt", "c.py", "b.txt")
    assert texts_of(tmp_path / "out" / "t") == ["b.txt", "a.txt", "c.py"]


def test_patterns_match_names_and_paths_below(tmp_path: Path) -> None:
    for name in ("one/a.log", "one/deep/b.log", "two/c.log", "two/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert len(find([str(tmp_path)], patterns=["*.log"]).documents) == 3
    assert [d.path.name for d in find([str(tmp_path)], patterns=["one/*", "d.*"]).documents] == [
        "a.log",
        "b.log",
        "d.txt",
    ]
    assert [d.path.name for d in find([str(tmp_path / "**" / "*.log")]).documents] == ["a.log", "b.log", "c.log"]


def test_what_is_not_text_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "utf16.txt").write_text("hello", encoding="utf-16")
    (tmp_path / "latin.txt").write_bytes("caf\xe9 \xfe\xff and \ufffd".encode("latin-1", "xmlcharrefreplace"))
    (tmp_path / "mark.txt").write_bytes("\ufefftext \ufffd".encode())
    found = run(tmp_path, "")
    assert {s.path.name: s.reason.split(" (")[0] for s in found.skipped} == {
        "empty.txt": "is empty",
        "utf16.txt": "is not UTF-8 text",
    }
    assert (found.replaced, found.malformed) == (3, 1)
    assert texts_of(tmp_path / "out" / "t") == ["caf\ufffd \ufffd\ufffd and &#65533;", "text \ufffd"]


def test_limit_cuts_the_last_document_between_characters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab" * 4)
    (tmp_path / "b.txt").write_text("中中中")
    (tmp_path / "c.txt").write_text("never")
    found = run(tmp_path, "", limit_mb=13e-6)
    assert texts_of(tmp_path / "out" / "t") == ["abababab", "中"]
    assert (found.meta.bytes, found.replaced) == (13, 0)


@settings(deadline=None, max_examples=60)
@given(st.text(st.sampled_from("ab \n\t\u00e9中\ufffd😀"), max_size=60), st.integers(1, 9))
def test_pieces_join_to_the_text(tmp_path_factory: pytest.TempPathFactory, text: str, size: int) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_bytes(text.encode())
    tally = Tally()
    found = list(pieces(Document(path=path, size=path.stat().st_size), tally=tally, size=size))
    assert "".join(found) == text
    assert all(0 < len(piece) <= size for piece in found)
    assert (tally.read, tally.replaced, tally.malformed) == (len(text.encode()), 0, 0)


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=60), st.integers(1, 9))
def test_pieces_of_any_bytes_are_as_python_decodes_them(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "raw.txt"
    path.write_bytes(raw)
    tally = Tally()
    text = "".join(pieces(Document(path=path, size=len(raw)), tally=tally, size=size))
    assert text == raw.decode(errors="replace").removeprefix("\ufeff")
    assert tally.replaced == raw.decode(errors="replace").count("\ufffd") - raw.count("\ufffd".encode())


@needs_tokenizers
def test_bpe_is_trained_saved_and_reused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT + "é中")
    found = run(tmp_path, "a.txt", tokenizer="bpe:270")
    assert (found.meta.vocab, found.asked_vocab, found.meta.eod) == (270, 270, 0)
    assert found.meta.tokens < len(TEXT)
    assert texts_of(tmp_path / "out" / "t") == [TEXT + "é中"]
    (tmp_path / "b.txt").write_text("the cat")
    again = prepare([str(tmp_path / "b.txt")], tmp_path / "valid" / "t", tokenizer=str(tmp_path / "out"))
    assert again.meta.tokenizer_file == "../out/tokenizer.json"
    assert again.meta.fingerprint == found.meta.fingerprint
    assert texts_of(tmp_path / "valid" / "t") == ["the cat"]
    (tmp_path / "out" / "tokenizer.json").write_text((tmp_path / "out" / "tokenizer.json").read_text() + "\n")
    with pytest.raises(Refused, match="G206"):
        tokenizer_of(TokenFile(tmp_path / "valid" / "t"))


@needs_tokenizers
def test_same_text_same_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT + "".join(chr(i) for i in range(32, 900)))
    made = []
    for seed in ("1", "2"):  # python's hash seed, and a fresh library with seeds of its own
        out = tmp_path / seed / "t"
        script = "import sys; from shardsmith import api; api.prepare([sys.argv[1]], sys.argv[2], tokenizer='bpe:300')"
        env = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", script, tmp_path / "a.txt", out], check=True, timeout=60, env=env)
        made.append({name: (out.parent / name).read_bytes() for name in sorted(os.listdir(out.parent))})
    assert made[0] == made[1]
    assert sorted(made[0]) == ["t.bin", "t.idx", "t.json", "tokenizer.json"]


@needs_tokenizers
def test_cutting_long_documents_does_not_change_their_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT.replace("\n", "\r\n") + "   spaced    out \n\n  lines\t\t" * 50)
    text = (tmp_path / "a.txt").read_bytes().decode()
    tokenizer = train_bpe(iter([text]), vocab=320)
    document = Document(path=tmp_path / "a.txt", size=len(text.encode()))
    cut = list(pieces(document, tally=Tally(), size=100))
    assert len(cut) > 20
    joined = [token for part in tokenizer.encode(cut) for token in part.tolist()]
    assert joined == tokenizer.encode([text])[0].tolist()


@needs_tokenizers
def test_text_that_mentions_the_end_token_does_not_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("before <|endoftext|> after")
    run(tmp_path, "a.txt", tokenizer="bpe:257")
    assert texts_of(tmp_path / "out" / "t") == ["before <|endoftext|> after"]
    ids = TokenFile(tmp_path / "out" / "t").tokens(0, 27).tolist()
    assert (ids.count(0), ids[-1]) == (1, 0)


@needs_tokenizers
def test_end_of_document_token_is_found_or_asked_for(tmp_path: Path) -> None:
    raw = train_bpe(iter(["abc"]), vocab=257, eod="<odd>").content
    (tmp_path / "tokenizer.json").write_bytes(raw)
    with pytest.raises(Refused, match="G105") as refused:
        open_tokenizer(str(tmp_path))
    assert "<odd>" in refused.value.faults[0].hint
    with pytest.raises(Refused, match="has no token '<other>'"):
        open_tokenizer(str(tmp_path), eod="<other>")
    assert open_tokenizer(str(tmp_path), eod="<odd>").eod == 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<odd>"}}))
    assert open_tokenizer(str(tmp_path)).eod_token == "<odd>"


@needs_tokenizers
def test_f09_vocabulary_counts_added_tokens(tmp_path: Path) -> None:
    table = json.loads(train_bpe(iter(["abc"]), vocab=257).content)
    added = {**table["added_tokens"][0], "id": 300, "content": "<extra>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**table, "added_tokens": [*table["added_tokens"], added]}))
    found = open_tokenizer(str(tmp_path))
    assert found.vocab > 257
    assert found.vocab == max(found.raw.get_vocab().values()) + 1  # type: ignore[attr-defined]


@needs_tokenizers
def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for name, code in [
        (str(tmp_path), "G104"),
        ("nothing", "G101"),
        ("bpe", "G101"),
        ("bpe:x", "G101"),
        ("bpe:256", "G102"),
    ]:
        (tmp_path / "a.txt").write_text("text")
        with pytest.raises(Refused) as refused:
            run(tmp_path, "a.txt", tokenizer=name)
        assert codes(refused) == [code]
    with pytest.raises(Refused, match="G105"):
        run(tmp_path, "a.txt", tokenizer="byte", eod="</s>")
    assert not (tmp_path / "out").exists()


def test_byte_tokenizer_skips_ids_that_are_no_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([104, 256, 105, 300, 0xC3]) == "hi\ufffd"


def test_all_faults_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    run(tmp_path, "a.txt")
    with pytest.raises(Refused) as refused:
        run(tmp_path, "gone.txt", "*.nothing", tokenizer="bpe:5")
    assert codes(refused) == ["G102", "G004", "G001", "G001"]


def test_folder_without_text_and_text_files_without_text_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_text("text")
    with pytest.raises(Refused, match="G001"):
        run(tmp_path, "")
    (tmp_path / "a.txt").touch()
    with pytest.raises(Refused, match="G002") as refused:
        run(tmp_path, "")
    assert refused.value.faults[0].values[0][1] == "is empty"


def test_existing_output_needs_force(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    run(tmp_path, "a.txt")
    (tmp_path / "a.txt").write_text("two")
    with pytest.raises(Refused, match="G004"):
        run(tmp_path, "a.txt")
    assert texts_of(tmp_path / "out" / "t") == ["one"]
    run(tmp_path, "a.txt", force=True)
    assert texts_of(tmp_path / "out" / "t") == ["two"]


def test_output_that_cannot_be_written_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").write_text("a file where the folder should be")
    with pytest.raises(Refused, match="G005"):
        run(tmp_path, "a.txt")
    (tmp_path / "folder.bin").mkdir()
    with pytest.raises(Refused, match="G005"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "folder", force=True)


def test_a_failure_on_the_way_leaves_the_old_output_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    run(tmp_path, "a.txt")

    def stop(doing: str, read: int, total: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "a.txt").write_text("two")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "a.txt", force=True, watch=stop)
    assert sorted(os.listdir(tmp_path / "out")) == ["t.bin", "t.idx", "t.json"]
    assert texts_of(tmp_path / "out" / "t") == ["one"]


def test_full_disk_is_a_coded_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(Refused, match="No space left") as refused:
        run(tmp_path, "a.txt")
    assert codes(refused) == ["G005"]
    assert os.listdir(tmp_path / "out") == []


def test_stopped_between_two_files_leaves_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("one")
    run(tmp_path, "a.txt")
    rename, done = os.replace, []

    def once(source: Path, target: Path) -> None:
        if done:
            raise OSError(5, "Input/output error")
        done.append(target.name)
        rename(source, target)

    monkeypatch.setattr(os, "replace", once)
    with pytest.raises(Refused, match="G005"):
        run(tmp_path, "a.txt", force=True)
    with pytest.raises(Refused, match="G201"):  # never an old index beside new tokens
        TokenFile(tmp_path / "out" / "t")
    assert done == ["t.bin"]


def test_output_inside_the_input_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    prepare([str(tmp_path)], tmp_path / "t", patterns=["*"])
    found = prepare([str(tmp_path)], tmp_path / "t", patterns=["*"], force=True)
    assert texts_of(tmp_path / "t") == ["text"]
    assert {s.path.name for s in found.skipped} == {"t.bin", "t.idx", "t.json"}


def test_command_prints_json_and_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").touch()
    arguments = [str(tmp_path), "--out", str(tmp_path / "out" / "t")]
    done = CliRunner().invoke(command, [*arguments, "--json"])
    assert done.exit_code == 0
    answer = json.loads(done.stdout)
    assert (answer["documents"], answer["tokens"], answer["bytes"], answer["vocab"]) == (1, 10, 9, 257)
    assert answer["paths"]["idx"] == str(tmp_path / "out" / "t.idx")
    refused = CliRunner().invoke(command, [*arguments, "--json"])
    assert (refused.exit_code, json.loads(refused.stdout)["errors"][0]["code"]) == (1, "G004")
    shown = CliRunner().invoke(command, [*arguments, "--force"])
    assert "bytes per token" in shown.stdout
    assert "b.txt is empty" in shown.stdout.replace("\n", "")


def test_prepare_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    script = (
        "import sys; sys.modules['torch'] = None; from shardsmith import api; api.prepare(sys.argv[1:2], sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "a.txt", tmp_path / "t"], check=True, timeout=60)
    assert texts_of(tmp_path / "t") == ["text"]
