"""Names of our tensors in Hugging Face checkpoints: a table a family, read in both directions.

Most tensors differ in their name alone. GPT-2 keeps the matrices of its blocks transposed, [in, out], and
query, key and value side by side in one tensor. Each routed expert has tensors of its own there, which we stack.
Rotary channels need no reordering but in DeepSeek's files: this package and Hugging Face both rotate the pairs
(i, i + n / 2) of n channels, those files have the pairs (2 i, 2 i + 1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from shardsmith.specs.hf_write import hf_kind
from shardsmith.specs.model import ModelSpec, Weight, stored_weights

_LLAMA: dict[str, tuple[str, ...]] = {
    "model.embed_tokens": ("embedding",),
    "model.layers.{}.input_layernorm": ("layers.{}.norm1",),
    "model.layers.{}.self_attn.q_proj": ("layers.{}.attention.q",),
    "model.layers.{}.self_attn.k_proj": ("layers.{}.attention.k",),
    "model.layers.{}.self_attn.v_proj": ("layers.{}.attention.v",),
    "model.layers.{}.self_attn.q_norm": ("layers.{}.attention.q_norm",),
    "model.layers.{}.self_attn.k_norm": ("layers.{}.attention.k_norm",),
    "model.layers.{}.self_attn.o_proj": ("layers.{}.attention.o",),
    "model.layers.{}.post_attention_layernorm": ("layers.{}.norm2",),
    "model.layers.{}.mlp.gate_proj": ("layers.{}.mlp.gate",),
    "model.layers.{}.mlp.up_proj": ("layers.{}.mlp.up",),
    "model.layers.{}.mlp.down_proj": ("layers.{}.mlp.down",),
    "model.norm": ("final_norm",),
    "lm_head": ("head",),
}
_MIXTRAL = _LLAMA | {
    "model.layers.{}.block_sparse_moe.gate": ("layers.{}.mlp.router",),
    "model.layers.{}.block_sparse_moe.experts.{{}}.w1": ("layers.{}.mlp.experts.gate",),
    "model.layers.{}.block_sparse_moe.experts.{{}}.w3": ("layers.{}.mlp.experts.up",),
    "model.layers.{}.block_sparse_moe.experts.{{}}.w2": ("layers.{}.mlp.experts.down",),
}
_QWEN_MOE = _LLAMA | {
    "model.layers.{}.mlp.gate": ("layers.{}.mlp.router",),
    **{
        f"model.layers.{{}}.mlp.{theirs}.{matrix}_proj": (f"layers.{{}}.mlp.{ours}.{matrix}",)
        for theirs, ours in (("experts.{{}}", "experts"), ("shared_expert", "shared"))
        for matrix in ("gate", "up", "down")
    },
    "model.layers.{}.mlp.shared_expert_gate": ("layers.{}.mlp.shared_gate",),
}
_DEEPSEEK = {k.replace("shared_expert.", "shared_experts."): v for k, v in _QWEN_MOE.items()} | {
    "model.layers.{}.self_attn.q_a_proj": ("layers.{}.attention.q_down",),
    "model.layers.{}.self_attn.q_a_layernorm": ("layers.{}.attention.q_norm",),
    "model.layers.{}.self_attn.kv_a_proj_with_mqa": ("layers.{}.attention.kv_down",),
    "model.layers.{}.self_attn.kv_a_layernorm": ("layers.{}.attention.kv_norm",),
    "model.layers.{}.self_attn.kv_b_proj": ("layers.{}.attention.kv_up",),
}
_TABLES = {
    "mixtral": _MIXTRAL,
    "qwen2_moe": _QWEN_MOE,
    "qwen3_moe": _QWEN_MOE,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
}
_BALANCE = "model.layers.{}.mlp.gate.e_score_correction_bias"
_GPT2: dict[str, tuple[str, ...]] = {
    "transformer.wte": ("embedding",),
    "transformer.wpe": ("position",),
    "transformer.h.{}.ln_1": ("layers.{}.norm1",),
    "transformer.h.{}.attn.c_attn": ("layers.{}.attention.q", "layers.{}.attention.k", "layers.{}.attention.v"),
    "transformer.h.{}.attn.c_proj": ("layers.{}.attention.o",),
    "transformer.h.{}.ln_2": ("layers.{}.norm2",),
    "transformer.h.{}.mlp.c_fc": ("layers.{}.mlp.up",),
    "transformer.h.{}.mlp.c_proj": ("layers.{}.mlp.down",),
    "transformer.ln_f": ("final_norm",),
    "lm_head": ("head",),
}
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")

# Masks and frequencies that older files keep beside the weights; they follow from the config.
_BUFFERS = re.compile(r"(.*\.attn\.(bias|masked_bias)|.*\.rotary_emb\.inv_freq)")


@dataclass(frozen=True, kw_only=True)
class Turned:
    """Rows in groups of `group`, of which those from `first` on are rotary channels, in pairs of neighbours there."""

    group: int
    first: int


@dataclass(frozen=True, kw_only=True)
class HFTensor:
    """One tensor of a Hugging Face checkpoint: our `parts`, joined along dim 0, then transposed where it says so.

    With `expert` it is that one of the stacked experts of its only part; `turned` says how rotary rows are ordered.
    """

    name: str
    parts: tuple[Weight, ...]
    transposed: bool = False
    expert: int | None = None
    turned: Turned | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        if self.expert is not None:
            return self.parts[0].shape[1:]
        rows = sum(part.shape[0] for part in self.parts)
        shape = (rows, *self.parts[0].shape[1:])
        return shape[::-1] if self.transposed else shape


def hf_tensors(spec: ModelSpec) -> tuple[HFTensor, ...]:
    """Every tensor that a Hugging Face checkpoint of `spec` holds, in the order of the forward pass.

    A tied head is not among them. Raises `Refused` (M205) for a model that no Hugging Face type computes.
    """
    kind = hf_kind(spec).model_type
    table = _GPT2 if kind == "gpt2" else _TABLES.get(kind, _LLAMA)
    if spec.latent is not None and spec.latent.q_rank is not None:
        table = table | {"model.layers.{}.self_attn.q_b_proj": ("layers.{}.attention.q",)}
        table.pop("model.layers.{}.self_attn.q_proj")
        table.pop("model.layers.{}.self_attn.q_norm")
    by_name = {w.name: w for w in stored_weights(spec)}
    found: list[HFTensor] = []
    placed: set[str] = set()
    for weight in by_name.values():
        if weight.name in placed:
            continue
        module, _, what = weight.name.rpartition(".")
        layer = "" if weight.layer is None else str(weight.layer)
        if what == "balance":
            found.append(HFTensor(name=_BALANCE.format(layer), parts=(weight,)))
            continue
        theirs, ours = next((t, o) for t, o in table.items() if module in [name.format(layer) for name in o])
        parts = tuple(by_name[f"{name.format(layer)}.{what}"] for name in ours)
        placed |= {part.name for part in parts}
        name = f"{theirs.format(layer)}.{what}"
        if weight.role.startswith("expert_"):
            experts = range(weight.shape[0])
            found += [HFTensor(name=name.format(e), parts=parts, expert=e) for e in experts]
            continue
        transposed = table is _GPT2 and name.endswith(_TRANSPOSED)
        found.append(HFTensor(name=name, parts=parts, transposed=transposed, turned=_turned(weight, spec)))
    return tuple(found)


def _turned(weight: Weight, spec: ModelSpec) -> Turned | None:
    latent = spec.latent
    if latent is None or weight.role not in ("q", "kv_down"):
        return None
    if weight.role == "q":
        return Turned(group=spec.head_dim, first=latent.nope)
    return Turned(group=latent.kv_rank + latent.rope, first=latent.kv_rank)


def located(names: Iterable[str], spec: ModelSpec) -> tuple[dict[str, str], list[str]]:
    """Where a checkpoint of `spec` that holds tensors of these `names` keeps each: expected name -> its name there.

    Files of a bare model leave the prefix out (`wte.weight`). Beside it: surplus names, sorted. Buffers that
    follow from the config may stand in a file, and so may the head of a tied model, and layers that predict
    further tokens.
    """
    known = {tensor.name for tensor in hf_tensors(spec)}
    found: dict[str, str] = {}
    rest = []
    for name in names:
        spelled = next((prefix + name for prefix in ("", "transformer.", "model.") if prefix + name in known), None)
        if spelled is not None:
            found[spelled] = name
        elif not (_BUFFERS.fullmatch(name) or (spec.tied and name == "lm_head.weight") or _is_further(name, spec)):
            rest.append(name)
    return found, sorted(rest)


def _is_further(name: str, spec: ModelSpec) -> bool:
    """Whether the tensor belongs to a layer behind the last, which predicts further tokens."""
    layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    return layer is not None and spec.layers <= int(layer[1]) < spec.layers + spec.mtp_layers
