"""Attention of some queries to some keys, with the log-sum-exp that lets partial results be merged.

Legend: B sequences, H query heads, G key/value heads (a divisor of H), R queries, K keys, E head_dim. All tensors are
[B, heads, rows, E]; log-sum-exps [B, H, R] are float32, or float64 with float64 inputs. What a query attends to may
come in several blocks: each gives `out`, the average of the values it saw, and `lse`, the logarithm of the sum of its
exponentials, and `merge` weighs averages by exp(lse) (Milakov and Gimelshein 2018). A query that sees no key of a
block has out = 0 and lse = -infinity there; no kernel is trusted with that. The gradient of a block needs the merged
out and lse alone, since its probabilities are exp(scores - lse).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ATEN = torch.ops.aten

_FLASH_DTYPES = (torch.float16, torch.bfloat16)


class Seen(NamedTuple):
    """What queries see of the keys of a block.

    `causal`: query i sees the first i + 1 keys. `mask` bool [B or 1, 1, R, K]: True where it sees a key (None: all).
    `keep` [B, H, R, K]: factors on the probabilities, dropout in its scaled form (None: nothing is dropped).
    """

    causal: bool = False
    mask: Tensor | None = None
    keep: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
    """(out [B, H, R, E], lse [B, H, R]) of one block."""
    if seen.keep is not None or not _has_kernel(q, seen):
        return _attend_by_products(q, k, v, seen, scale)
    if q.device.type == "cpu":
        flash = ATEN._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q, k, v, 0.0, seen.causal, attn_mask=_added(seen.mask, q.dtype), scale=scale)
        return _nothing_seen(out, lse, seen.mask)
    out, lse, *_ = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, seen.causal, False, scale=scale)
    return out, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of one block, for the `grad` of the merged `out` with its merged `lse`."""
    if seen.keep is not None or not _has_kernel(q, seen):
        return _backward_by_products(grad, q, k, v, out, lse, seen, scale)
    if q.device.type == "cpu":
        flash = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        mask = _added(seen.mask, q.dtype)
        found = flash(grad, q, k, v, out, lse.contiguous(), 0.0, seen.causal, attn_mask=mask, scale=scale)
    else:
        flash = ATEN._scaled_dot_product_flash_attention_backward
        rows, keys, nothing = q.shape[2], k.shape[2], torch.zeros(2, dtype=torch.uint64, device=q.device)
        ends = (None, None, rows, keys, 0.0, seen.causal, nothing, nothing)
        found = flash(grad, q, k, v, out, lse.contiguous(), *ends, scale=scale)
    return found[0], found[1], found[2]


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge a block's `more` into `out` [B, H, R, E] (float32 or wider) and `lse` [B, H, R], in place.

    Every query must have seen a key in what was merged so far: a finite lse keeps the weights defined.
    """
    out.lerp_(more.to(out.dtype), torch.sigmoid(more_lse - lse)[..., None])
    lse.copy_(torch.logaddexp(lse, more_lse))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results and gradients are summed: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _has_kernel(q: Tensor, seen: Seen) -> bool:
    """Whether a fused kernel takes this block; that of GPUs takes half precision, no masks, and heads of 8 n."""
    if q.device.type == "cpu":
        return True
    return q.device.type == "cuda" and q.dtype in _FLASH_DTYPES and seen.mask is None and q.shape[-1] % 8 == 0


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """`mask` as what is added to scores: the CPU kernel takes masks of the queries' dtype alone."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _nothing_seen(out: Tensor, lse: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Set right what the kernel says of queries that see nothing (it gives them an lse of 0)."""
    if mask is None:
        return out, lse
    blind = ~mask.any(-1)
    return out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)


def _scores(q: Tensor, k: Tensor, seen: Seen, scale: float) -> Tensor:
    """Scores [B, H, R, K], float32 or wider, -infinity where nothing is seen."""
    scores = (q @ _each(k, q).transpose(2, 3)).to(wide(q.dtype)) * scale
    if seen.causal:
        rows, keys = scores.shape[2:]
        ahead = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return scores if seen.mask is None else scores.masked_fill(~seen.mask, -torch.inf)


def _attend_by_products(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
    """`attend` from plain products: R x K numbers in memory at once."""
    scores = _scores(q, k, seen, scale)
    lse = scores.logsumexp(-1)
    shares = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()
    if seen.keep is not None:
        shares = shares * seen.keep
    return shares.to(v.dtype) @ _each(v, q), lse


def _backward_by_products(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    shares = (_scores(q, k, seen, scale) - lse[..., None]).exp_()
    kept = shares if seen.keep is None else shares * seen.keep
    grad_v = kept.to(grad.dtype).transpose(2, 3) @ grad
    grad_kept = (grad @ _each(v, q).transpose(2, 3)).to(shares.dtype)
    if seen.keep is not None:
        grad_kept = grad_kept * seen.keep
    along = (grad.to(shares.dtype) * out.to(shares.dtype)).sum(-1, keepdim=True)
    grad_scores = (shares * (grad_kept - along) * scale).to(q.dtype)
    grad_k = grad_scores.transpose(2, 3) @ q
    return grad_scores @ _each(k, q), _summed(grad_k, k), _summed(grad_v, v)


def _each(x: Tensor, q: Tensor) -> Tensor:
    """Key/value heads [B, G, K, E] once for each query head they serve."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _summed(grad: Tensor, x: Tensor) -> Tensor:
    """Gradients of `_each`, summed over the query heads that share a key/value head."""
    if grad.shape[1] == x.shape[1]:
        return grad
    total: Tensor = grad.unflatten(1, (x.shape[1], -1)).sum(2)
    return total
