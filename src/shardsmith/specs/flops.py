"""FLOPs of a model and what share of a device's peak they are; the convention is part of every result.

A matrix product of an (m, k) with a (k, n) matrix counts 2 m k n FLOPs. Only matrix products count: norms,
activations, softmax and the embedding look-up do not (Narayanan et al. 2021; Chowdhery et al. 2022, appendix B).
The backward pass costs twice the forward pass. Attention scores count in full (`full`, every query with every
key, as in both papers) or halved (`causal`, since a query sees only the keys up to itself).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardsmith.errors import Code, Fault
from shardsmith.specs.model import ModelSpec, Weight, weights

Convention = Literal["causal", "full"]
Recompute = Literal["none", "selective", "full"]

ABOVE_PEAK = Code(
    code="H201",
    title="more FLOP/s than the device can do",
    severity="warning",
    because="a utilisation above 100 % means a wrong peak (other device, dtype, or sparsity counted) or a wrong time",
)


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs by part of the model, under the named attention `convention`.

    `items` has the parts `attention_projections`, `attention_scores`, `mlp` and `head`, and `recompute`
    where activations are computed twice.
    """

    items: Mapping[str, int] = field(hash=False)
    convention: Convention

    @property
    def total(self) -> int:
        """Sum over all items."""
        return sum(self.items.values())

    def scaled(self, factor: int) -> Flops:
        """Every item times `factor`."""
        return Flops(items={name: count * factor for name, count in self.items.items()}, convention=self.convention)


def forward_flops(spec: ModelSpec, *, seq_len: int, convention: Convention = "causal") -> Flops:
    """FLOPs of one token's forward pass in sequences of `seq_len` tokens, averaged over the sequence.

    Two for each element of the matrices that a token meets (of routed experts the chosen ones), scores 4 S d heads
    a layer (both products; halved when causal), head 2 h V. With a window w < S a query has w keys, or on
    average w (1 - w / 2S) when causal, as the first ones have fewer. Under `mlp` stand router and experts, too.
    """
    keys = min(seq_len, spec.window or seq_len)
    value_dim = spec.latent.value if spec.latent else spec.head_dim
    # Scores are products of head_dim channels, outputs of value_dim; causal halves both.
    channels = spec.heads * (spec.head_dim + value_dim)
    scores = 2 * keys * channels if convention == "full" else keys * (2 * seq_len - keys) * channels // seq_len
    items = {"attention_projections": 0, "attention_scores": scores * spec.layers, "mlp": 0}
    for weight in weights(spec):
        if weight.layer is None or weight.bias or len(weight.shape) == 1:
            continue
        part = "attention_projections" if ".attention." in weight.name else "mlp"
        items[part] += 2 * _met(weight, spec)
    items["head"] = 2 * spec.hidden * spec.vocab
    return Flops(items=items, convention=convention)


def _met(weight: Weight, spec: ModelSpec) -> int:
    """Elements of a matrix that one token meets: of stacked experts only the chosen ones."""
    if spec.experts is None or not weight.role.startswith("expert_"):
        return weight.numel
    return weight.numel // spec.experts.count * spec.experts.top_k


def model_flops(spec: ModelSpec, *, seq_len: int, tokens: int, convention: Convention = "causal") -> Flops:
    """FLOPs that training on `tokens` tokens needs: forward and backward, nothing computed twice."""
    return forward_flops(spec, seq_len=seq_len, convention=convention).scaled(3 * tokens)


def hardware_flops(
    spec: ModelSpec, *, seq_len: int, tokens: int, recompute: Recompute, convention: Convention = "causal"
) -> Flops:
    """FLOPs that the devices perform: `model_flops` plus the item `recompute`.

    `selective` runs the attention scores forward a second time (Korthikanti et al. 2023), `full` the whole
    block; the head is never recomputed, which gives 96 B S L h^2 (1 + S/6h + V/16Lh) for a GPT with full
    recompute and scores in full (Narayanan et al. 2021).
    """
    forward = forward_flops(spec, seq_len=seq_len, convention=convention).items
    again = {
        "none": 0,
        "selective": forward["attention_scores"],
        "full": forward["attention_projections"] + forward["attention_scores"] + forward["mlp"],
    }[recompute]
    needed = model_flops(spec, seq_len=seq_len, tokens=tokens, convention=convention)
    return Flops(items={**needed.items, "recompute": again * tokens}, convention=convention)


def mfu(flops_per_second: float, peak: float | None) -> float | None:
    """Share of `peak` (dense FLOP/s of the device in the dtype used) that is achieved; None for an unknown peak.

    From `model_flops` it is the model FLOPs utilisation, from `hardware_flops` the hardware utilisation.
    Both arguments are per device, or both over all devices.
    """
    return None if peak is None else flops_per_second / peak


def utilisation_faults(utilisation: float | None, *, source: str) -> list[Fault]:
    """A warning (H201) for a utilisation above 1, which no device can reach; empty otherwise."""
    if utilisation is None or utilisation <= 1.0:
        return []
    return [
        ABOVE_PEAK.fault(
            f"a utilisation of {utilisation:.1%} is impossible",
            (source, f"utilisation = {utilisation:.3f}"),
            hint="check the device and dtype of the cluster: peaks are dense, without sparsity",
        )
    ]
