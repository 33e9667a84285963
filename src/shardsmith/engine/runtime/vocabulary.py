"""Embedding look-up and cross-entropy over a vocabulary that may be split by rows over ranks.

A rank holds the rows [first, first + V) of the full table; ranks at the end may hold fewer rows, or none,
so there is no padding and nothing to mask. Legend: S sequence, B sequences, D hidden, V local vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardsmith.engine.runtime.accumulate import add_rows
from shardsmith.engine.runtime.group import Group

IGNORED = -100
"""Label of a token that does not count in the loss."""


def look_up(tokens_SB: Tensor, weight_VD: Tensor, first: int, *, split: bool, shared: bool) -> Tensor:
    """Rows of the full table that this rank holds, zero elsewhere: partial [S, B, D], to be summed over ranks.

    `shared` says that the table has a second use in the same backward pass (see `Projection`).
    """
    if not split:
        return _rows(tokens_SB, weight_VD, shared)
    rows = weight_VD.shape[0]
    if rows == 0:
        # A rank without rows still takes part in the backward pass of the sum.
        return weight_VD.sum() + weight_VD.new_zeros((*tokens_SB.shape, weight_VD.shape[1]))
    local = tokens_SB - first
    outside = (local < 0) | (local >= rows)
    return _rows(local.masked_fill(outside, 0), weight_VD, shared).masked_fill(outside[..., None], 0.0)


def _rows(index_SB: Tensor, weight_VD: Tensor, shared: bool) -> Tensor:
    """The table's rows; on a GPU, where adding rows in place would not be deterministic, by torch's own function."""
    if shared or weight_VD.device.type != "cpu" or torch.compiler.is_compiling():
        return F.embedding(index_SB, weight_VD)
    out: Tensor = _Rows.apply(index_SB, weight_VD)
    return out


class _Rows(torch.autograd.Function):
    """Torch's backward makes a gradient of the whole table for every microbatch; this one touches the rows used."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.weight = weight
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        (index,) = ctx.saved_tensors
        add_rows(ctx.weight, index.flatten(), grad.flatten(0, -2))
        return None, None


def token_losses(logits_NV: Tensor, labels_N: Tensor, first: int, group: Group | None) -> Tensor:
    """Cross-entropy of each of N tokens, 0 where the label is IGNORED, in float32 or wider.

    Two small collectives: the maximum logit, then exponential sum and target logit stacked. Logits that are
    float32 or wider are overwritten: they become what the backward pass needs.
    """
    out: Tensor = _TokenLosses.apply(logits_NV, labels_N, first, group)
    return out


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: Group | None) -> Tensor:
        logits = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        rows = logits.shape[1]
        counts = labels != IGNORED
        if rows:
            peak = logits.amax(-1)
        else:
            peak = logits.new_full(labels.shape, -torch.inf)
        if group is not None:
            group.all_reduce(peak, "loss_max", dist.ReduceOp.MAX)
        local = labels - first
        here = (local >= 0) & (local < rows) & counts
        local = local.masked_fill(~here, 0)
        target = torch.zeros_like(peak)
        if rows:
            target = torch.where(here, logits.gather(1, local[:, None])[:, 0], target)
        exp = logits.sub_(peak[:, None]).exp_()
        sums = torch.stack([exp.sum(-1), target])
        if group is not None:
            group.all_reduce(sums, "loss_sums")
        ctx.save_for_backward(exp, sums[0], local, here, counts)
        return torch.where(counts, sums[0].log() + peak - sums[1], torch.zeros_like(peak))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exp, total, local, here, counts = ctx.saved_tensors
        grad = grad * counts
        grad_logits = exp.mul_((grad / total)[:, None])
        if exp.shape[1]:
            grad_logits.scatter_add_(1, local[:, None], (-grad * here)[:, None])
        return grad_logits, None, None, None
