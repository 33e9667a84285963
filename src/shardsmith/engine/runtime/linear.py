"""The one linear: matrices that share an input, with an optional collective on either side.

Tensor parallelism, split backward and overlap all come down to the same question: what happens to the
input before the product, to the output after it, and when the weight gradient is computed. This file
answers it once. Legend of shape suffixes: S sequence (this rank's part under sequence parallelism),
B sequences of the microbatch, I input width, O output width (this rank's).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardsmith.engine.runtime import traced
from shardsmith.engine.runtime.accumulate import add_product
from shardsmith.engine.runtime.group import Group

Enter = Literal["none", "copy", "gather"]
Leave = Literal["none", "reduce", "scatter"]


@dataclass(frozen=True, kw_only=True)
class Seam:
    """Where a block meets the tensor axis.

    enter: `copy` (forward: nothing; backward: all-reduce of the input gradient) or `gather` (sequence
    parallel: all-gather; backward: reduce-scatter, and the input is gathered again for the weight gradient).
    leave: `reduce` (all-reduce of the partial output; backward: nothing) or `scatter` (reduce-scatter;
    backward: all-gather). These are f and g of Shoeybi et al. 2019 and Korthikanti et al. 2022. `place` names
    the part of the model (layer, embedding, head) under which the collectives are counted.
    """

    group: Group | None = None
    enter: Enter = "none"
    leave: Leave = "none"
    place: str = "layer"
    entering: Seam = field(init=False, repr=False, compare=False)
    """the half before the block"""
    leaving: Seam = field(init=False, repr=False, compare=False)
    """the half behind the block"""

    def __post_init__(self) -> None:
        # Plain attributes, made once: a compiler can read them, and no call pays for making them.
        object.__setattr__(self, "entering", self if self.leave == "none" else replace(self, leave="none"))
        object.__setattr__(self, "leaving", self if self.enter == "none" else replace(self, enter="none"))


OPEN = Seam()
"""The seam of a single device: no collective on either side."""


@dataclass
class WeightQueue:
    """Weight gradients put off by a split backward: filled while `deferring`, emptied by the W action."""

    deferring: bool = False
    pending: list[Callable[[], None]] = field(default_factory=list)

    def take(self) -> list[Callable[[], None]]:
        """Hand over everything that is pending."""
        taken, self.pending = self.pending, []
        return taken


class Projection(nn.Module):
    """Holder of one matrix [O, I] and an optional bias [O]; `linear` does the work.

    `shared` says that the matrix has a second use in the same backward pass: then autograd must sum the two
    gradients, so that hooks fire once.
    """

    def __init__(self, rows: int, columns: int, *, bias: bool) -> None:
        super().__init__()
        self.shared = False
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None


def linear(x: Tensor, projections: list[Projection], seam: Seam, queue: WeightQueue | None = None) -> list[Tensor]:
    """Outputs of all `projections` of one input `x` [S, B, I], entered and left through `seam`.

    One collective serves them all. A row-parallel projection (`leave` set) stands alone, and its bias is
    added once, after the sum over ranks. Weight gradients are added to `.grad` in place by the backward pass
    itself, which fires the parameters' hooks; a compiled block leaves that to autograd.
    """
    if torch.compiler.is_compiling():
        return _linear_traced(x, projections, seam)
    weights = [p.weight for p in projections]
    biases = [p.bias for p in projections]
    holders = projections
    if seam.leave == "none":
        return list(_Linear.apply(x, seam, queue, holders, len(weights), *weights, *biases))
    assert len(projections) == 1, "only one projection can leave through a reducing seam"
    (partial,) = _Linear.apply(x, seam, queue, holders, 1, weights[0], None)
    out = leave(partial, seam)
    return [out if biases[0] is None else out + biases[0]]


def _linear_traced(x: Tensor, projections: list[Projection], seam: Seam) -> list[Tensor]:
    """The same outputs from operators that a compiler can trace; weight gradients are left to autograd."""
    group = seam.group
    if group is not None and group.handle is not None:
        name = group.handle.group_name
        if seam.enter == "gather":
            x = traced.all_gather(x, name, group.size)
        elif seam.enter == "copy":
            x = traced.copy_in(x, name)
        if seam.leave != "none":
            (only,) = projections
            partial = F.linear(x, only.weight)
            reducing = seam.leave == "reduce"
            out = traced.all_reduce(partial, name) if reducing else traced.reduce_scatter(partial, name, group.size)
            return [out if only.bias is None else out + only.bias]
    return [F.linear(x, p.weight, p.bias) for p in projections]


def leave(partial: Tensor, seam: Seam) -> Tensor:
    """Sum `partial` [S, ...] over the tensor ranks, as the seam says; its backward is the counterpart."""
    if seam.group is None or seam.leave == "none":
        return partial
    out: Tensor = _Leave.apply(partial, seam)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        seam: Seam,
        queue: WeightQueue | None,
        holders: list[Projection],
        count: int,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = tensors[:count], tensors[count:]
        ctx.seam, ctx.queue, ctx.holders, ctx.count = seam, queue, holders, count
        ctx.has_bias = [b is not None for b in biases]
        ctx.save_for_backward(x, *weights)
        full = entered(x, seam, "forward")
        return tuple(F.linear(full, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = [_rows(g) for g in grads]
        grad_x = _input_gradient(rows, weights, grads[0].shape[:-1], ctx.seam) if ctx.needs_input_grad[0] else None
        grad_w = _weight_gradients(ctx, x, rows)
        grad_b = tuple(g.sum(0) if has else None for g, has in zip(rows, ctx.has_bias, strict=True))
        return (grad_x, None, None, None, None, *grad_w, *grad_b)


def _input_gradient(rows: list[Tensor], weights: list[Tensor], shape: torch.Size, seam: Seam) -> Tensor:
    """The gradient [*shape, I] of the input; apart, so that what is not yet reduced is gone when it returns."""
    flat = torch.matmul(rows[0], weights[0])
    for g, w in zip(rows[1:], weights[1:], strict=True):
        flat.addmm_(g, w)
    return entered_backward(flat.view(*shape, -1), seam)


def _weight_gradients(ctx: Any, x: Tensor, rows: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Weight gradients for autograd, or None for each where they are added in place, now or by the W action."""
    nothing: tuple[None, ...] = (None,) * ctx.count
    if not any(ctx.needs_input_grad[5 : 5 + ctx.count]):
        return nothing
    deferring = ctx.queue is not None and ctx.queue.deferring
    if any(h.shared for h in ctx.holders) and not deferring:
        full = _rows(entered(x, ctx.seam, "backward"))
        return tuple(g.t().matmul(full) for g in rows)
    # Detached: what waits for its weight gradient would otherwise keep the graph behind it, and the stage's input.
    compute = _accumulation(x.detach(), rows, [h.weight for h in ctx.holders], ctx.seam)
    if deferring:
        ctx.queue.pending.append(compute)
    else:
        compute()
    return nothing


