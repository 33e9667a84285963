"""Folders of weights: sound ones round trip, unsound ones are refused with file and tensor, and memory stays small."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardsmith.cli.main import main
from shardsmith.engine.checkpoint.convert import convert
from shardsmith.engine.checkpoint.hugging_face import INDEX_FILE, read_hugging_face, write_hugging_face
from shardsmith.engine.checkpoint.run_folder import read_run, write_run
from shardsmith.engine.checkpoint.safetensors_file import Entry, write_safetensors
from shardsmith.engine.checkpoint.source import Source, in_memory
from shardsmith.errors import Refused
from shardsmith.specs.library import model_named
from shardsmith.specs.model import ModelSpec, weights

LLAMA = ModelSpec(name="m", layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=24, vocab=5, context=32)
TIED = LLAMA.with_(tied=True)
GPT = model_named("tiny-gpt").with_(name="g", layers=1, hidden=16, heads=4, kv_heads=4, head_dim=4, ffn=24, vocab=5)


def tensors_of(model: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {w.name: torch.randn(w.shape, generator=generator).to(dtype) for w in weights(model)}


def written(model: ModelSpec, folder: Path, shard_bytes: int = 10**9) -> dict[str, Tensor]:
    folder.mkdir()
    tensors = tensors_of(model)
    write_hugging_face(in_memory(model, tensors), folder, shard_bytes=shard_bytes)
    return tensors


def refused(folder: Path, code: str) -> list[str]:
    with pytest.raises(Refused) as caught:
        read_hugging_face(folder)
    assert {fault.code for fault in caught.value.faults} == {code}
    return [fault.message for fault in caught.value.faults]


def equal(found: Source, tensors: dict[str, Tensor]) -> bool:
    got = dict(found)
    return got.keys() == tensors.keys() and all(torch.equal(got[name], t) for name, t in tensors.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", [LLAMA, TIED, GPT])
def test_a_run_becomes_a_hugging_face_folder_and_a_run_again(
    model: ModelSpec, dtype: torch.dtype, tmp_path: Path
) -> None:
    run, hub, again = tmp_path / "run", tmp_path / "deep" / "hub", tmp_path / "again"
    run.mkdir()
    tensors = tensors_of(model, dtype)
    write_run(in_memory(model, tensors), run)
    out, back = convert(run, hub), convert(hub, again)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    assert (out.bytes, back.bytes, back.tensors) == (size, size, len(tensors))
    assert out.tensors == len(load_file(hub / "model.safetensors"))
    assert equal(read_run(again), tensors)
    assert read_run(again).model == model.with_(name="hub")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "deep", "run"]


def test_d11_the_index_names_what_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    tensors = written(TIED, folder, shard_bytes=4000)
    index = json.loads((folder / INDEX_FILE).read_text())
    held = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            assert all(opened.get_tensor(name).numel() for name in names)
            held |= dict.fromkeys(names, file.name)
    assert index["weight_map"] == held
    assert len(set(held.values())) >= 2
    assert "lm_head.weight" not in held
    assert index["metadata"]["total_size"] == sum(4 * t.numel() for t in tensors.values())
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert equal(read_hugging_face(folder), tensors)


def test_d13_only_rows_of_the_logical_vocabulary_are_written(tmp_path: Path) -> None:
    written(LLAMA, tmp_path / "m")
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert (stored["model.embed_tokens.weight"].shape, stored["lm_head.weight"].shape) == ((5, 16), (5, 16))


def test_d15_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    written(LLAMA, folder, shard_bytes=6000)
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) >= 3
    files[1].unlink()
    (message,) = refused(folder, "F401")
    assert message.startswith(f"{files[1].name} is missing, and with it ")
    files[2].write_bytes(files[2].read_bytes()[:-1])
    with pytest.raises(Refused) as caught:
        read_hugging_face(folder)
    assert [fault.code for fault in caught.value.faults] == ["F401", "F405"]
    assert files[2].name in caught.value.faults[1].message


def test_d15_a_tensor_that_only_the_index_knows_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    written(LLAMA, folder, shard_bytes=6000)
    file = sorted(folder.glob("model-*.safetensors"))[1]
    held = load_file(file)
    name = sorted(held)[0]
    save_file({k: v for k, v in held.items() if k != name}, file)
    assert refused(folder, "F402") == [f"{file.name} lacks {name}, which the index places there"]


def test_tensors_must_be_those_of_the_config(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    written(LLAMA, folder)
    file = folder / "model.safetensors"
    held = load_file(file)
    q, norm = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
    save_file(held | {"model.layers.2.mlp.up_proj.weight": held[q].clone()}, file)
    (message,) = refused(folder, "F403")
    assert message == "m has no tensor model.layers.2.mlp.up_proj.weight"
    save_file(held | {q: held[q][:8].clone(), norm: held[norm].to(torch.int8)}, file)
    assert refused(folder, "F404") == [
        f"{q} is [8, 16], but the model's config makes it [16, 16]",
        f"{norm} is stored as I8",
    ]
    save_file({k: v for k, v in held.items() if k not in (q, norm)}, file)
    assert [message.split()[-1] for message in refused(folder, "F402")] == [q, norm]
    file.write_bytes(b"not safetensors")
    refused(folder, "F405")
    file.unlink()
    refused(folder, "F110")
    (folder / INDEX_FILE).write_text("{}")
    refused(folder, "F405")


def test_gpt2_as_it_was_published(tmp_path: Path) -> None:
    """Names without `transformer.`, and the causal mask stored as a buffer."""
    folder = tmp_path / "g"
    tensors = written(GPT, folder)
    file = folder / "model.safetensors"
    bare = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}, file)
    assert equal(read_hugging_face(folder), tensors)


def test_a_tied_head_in_the_file_is_not_read_twice(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    tensors = written(TIED, folder)
    held = load_file(folder / "model.safetensors")
    save_file(held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    assert equal(read_hugging_face(folder), tensors)


@pytest.mark.parametrize("model", [LLAMA, GPT])
def test_c08_a_writer_holds_one_tensor_at_a_time(model: ModelSpec, tmp_path: Path) -> None:
    alive: dict[str, int] = {}
    peak = 0
    by_name = {w.name: w for w in weights(model)}

    def read(name: str) -> Tensor:
        nonlocal peak
        tensor = torch.ones(by_name[name].shape)
        alive[name] = tensor.numel()
        peak = max(peak, sum(alive.values()))
        weakref.finalize(tensor, alive.pop, name)
        return tensor

    source = Source(model=model, dtypes=dict.fromkeys(by_name, torch.float32), read=read)
    write_run(source, tmp_path)
    largest = max(w.numel for w in by_name.values())
    assert peak == largest
    write_hugging_face(source, tmp_path)
    fused = 3 * model.hidden**2 if model is GPT else 0
    assert peak == max(largest, fused)
    assert not alive


def test_c08_reading_keeps_nothing(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    (grown,) = run_ranks(1, _grown, tmp_path / "m")
    assert grown < 3 * 2**20, f"anonymous memory grew by {grown / 2**20:.1f} MiB over 40 tensors of 1 MiB"


def _grown(folder: Path) -> int:
    """Bytes of anonymous memory by which converting 40 tensors of 1 MiB raises the process."""
    model = LLAMA.with_(layers=5, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=512)
    folder.mkdir()
    write_hugging_face(in_memory(model, tensors_of(model)), folder)
    convert(folder, folder.parent / "warm")  # code and buffers that every conversion needs
    before, peak = _anonymous(), 0
    for _, tensor in read_hugging_face(folder):
        peak = max(peak, _anonymous())
        del tensor
    return peak - before


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    def broken() -> Any:
        yield [torch.ones(2)]
        raise RuntimeError("pulled plug")

    entries = [Entry(name=name, dtype=torch.float32, shape=(2,)) for name in "ab"]
    with pytest.raises(RuntimeError, match="pulled plug"):
        write_safetensors(tmp_path / "x.safetensors", entries, broken())
    assert not (tmp_path / "x.safetensors").exists()


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    written(GPT, tmp_path / "m")
    odd = LLAMA.with_(mlp_bias=True, window=4)
    (tmp_path / "odd").mkdir()
    write_run(in_memory(odd, tensors_of(odd)), tmp_path / "odd")
    with pytest.raises(Refused, match="M205"):
        convert(tmp_path / "odd", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "odd"]


def test_the_verb(tmp_path: Path) -> None:
    written(GPT, tmp_path / "m")
    arguments = ["convert", str(tmp_path / "m"), str(tmp_path / "run")]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    data = json.loads(result.stdout)
    count = sum(w.numel for w in weights(GPT))
    assert (result.exit_code, data["tensors"], data["bytes"]) == (0, len(weights(GPT)), 4 * count)
    again = CliRunner().invoke(main, arguments)
    assert (again.exit_code, "F407" in again.stderr) == (1, True)
    (tmp_path / "empty").mkdir()
    nothing = CliRunner().invoke(main, ["convert", str(tmp_path / "empty"), str(tmp_path / "x")])
    assert (nothing.exit_code, "F406" in nothing.stderr) == (1, True)
    back = CliRunner().invoke(main, ["convert", str(tmp_path / "run"), str(tmp_path / "hub")])
    assert back.exit_code == 0
    assert "Hugging Face folder" in back.stdout
