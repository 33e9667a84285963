"""Logits equal to those of transformers, with their weights read by us and ours read by them; nothing is fetched.

transformers computes norms and rotary angles in float32 whatever the model's dtype. So every family is compared
twice: as it is (float32's rounding is the floor), and with its float32 read as float64, at 1e-10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardsmith.engine.checkpoint.hugging_face import read_hugging_face, write_hugging_face
from shardsmith.engine.checkpoint.source import in_memory
from shardsmith.engine.models.decoder import Stage
from shardsmith.engine.models.whole import whole_model
from shardsmith.specs.hf_config import from_hf_config
from shardsmith.specs.model import ModelSpec

LENGTH, SEQUENCES = 48, 2
LOOP = {"experts_implementation": "eager"}
"""Theirs by default takes no float64."""
COMMON = {
    "vocab_size": 67, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
GPT2 = {
    "vocab_size": 67, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {**COMMON, "num_key_value_heads": 6}),
    "llama-biases": ("llama", {**COMMON, "attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "llama3": ("llama", {**COMMON, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-yarn": ("llama", {**COMMON, "rope_parameters": YARN}),
    "qwen2": ("qwen2", COMMON),
    "qwen2-yarn": ("qwen2", {**COMMON, "rope_parameters": {**YARN, "attention_factor": 1.3, "truncate": False}}),
    "qwen2-window": ("qwen2", {**COMMON, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}),
    "qwen3": ("qwen3", {**COMMON, "head_dim": 20, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**COMMON, "sliding_window": 7}),
    "gpt2": ("gpt2", GPT2),
    "gpt2-untied": ("gpt2", {**GPT2, "tie_word_embeddings": False, "n_inner": 100, "activation_function": "gelu"}),
}

LATENT = {
    **COMMON, "num_key_value_heads": 6, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "n_routed_experts": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 3,
    "num_hidden_layers": 3, "first_k_dense_replace": 1,
}  # fmt: skip
MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
FAMILIES |= {
    "mixtral": ("mixtral", {**COMMON, "num_local_experts": 5, "sliding_window": 7}),
    "qwen2-moe": (
        "qwen2_moe",
        {**COMMON, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {**COMMON, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
         "head_dim": 10},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {**LATENT, "q_lora_rank": 20, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 1.7},
    ),
    "deepseek-v2-lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "rope_parameters": MSCALE}),
    "deepseek-v3": (
        "deepseek_v3",
        {**LATENT, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "rope_parameters": MSCALE},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _imports() -> None:
    """Import here what every child would import again."""
    from transformers.models.deepseek_v2 import modeling_deepseek_v2  # noqa: F401
    from transformers.models.deepseek_v3 import modeling_deepseek_v3  # noqa: F401
    from transformers.models.gpt2 import modeling_gpt2  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401
    from transformers.models.mistral import modeling_mistral  # noqa: F401
    from transformers.models.mixtral import modeling_mixtral  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401
    from transformers.models.qwen2_moe import modeling_qwen2_moe  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
    from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401


@contextmanager
def float32_read_as_float64() -> Iterator[None]:
    """Whatever computes in float32 by name computes in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def their_model(kind: str, options: dict[str, Any]) -> Any:
    """A model of transformers in float64, whose norms and biases are random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options), **LOOP).double()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name or "ln_" in name), std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    return model.eval()


def their_logits(model: Any, tokens_BS: Tensor, *, lifted: bool) -> Tensor:
    if not lifted:
        return model(tokens_BS).logits
    with float32_read_as_float64():
        rotary = getattr(model.base_model, "rotary_emb", None)
        if rotary is not None:
            rotary.__init__(model.config)  # its frequencies were computed in float32 when it was made
        return model(tokens_BS).logits


def our_model(spec: ModelSpec, tensors: dict[str, Tensor]) -> Stage:
    module = whole_model(spec, seed=0, dtype=torch.float64, device=torch.device("cpu"))
    module.load_state_dict(tensors)
    return module


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).abs().max() / right.abs().max())


@torch.no_grad()
def both_ways(kind: str, options: dict[str, Any], folder: Path, shard_bytes: int) -> dict[str, float]:
    """Errors of our logits on their weights, of theirs on the weights that we wrote, and of the weights."""
    from transformers import AutoModelForCausalLM

    model = their_model(kind, options)
    theirs, ours = folder / "theirs", folder / "ours"
    model.save_pretrained(theirs, max_shard_size=shard_bytes)
    source = read_hugging_face(theirs)
    module = our_model(source.model, dict(source))
    tokens_SB = torch.randint(source.model.vocab, (LENGTH, SEQUENCES), generator=torch.Generator().manual_seed(2))
    logits_BSV = module(tokens_SB, torch.arange(LENGTH)[:, None]).transpose(0, 1)

    ours.mkdir()
    write_hugging_face(in_memory(source.model, module.state_dict()), ours, shard_bytes=shard_bytes)
    again = AutoModelForCausalLM.from_pretrained(ours, dtype=torch.float64, **LOOP).eval()
    kept = dict(model.named_parameters())
    assert kept.keys() == dict(again.named_parameters()).keys()
    assert from_hf_config(ours) == source.model.with_(name="ours")
    return {
        "as_is": error(logits_BSV, their_logits(model, tokens_SB.t(), lifted=False)),
        "read": error(logits_BSV, their_logits(model, tokens_SB.t(), lifted=True)),
        "written": error(logits_BSV, their_logits(again, tokens_SB.t(), lifted=True)),
        "weights": max(float((p - kept[name]).abs().max()) for name, p in again.named_parameters()),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers_both_ways(
    family: str, run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    kind, options = FAMILIES[family]
    (found,) = run_ranks(1, both_ways, kind, options, tmp_path, 100_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    assert found["weights"] == 0.0
    assert found["read"] <= 1e-10, found
    assert found["written"] <= 1e-10, found
    assert found["as_is"] <= 1e-5, found
