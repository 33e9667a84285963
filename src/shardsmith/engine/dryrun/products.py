"""FLOPs of the operators that multiply matrices: 2 m k n for (m, k) by (k, n); every other operator counts nothing.

Attention counts its two products forward and four backward, over the pairs of query and key that the operator is
given: half of them where it is told to be causal. That a fused kernel makes the scores again in backward is its own
affair, as everywhere in the field (Narayanan et al. 2021), and so is what it skips inside a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

ATEN = torch.ops.aten
Product = Callable[[tuple[Any, ...], Mapping[str, Any], Any], tuple[str, int]]


def _mm(first: int, part: str = "linear") -> Product:
    """A product (or batch of them) of the arguments `first` and `first` + 1."""

    def count(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> tuple[str, int]:
        return part, 2 * args[first].numel() * args[first + 1].shape[-1]

    return count


def _attention(query: int, products: int, causal: int) -> Product:
    """Fused attention with query, key, value from argument `query` on; `causal` is the place of that flag."""

    def count(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> tuple[str, int]:
        q, k, v = args[query : query + 3]
        is_causal = args[causal] if len(args) > causal else kwargs.get("is_causal", False)
        batch, heads, length, channels = q.shape
        pairs = batch * heads * length * (length if is_causal else 2 * k.shape[2])
        return "scores", products // 2 * pairs * (channels + v.shape[3])

    return count


def _grouped(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> tuple[str, int]:
    """Rows [T, n] times the matrix [E, n, m] of their expert, or [n, T] times [T, m] for the rows of each expert."""
    return "linear", 2 * args[0].numel() * args[1].shape[-1]


PRODUCTS: dict[Any, Product] = {
    ATEN.mm.default: _mm(0),
    ATEN.mm.out: _mm(0),
    ATEN.bmm.default: _mm(0, "scores"),
    ATEN.addmm.default: _mm(1),
    ATEN.addmm.out: _mm(1),
    ATEN.addmm_.default: _mm(1),
    ATEN._grouped_mm.default: _grouped,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default: _attention(0, 2, 4),
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention(1, 4, 7),
}
"""Each operator that multiplies matrices: (arguments, keywords, output) -> (part, FLOPs)."""