def entered(x: Tensor, seam: Seam, phase: str) -> Tensor:
    """The input as the product needs it: gathered where the seam says so."""
    if seam.enter == "gather" and seam.group is not None:
        return seam.group.all_gather(x, f"{seam.place}_{phase}")
    return x


def entered_backward(grad: Tensor, seam: Seam) -> Tensor:
    """The gradient of the input before it entered: summed over the tensor ranks."""
    if seam.group is None or seam.enter == "none":
        return grad
    if seam.enter == "gather":
        return seam.group.reduce_scatter(grad, f"{seam.place}_backward")
    return seam.group.all_reduce(grad.contiguous(), f"{seam.place}_backward")


def _accumulation(x: Tensor, rows: list[Tensor], parameters: list[nn.Parameter], seam: Seam) -> Callable[[], None]:
    """The weight gradients of one linear: needs its input and output gradients, never the weights' values."""

    @torch.no_grad()
    def compute() -> None:
        full = _rows(entered(x, seam, "backward"))
        for grad, parameter in zip(rows, parameters, strict=True):
            add_product(parameter, grad, full)

    return compute


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, seam: Seam) -> Tensor:
        ctx.seam = seam
        assert seam.group is not None, "a reducing seam has a group"
        if seam.leave == "scatter":
            return seam.group.reduce_scatter(partial, f"{seam.place}_forward")
        ctx.mark_dirty(partial)
        return seam.group.all_reduce(partial, f"{seam.place}_forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        seam: Seam = ctx.seam
        assert seam.group is not None, "a reducing seam has a group"
        if seam.leave == "scatter":
            return seam.group.all_gather(grad, f"{seam.place}_backward"), None
        return grad, None


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)
