"""Sampling: the greedy text is the arg-max of the model, drawn text depends on the seed, the tokenizer comes along."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardsmith import api
from shardsmith.engine.checkpoint.convert import convert
from shardsmith.engine.checkpoint.run_folder import write_run
from shardsmith.engine.checkpoint.source import in_memory
from shardsmith.engine.dataset.tokenizer import train_bpe
from shardsmith.errors import Refused
from shardsmith.specs.library import model_named
from shardsmith.specs.model import weights

pytestmark = pytest.mark.ranks

MODEL = model_named("tiny-llama").with_(
    layers=1, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=16, vocab=300, context=8
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose model says the next id after each one: its head is its embedding, shifted by one row."""
    folder = tmp_path / "run"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {w.name: torch.zeros(w.shape) if len(w.shape) > 1 else torch.ones(w.shape) for w in weights(MODEL)}
    table = torch.nn.functional.normalize(torch.randn(MODEL.vocab, MODEL.hidden, generator=generator), dim=1)
    tensors["embedding.weight"], tensors["head.weight"] = table, table.roll(1, 0) * 20
    write_run(in_memory(MODEL, tensors), folder)
    tokenizer = train_bpe(iter(["to be or not to be " * 20]), vocab=300)
    (folder / "tokenizer.json").write_bytes(tokenizer.content)
    return folder


def test_the_likeliest_tokens_follow_beyond_the_context(run: Path) -> None:
    (sample,) = api.generate(run, ["a"], tokens=20)
    first = sample.tokens[0]
    assert sample.tokens == tuple(range(first, first + 20)), "each id is followed by the next one"
    assert sample.text
    assert not sample.ended


def test_drawn_tokens_depend_on_the_seed_alone(run: Path) -> None:
    def drawn(**options: object) -> tuple[int, ...]:
        (sample,) = api.generate(run, ["to be"], tokens=6, temperature=40.0, **options)
        return sample.tokens

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    (greedy,) = api.generate(run, ["to be"], tokens=6)
    assert drawn(top_k=1) == greedy.tokens


def test_the_tokenizer_and_its_end_go_through_convert(run: Path, tmp_path: Path) -> None:
    found = convert(run, tmp_path / "hub")
    assert found.carried == ("tokenizer.json",)
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["eos_token_id"] == 0
    # an end that only a config.json states survives the way there and back
    config = json.loads((tmp_path / "hub" / "config.json").read_text()) | {"eos_token_id": [7, 9]}
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "hub", tmp_path / "again")
    convert(tmp_path / "again", tmp_path / "third")
    assert json.loads((tmp_path / "third" / "config.json").read_text())["eos_token_id"] == [7, 9]
    (sample,) = api.generate(tmp_path / "third", [""], tokens=9)
    assert (sample.tokens, sample.ended) == (tuple(range(1, 8)), True)


def test_without_a_tokenizer_one_must_be_named(run: Path) -> None:
    (run / "tokenizer.json").unlink()
    with pytest.raises(Refused) as refused:
        api.generate(run, ["a"])
    assert refused.value.faults[0].code == "G106"
    (sample,) = api.generate(run, ["a"], tokens=2, tokenizer="byte")
    assert sample.tokens == (ord("a") + 1, ord("a") + 2)
