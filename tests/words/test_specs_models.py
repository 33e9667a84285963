"""Models: presets, files, Hugging Face configs, and the one list of tensors."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from shardsmith.errors import Refused
from shardsmith.specs.hf_config import from_hf_config
from shardsmith.specs.hf_names import hf_tensors, located
from shardsmith.specs.hf_write import to_hf_config
from shardsmith.specs.library import model_named, model_names, model_origin, model_toml
from shardsmith.specs.model import ModelSpec, RopeScaling, YarnScaling, parameter_count, stored_weights, weights
from shardsmith.specs.model_rules import model_faults

COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "tiny-llama": 869_504,
    "tiny-gpt": 891_648,
}

DENSE = [name for name in model_names() if model_named(name).experts is None]

LLAMA31 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "hidden_act": "silu",
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "pretraining_tp": 1,
    "attention_dropout": 0.0, "attention_bias": False, "mlp_bias": False, "eos_token_id": [128001, 128008],
}  # fmt: skip


def codes(refused: pytest.ExceptionInfo[Refused]) -> set[str]:
    return {fault.code for fault in refused.value.faults}


def test_every_preset_has_its_published_count_and_an_origin() -> None:
    assert {name: parameter_count(model_named(name)) for name in DENSE} == COUNTS
    assert all(len(model_origin(name)) > 20 for name in model_names())
    assert all(model_named(name).name == name for name in model_names())


def test_tiny_models_split_by_two_and_four() -> None:
    for name in ("tiny-llama", "tiny-gpt"):
        spec = model_named(name)
        assert all(n % 4 == 0 for n in (spec.layers, spec.heads, spec.kv_heads, spec.ffn, spec.vocab, spec.hidden))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_weights_in_forward_order_each_once(name: str, tied: bool, qk_norm: bool) -> None:
    listed = weights(model_named(name).with_(tied=tied, qk_norm=qk_norm))
    names = [w.name for w in listed]
    assert len(set(names)) == len(names)
    assert names[0] == "embedding.weight"
    assert names.index("layers.0.norm1.weight") < names.index("layers.0.mlp.down.weight")
    assert names.index("layers.0.mlp.down.weight") < names.index("layers.1.norm1.weight")
    assert [w.layer for w in listed if w.layer is not None] == sorted(w.layer for w in listed if w.layer is not None)
    assert ("head.weight" in names) is not tied
    assert names[-1] == (
        "head.weight" if not tied else "final_norm.bias" if name == "tiny-gpt" else "final_norm.weight"
    )
    assert all(w.decay == (w.role not in ("norm", "head_norm") and not w.bias) for w in listed)
    assert all((w.init == "normal") == (len(w.shape) == 2) for w in listed)


def test_llama31_config_with_rope_scaling() -> None:
    spec = from_hf_config(LLAMA31)
    preset = model_named("llama3-8b")
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    assert spec.with_(name=preset.name, context=preset.context, rope_scaling=None) == preset
    assert (spec.context, spec.rope_scaling) == (131072, scaling)


def test_rope_parameters_of_newer_files_mean_the_same() -> None:
    data = {k: v for k, v in LLAMA31.items() if k not in ("rope_scaling", "rope_theta")}
    newer = data | {"rope_parameters": dict(LLAMA31["rope_scaling"], rope_theta=500000.0)}  # type: ignore[call-overload]
    assert from_hf_config(newer) == from_hf_config(LLAMA31)
    plain = from_hf_config(data | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}})
    assert (plain.rope_theta, plain.rope_scaling) == (5e4, None)


def test_missing_llama_keys_take_documented_defaults() -> None:
    spec = from_hf_config({"model_type": "llama"})
    assert spec == ModelSpec(
        name="llama", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=32000, context=2048,
        norm_eps=1e-6,
    )  # fmt: skip


def test_gpt2_config_is_the_gpt2_preset(tmp_path: Path) -> None:
    published = {
        "model_type": "gpt2", "activation_function": "gelu_new", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
        "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50257, "layer_norm_epsilon": 1e-05,
    }  # fmt: skip
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published))
    for way in (folder, folder / "config.json", str(folder)):
        assert model_named(way) == model_named("gpt2")
    assert from_hf_config({"model_type": "gpt2", "n_inner": None, "hidden_size": 1024, "n_head": 16}).ffn == 4096


def test_h14_head_size_is_hidden_over_query_heads_or_explicit() -> None:
    grouped = {"model_type": "llama", "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8}
    spec = from_hf_config(grouped)
    assert spec.head_dim == 128
    by_role = {w.role: w for w in weights(spec) if w.layer == 0}
    fused = sum(by_role[role].shape[0] for role in ("q", "k", "v"))
    assert fused == (40 + 16) * 128 == 7168
    assert fused // 8 == 896
    assert from_hf_config({**grouped, "head_dim": 160}).head_dim == 160
    with pytest.raises(Refused, match="M204"):
        from_hf_config({**grouped, "num_attention_heads": 48})


def test_h13_hub_names_are_refused_at_once_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", blocked)
    monkeypatch.setattr(socket, "getaddrinfo", blocked)
    began = time.perf_counter()
    with pytest.raises(Refused, match="download beforehand") as refused:
        model_named("meta-llama/Llama-2-7b-hf")
    assert time.perf_counter() - began < 1.0
    assert codes(refused) == {"M201"}
    assert model_named("llama2-7b").layers == 32


def test_options_that_are_not_built_are_refused_together() -> None:
    odd = LLAMA31 | {
        "hidden_act": "gelu",
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "quantization_config": {"quant_method": "gptq"},
        "hidden_size": "4096",
    }
    with pytest.raises(Refused) as refused:
        from_hf_config(odd)
    said = {fault.values[0][1].split(" = ")[0]: fault.code for fault in refused.value.faults}
    assert said == {
        "hidden_act": "M203", "rope_scaling.rope_type": "M203", "quantization_config": "M203", "hidden_size": "F102",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model_type": "mamba"}, "M202"),
        ({"model_type": None}, "M202"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}, "rope_scaling": None}, "M203"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "F103"),
        ({"partial_rotary_factor": 0.5}, "M203"),
        ({"num_key_value_heads": 5}, "M102"),
        ({"head_dim": 127}, "M103"),
        ({"num_attention_heads": 0}, "M101"),
        ({"num_hidden_layers": -1}, "M101"),
    ],
)
def test_each_impossible_llama_has_its_code(change: dict[str, Any], code: str) -> None:
    with pytest.raises(Refused) as refused:
        from_hf_config(LLAMA31 | change)
    assert codes(refused) == {code}


@pytest.mark.parametrize("key", ["scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"])
def test_gpt2_options_that_change_the_arithmetic(key: str) -> None:
    with pytest.raises(Refused) as refused:
        from_hf_config({"model_type": "gpt2", key: True, "activation_function": "relu"})
    assert {fault.values[0][1].split(" = ")[0] for fault in refused.value.faults} == {key, "activation_function"}


def test_files_that_are_not_there_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"F110.*config\.json"):
        model_named(tmp_path)
    with pytest.raises(Refused, match=r"F110.*none\.toml"):
        model_named(tmp_path / "none.toml")
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(Refused, match="F112"):
        model_named(tmp_path / "config.json")
    with pytest.raises(Refused, match="did you mean llama3-8b"):
        model_named("lama3-8b")


def test_model_file_with_field_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = "layers = 2\nhidden = 64\nheads = 6\nkv_heads = 4\nhead_dim = 15\nffn = 0\nvocab = 100\ncontext = 32\n"
    file.write_text('origin = "a notebook"\nname = "mine"\n' + text)
    with pytest.raises(Refused) as refused:
        model_named(file)
    assert codes(refused) == {"M101", "M102", "M103"}
    sound = text.replace("heads = 6", "heads = 8", 1).replace("15", "8").replace("ffn = 0", "ffn = 96")
    file.write_text('name = "mine"\n' + sound)
    assert model_named(file).ffn == 96
    file.write_text('name = "mine"\nhiden = 3\n' + sound)
    with pytest.raises(Refused, match="did you mean hidden"):
        model_named(file)


def test_rotary_settings_on_learned_positions_are_not_ignored() -> None:
    spec = model_named("tiny-gpt").with_(rope_theta=5e5, rope_scaling=RopeScaling())
    assert [fault.code for fault in model_faults(spec, "test")] == ["M104", "M104"]
    banded = model_named("tiny-llama").with_(rope_scaling=RopeScaling(low_freq_factor=4.0))
    assert [fault.code for fault in model_faults(banded, "test")] == ["M105"]


QWEN25 = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 131072,
    "max_window_layers": 28, "tie_word_embeddings": False, "hidden_act": "silu", "use_mrope": False,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_size": 5120, "intermediate_size": 25600,
    "max_position_embeddings": 40960, "max_window_layers": 64, "num_attention_heads": 64, "num_hidden_layers": 64,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "hidden_act": "silu",
    "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("published", "preset"), [(QWEN25, "qwen2.5-7b"), (QWEN3, "qwen3-32b"), (MISTRAL, "mistral-7b")]
)
def test_published_configs_are_the_presets(published: dict[str, Any], preset: str) -> None:
    assert from_hf_config(published).with_(name=preset) == model_named(preset)


def test_yarn_scaling_and_its_defaults() -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    scaling = from_hf_config(QWEN25 | {"rope_scaling": rope}).rope_scaling
    assert scaling == YarnScaling(kind="yarn", factor=4.0, original_context=32768)
    assert scaling.magnitude == pytest.approx(1.1386294361119891, abs=1e-15)
    from_lengths = from_hf_config(QWEN25 | {"rope_scaling": rope | {"factor": None}}).rope_scaling
    assert from_lengths == scaling
    without = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}}
    bare = from_hf_config(QWEN25 | without).rope_scaling
    assert isinstance(bare, YarnScaling)
    assert (bare.original_context, bare.magnitude) == (131072, 1.5)
    deepseek = from_hf_config(QWEN25 | {"rope_scaling": rope | {"mscale": 1.0, "mscale_all_dim": 1.0}}).rope_scaling
    assert isinstance(deepseek, YarnScaling)
    assert deepseek.magnitude == 1.0


def test_windows_are_of_all_layers_or_of_none() -> None:
    assert from_hf_config(MISTRAL | {"sliding_window": None}).window is None
    assert from_hf_config({"model_type": "mistral"}).window == 4096
    used = QWEN25 | {"use_sliding_window": True, "sliding_window": 512}
    assert from_hf_config(used).window is None  # from layer 28 on, and there are 28
    assert from_hf_config(used | {"max_window_layers": 0}).window == 512
    with pytest.raises(Refused, match="M203"):
        from_hf_config(used | {"max_window_layers": 14})
    with pytest.raises(Refused, match="M203"):
        from_hf_config(QWEN25 | {"layer_types": ["full_attention"] * 27 + ["sliding_attention"]})
    with pytest.raises(Refused, match="M107"):
        from_hf_config(MISTRAL | {"sliding_window": 0})


def test_impossible_yarn() -> None:
    found = model_named("tiny-llama").with_(rope_scaling=YarnScaling(kind="yarn", factor=0.5, original_context=64))
    assert [fault.code for fault in model_faults(found, "test")] == ["M106"]


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "output_bias": True, "rope_scaling": RopeScaling()},
    "mistral": {"window": 16},
    "qwen2": {"attention_bias": True, "window": 8, "head_dim": 20, "tied": True},
    "qwen3": {"qk_norm": True, "rope_scaling": YarnScaling(kind="yarn", factor=4.0, original_context=64, beta_fast=16)},
}


@pytest.mark.parametrize("name", [*DENSE, *VARIANTS])
def test_models_survive_a_config_and_a_model_file(name: str, tmp_path: Path) -> None:
    spec = model_named("tiny-llama").with_(**VARIANTS[name]) if name in VARIANTS else model_named(name)
    config = json.loads(json.dumps(to_hf_config(spec)))
    assert from_hf_config(config).with_(name=spec.name) == spec
    assert config["model_type"] == name or name not in VARIANTS
    (tmp_path / "model.toml").write_text(model_toml(spec))
    assert model_named(tmp_path / "model.toml") == spec


def test_a_model_that_no_type_computes_is_not_written_as_another() -> None:
    with pytest.raises(Refused, match=r"M205.*nearest is llama") as refused:
        to_hf_config(model_named("tiny-llama").with_(qk_norm=True, mlp_bias=True))
    assert refused.value.faults[0].values == (("tiny-llama", "qk_norm = True"),)
    assert refused.value.faults[0].hint == "qk_norm = False"
    with pytest.raises(Refused, match="M205"):
        to_hf_config(model_named("tiny-gpt").with_(kv_heads=4))


@pytest.mark.parametrize("name", DENSE)
def test_every_tensor_has_one_place_in_a_hugging_face_file(name: str) -> None:
    spec = model_named(name)
    found = hf_tensors(spec)
    assert sorted(p.name for t in found for p in t.parts) == sorted(w.name for w in weights(spec))
    assert sum(t.shape[0] * (t.shape[1] if len(t.shape) == 2 else 1) for t in found) == COUNTS[name]
    assert len({t.name for t in found}) == len(found)


@pytest.mark.parametrize("name", sorted(set(model_names()) - set(DENSE)))
def test_a_model_with_experts_is_read_back_as_it_was_written(name: str) -> None:
    spec = model_named(name)
    found = from_hf_config(json.loads(json.dumps(to_hf_config(spec)))).with_(name=name)
    if isinstance(spec.rope_scaling, YarnScaling) and isinstance(found.rope_scaling, YarnScaling):
        assert found.rope_scaling.score_factor == pytest.approx(spec.rope_scaling.score_factor, rel=1e-12)
        found = found.with_(rope_scaling=spec.rope_scaling)
    assert found == spec
    tensors = hf_tensors(spec)
    assert len({t.name for t in tensors}) == len(tensors)
    assert {p.name for t in tensors for p in t.parts} == {w.name for w in stored_weights(spec)}


def test_a_mixture_that_no_type_computes_is_not_written_as_another() -> None:
    spec = model_named("mixtral-8x7b")
    with pytest.raises(Refused, match=r"M205.*nearest is mixtral"):
        to_hf_config(spec.with_(ffn=100))


def test_names_of_gpt2_as_it_was_published() -> None:
    spec = model_named("gpt2").with_(layers=1)
    fused = next(t for t in hf_tensors(spec) if t.name == "transformer.h.0.attn.c_attn.weight")
    assert (fused.shape, fused.transposed, len(fused.parts)) == ((768, 2304), True, 3)
    names = [t.name.removeprefix("transformer.") for t in hf_tensors(spec)]
    where, surplus = located([*names, "h.0.attn.bias", "lm_head.weight", "h.1.ln_1.weight"], spec)
    assert where["transformer.wte.weight"] == "wte.weight"
    assert len(where) == len(names)
    assert surplus == ["h.1.ln_1.weight"]
