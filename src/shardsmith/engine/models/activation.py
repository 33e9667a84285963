"""SwiGLU (Shazeer 2020) that saves its two inputs and nothing else."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) x up."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    out: Tensor = _SwiGLU.apply(gate, up)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        by_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return by_gate, F.silu(gate).mul_(grad)
