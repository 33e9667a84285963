"""Names of our tensors in Hugging Face checkpoints: a table a family, read in both directions.

Most tensors differ in their name alone. GPT-2 keeps the matrices of its blocks transposed, [in, out], and
query, key and value side by side in one tensor. Rotary channels need no reordering: this package and
Hugging Face both rotate the pairs (i, i + head_dim / 2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from shardsmith.specs.hf_write import hf_kind
from shardsmith.specs.model import ModelSpec, Weight, weights

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
class HFTensor:
    """One tensor of a Hugging Face checkpoint: our `parts`, joined along dim 0, then transposed where it says so."""

    name: str
    parts: tuple[Weight, ...]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        rows = sum(part.shape[0] for part in self.parts)
        shape = (rows, *self.parts[0].shape[1:])
        return shape[::-1] if self.transposed else shape


def hf_tensors(spec: ModelSpec) -> tuple[HFTensor, ...]:
    """Every tensor that a Hugging Face checkpoint of `spec` holds, in the order of the forward pass.

    A tied head is not among them. Raises `Refused` (M205) for a model that no Hugging Face type computes.
    """
    table = _GPT2 if hf_kind(spec).model_type == "gpt2" else _LLAMA
    by_name = {w.name: w for w in weights(spec)}
    found: list[HFTensor] = []
    placed: set[str] = set()
    for weight in by_name.values():
        if weight.name in placed:
            continue
        module, _, kind = weight.name.rpartition(".")
        layer = "" if weight.layer is None else str(weight.layer)
        theirs, ours = next((t, o) for t, o in table.items() if module in [name.format(layer) for name in o])
        parts = tuple(by_name[f"{name.format(layer)}.{kind}"] for name in ours)
        placed |= {part.name for part in parts}
        name = f"{theirs.format(layer)}.{kind}"
        found.append(HFTensor(name=name, parts=parts, transposed=table is _GPT2 and name.endswith(_TRANSPOSED)))
    return tuple(found)


def located(names: Iterable[str], spec: ModelSpec) -> tuple[dict[str, str], list[str]]:
    """Where a checkpoint of `spec` that holds tensors of these `names` keeps each: expected name -> its name there.

    Files of a bare model leave the prefix out (`wte.weight`). Beside it: surplus names, sorted. Buffers that
    follow from the config may stand in a file, and so may the head of a tied model.
    """
    known = {tensor.name for tensor in hf_tensors(spec)}
    found: dict[str, str] = {}
    rest = []
    for name in names:
        spelled = next((prefix + name for prefix in ("", "transformer.", "model.") if prefix + name in known), None)
        if spelled is not None:
            found[spelled] = name
        elif not (_BUFFERS.fullmatch(name) or (spec.tied and name == "lm_head.weight")):
            rest.append(name)
    return found, sorted(rest)
