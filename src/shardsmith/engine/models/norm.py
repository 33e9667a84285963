"""Root-mean-square norm (Zhang and Sennrich 2019) in few passes over memory where torch has no fused kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) x weight over the last dim, computed in float32 or wider."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            out: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
            return out
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """On the CPU torch composes this norm of some 15 passes, forward and backward; here are 10, and less is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide, gain = _widened(x), _widened(weight)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        out: Tensor = (wide * scale).mul_(gain).to(x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide, gain = _widened(grad), _widened(weight)
        unit = _widened(x) * scale
        by_weight = (wide * unit).flatten(0, -2)
        # What moves x along itself is taken out: d out / d x projects on what is orthogonal to x.
        along = by_weight.mv(gain).div_(-x.shape[-1]).view(scale.shape)
        grad_x = (wide * gain).addcmul_(unit, along).mul_(scale)
        return grad_x.to(x.dtype), by_weight.sum(0).to(weight.dtype), None


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
