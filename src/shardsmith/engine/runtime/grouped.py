"""One matrix per expert: rows of tokens, sorted by expert, each times the matrix of its expert.

Two kernels compute it. `grouped_mm` is torch's grouped product, one call for all experts; it takes no float64, and
wants rows whose bytes are a multiple of 16. `loop` multiplies expert by expert, in any dtype. Legend of shape
suffixes: T rows of tokens, E experts of this rank, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardsmith.engine.runtime.accumulate import add_products, add_stack
from shardsmith.engine.runtime.linear import WeightQueue
from shardsmith.layout.axes.expert import takes_grouped

Kernel = Literal["loop", "grouped_mm"]


def kernel_for(dtype: torch.dtype, *widths: int) -> Kernel:
    """Which kernel multiplies matrices of `dtype` whose rows have these `widths`."""
    return "grouped_mm" if takes_grouped(dtype.itemsize, *widths) else "loop"


class Stack(nn.Module):
    """Holder of one matrix [E, O, I] for each expert; `grouped` does the work."""

    def __init__(self, experts: int, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, rows, columns))


@dataclass(frozen=True)
class Sorted:
    """How rows that are sorted by expert are told apart: `counts` [E] of them, int64."""

    counts: Tensor

    @cached_property
    def ends(self) -> Tensor:
        """The row behind each expert's last one, int32, as `grouped_mm` takes it."""
        return self.counts.cumsum(0).to(torch.int32)

    @cached_property
    def bounds(self) -> list[int]:
        """The same on the host, with the 0 in front."""
        return [0, *self.counts.cumsum(0).tolist()]


def grouped(x_TI: Tensor, rows: Sorted, stacks: list[Stack], queue: WeightQueue | None = None) -> list[Tensor]:
    """Outputs [T, O] of all `stacks` for rows `x` [T, I] that `rows` tells apart.

    Weight gradients are added to `.grad` in place by the backward pass, which fires the parameters' hooks; those
    of an expert without rows are zero, and they, too, count as done.
    """
    return list(_Grouped.apply(x_TI, rows, queue, stacks, *(s.weight for s in stacks)))


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Sorted, queue: WeightQueue | None, stacks: list[Stack], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rows, ctx.queue, ctx.stacks = rows, queue, stacks
        ctx.save_for_backward(x, *weights)
        return tuple(_product(x, w.transpose(1, 2), rows) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        made = [g.contiguous() for g in grads]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(made[0], weights[0], ctx.rows)
            for g, w in zip(made[1:], weights[1:], strict=True):
                grad_x += _product(g, w, ctx.rows)
        # Detached: see `runtime/linear.py`.
        compute = _accumulation(x.detach(), made, [s.weight for s in ctx.stacks], ctx.rows)
        if ctx.queue is not None and ctx.queue.deferring:
            ctx.queue.pending.append(compute)
        elif any(ctx.needs_input_grad[4:]):
            compute()
        return (grad_x, None, None, None, *(None for _ in weights))


def _product(x: Tensor, matrices: Tensor, rows: Sorted) -> Tensor:
    """Rows `x` [T, n] times the matrix [E, n, m] of their expert."""
    if kernel_for(x.dtype, *matrices.shape[1:]) == "grouped_mm":
        return F.grouped_mm(x, matrices, offs=rows.ends)
    out, bounds = x.new_empty(x.shape[0], matrices.shape[2]), rows.bounds
    for e, matrix in enumerate(matrices):
        torch.mm(x[bounds[e] : bounds[e + 1]], matrix, out=out[bounds[e] : bounds[e + 1]])
    return out


def _accumulation(x: Tensor, grads: list[Tensor], parameters: list[nn.Parameter], rows: Sorted) -> Callable[[], None]:
    """The weight gradients: needs inputs and output gradients, never the weights' values."""

    @torch.no_grad()
    def compute() -> None:
        for grad, parameter in zip(grads, parameters, strict=True):
            if kernel_for(x.dtype, x.shape[1], grad.shape[1]) == "grouped_mm":
                add_stack(parameter, F.grouped_mm(grad.t(), x, offs=rows.ends))
            else:
                add_products(parameter, grad, x, rows.bounds)

    return compute
