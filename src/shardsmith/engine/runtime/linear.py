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

from shardsmith.engine.runtime import overlapped, traced
from shardsmith.engine.runtime.accumulate import add_product
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.overlapped import Box, Turns, Waiting
from shardsmith.plan.plan import Overlap

Enter = Literal["none", "copy", "gather"]
Leave = Literal["none", "reduce", "scatter"]


@dataclass(frozen=True, kw_only=True)
class Seam:
    """Where a block meets the tensor axis.

    enter: `copy` (forward: nothing; backward: all-reduce of the input gradient) or `gather` (sequence
    parallel: all-gather; backward: reduce-scatter, and the input is gathered again for the weight gradient).
    leave: `reduce` (all-reduce of the partial output; backward: nothing) or `scatter` (reduce-scatter;
    backward: all-gather). These are f and g of Shoeybi et al. 2019 and Korthikanti et al. 2022. `place` names
    the part of the model (layer, embedding, head) under which the collectives are counted. `overlap` says what the
    collectives may be hidden behind (see `overlapped.py`).
    """

    group: Group | None = None
    enter: Enter = "none"
    leave: Leave = "none"
    place: str = "layer"
    overlap: frozenset[Overlap] = frozenset()
    entering: Seam = field(init=False, repr=False, compare=False)
    """the half before the block"""
    leaving: Seam = field(init=False, repr=False, compare=False)
    """the half behind the block"""
    inner: Seam = field(init=False, repr=False, compare=False)
    """neither half: a product that meets nobody"""

    def __post_init__(self) -> None:
        # Plain attributes, made once: a compiler can read them, and no call pays for making them.
        def part(**without: Any) -> Seam:
            return (
                self if all(getattr(self, key) == value for key, value in without.items()) else replace(self, **without)
            )

        object.__setattr__(self, "entering", part(leave="none"))
        object.__setattr__(self, "leaving", part(enter="none"))
        object.__setattr__(self, "inner", part(enter="none", leave="none"))

    @property
    def chunked(self) -> bool:
        """Whether products are cut up so that their collectives pass while the next part is computed."""
        return "chunks" in self.overlap and self.group is not None


OPEN = Seam()
"""The seam of a single device: no collective on either side."""


@dataclass
class WeightQueue:
    """Weight gradients put off by a split backward: filled while `deferring`, emptied by the W action.

    `split` says that this will happen, so linears must stay out of compiled graphs, whose backward is one piece.
    """

    split: bool = False
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


def linear(
    x: Tensor,
    projections: list[Projection],
    seam: Seam,
    queue: WeightQueue | None = None,
    turns: Turns | None = None,
) -> list[Tensor]:
    """Outputs of all `projections` of one input `x` [S, B, I], entered and left through `seam`.

    One collective serves them all. A row-parallel projection (`leave` set) stands alone, and its bias is
    added once, after the sum over ranks. Weight gradients are added to `.grad` in place by the backward pass
    itself, which fires the parameters' hooks; a compiled block leaves that to autograd. With `turns` collectives
    are only started, and what leaves must pass through `arrive`.
    """
    if torch.compiler.is_compiling():
        put_off = queue is not None and queue.split
        return _linear_untraced(x, projections, seam, queue) if put_off else _linear_traced(x, projections, seam)
    return _linear(x, projections, seam, queue, turns)


def _linear(
    x: Tensor, projections: list[Projection], seam: Seam, queue: WeightQueue | None, turns: Turns | None = None
) -> list[Tensor]:
    weights = [p.weight for p in projections]
    biases = [p.bias for p in projections]
    if seam.leave == "none":
        box = None
        if turns is not None and seam.group is not None:
            x, box = turns.enter(x)
        return list(_Linear.apply(x, seam, queue, projections, box, len(weights), *weights, *biases))
    assert len(projections) == 1, "only one projection can leave through a reducing seam"
    # By chunks the product sums its parts itself.
    inner = seam if seam.chunked else seam.inner
    (out,) = _Linear.apply(x, inner, queue, projections, None, 1, weights[0], None)
    if turns is not None and seam.group is not None:
        purposes = (f"{seam.place}_forward", f"{seam.place}_backward")
        return [turns.leave(out, biases[0], seam.group, purposes, keep=_KEPT[seam.leave])]
    if not seam.chunked:
        out = leave(out, seam)
    return [out if biases[0] is None else out + biases[0]]


_KEPT: dict[Leave, overlapped.Keep] = {"reduce": "all", "scatter": "part"}


def arrive(x: Tensor, seam: Seam, turns: Turns | None) -> Tensor:
    """What a block left through `seam`, complete: waits where `turns` have only started it."""
    if turns is None or seam.group is None:
        return x
    return turns.arrive(x, seam.group, f"{seam.place}_backward", keep=_KEPT[seam.leave])


_linear_untraced = torch.compiler.disable(_linear, reason="its weight gradients are put off")
"""`_linear` from within a compiled block, whose graph ends before it and begins anew behind it."""


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


def enter(x: Tensor, seam: Seam) -> Tensor:
    """`x` [S, ...] as `seam` lets it in, for several linears behind one collective; what is gathered is kept."""
    if seam.group is None or seam.enter == "none":
        return x
    out: Tensor = _Enter.apply(x, seam)
    return out


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
        box: Box | None,
        count: int,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = tensors[:count], tensors[count:]
        ctx.seam, ctx.queue, ctx.holders, ctx.box, ctx.count = seam, queue, holders, box, count
        ctx.has_bias = [b is not None for b in biases]
        ctx.save_for_backward(x, *weights)
        if seam.chunked and seam.leave != "none":
            return (_left_by_chunks(x, weights[0], seam),)  # type: ignore[arg-type]
        if seam.chunked and seam.enter == "gather":
            assert seam.group is not None, "chunks pass between ranks"
            return tuple(overlapped.gathered_products(x, weights, biases, seam.group, f"{seam.place}_forward"))  # type: ignore[arg-type]
        full = entered(x, seam, "forward")
        return tuple(F.linear(full, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        seam: Seam = ctx.seam
        grad_x, wait = None, None
        if seam.leave == "scatter":
            grad_x, grads = _gathered_input_gradient(grads[0], weights[0], seam)
        rows = [_rows(g) for g in grads]
        again = _gathering_again(ctx, x)
        if ctx.needs_input_grad[0] and grad_x is None:
            grad_x, wait = _input_gradient(rows, weights, grads[0].shape[:-1], seam, started=_beside_weights(ctx))
        grad_w = _weight_gradients(ctx, x, rows, again)
        if ctx.box is not None and wait is not None:
            ctx.box.wait = wait
        elif wait is not None:
            grad_x = wait()
        grad_b = tuple(g.sum(0) if has else None for g, has in zip(rows, ctx.has_bias, strict=True))
        return (grad_x, None, None, None, None, None, *grad_w, *grad_b)


FIRST_WEIGHT = 6
"""Where the weights begin among the inputs of `_Linear`."""


def _beside_weights(ctx: Any) -> bool:
    """Whether the sum of the input gradient is only started, and waited for behind the weight gradients."""
    return ctx.box is not None or "weight_gradient" in ctx.seam.overlap


def _gathering_again(ctx: Any, x: Tensor) -> Waiting | None:
    """Under sequence parallelism: the whole input for the weight gradients, on its way while the other is computed."""
    seam: Seam = ctx.seam
    deferring = ctx.queue is not None and ctx.queue.deferring
    if not _beside_weights(ctx) or deferring or seam.enter != "gather" or seam.group is None:
        return None
    return overlapped.start_all_gather(x, seam.group, f"{seam.place}_backward")[1]


def _left_by_chunks(x: Tensor, weight: Tensor, seam: Seam) -> Tensor:
    """The product with a row-parallel matrix, summed over the ranks."""
    assert seam.group is not None, "chunks pass between ranks"
    send = overlapped.reduced_product if seam.leave == "reduce" else overlapped.scattered_product
    return send(lambda part: F.linear(part, weight), x, seam.group, f"{seam.place}_forward")()


def _gathered_input_gradient(grad: Tensor, weight: Tensor, seam: Seam) -> tuple[Tensor, tuple[Tensor]]:
    """Gather the gradient of a scattered output by chunks, each multiplied as it arrives; both, whole."""
    assert seam.group is not None, "chunks pass between ranks"
    shape = (seam.group.size, *grad.shape[:-1])
    whole, grad_x = grad.new_empty(*shape, grad.shape[-1]), grad.new_empty(*shape, weight.shape[1])
    for part, arrived in overlapped.gathered_chunks(grad, seam.group, f"{seam.place}_backward"):
        whole[:, part] = arrived
        grad_x[:, part] = arrived @ weight
    return grad_x.flatten(0, 1), (whole.flatten(0, 1),)


def _input_gradient(
    rows: list[Tensor], weights: list[Tensor], shape: torch.Size, seam: Seam, *, started: bool
) -> tuple[Tensor | None, Waiting | None]:
    """The gradient of the input, summed over the ranks as the seam says; where only `started`, how to wait for it."""

    def multiply(parts: list[Tensor]) -> Tensor:
        flat = torch.matmul(parts[0], weights[0])
        for g, w in zip(parts[1:], weights[1:], strict=True):
            flat.addmm_(g, w)
        return flat

    group, purpose = seam.group, f"{seam.place}_backward"
    if group is None or seam.enter == "none" or not (started or seam.chunked):
        return entered_backward(multiply(rows).view(*shape, -1), seam), None
    if seam.chunked:
        split = [g.shape[1] for g in rows]

        def product(part: Tensor) -> Tensor:
            pieces = part.flatten(0, -2).split(split, 1)
            return multiply(list(pieces)).view(*part.shape[:-1], -1)

        send = overlapped.reduced_product if seam.enter == "copy" else overlapped.scattered_product
        wait = send(product, torch.cat(rows, 1).view(*shape, -1), group, purpose)
        return (None, wait) if started else (wait(), None)
    start = overlapped.start_all_reduce if seam.enter == "copy" else overlapped.start_reduce_scatter
    return start(multiply(rows).view(*shape, -1), group, purpose)


def _weight_gradients(ctx: Any, x: Tensor, rows: list[Tensor], again: Waiting | None) -> tuple[Tensor | None, ...]:
    """Weight gradients for autograd, or None for each where they are added in place, now or by the W action."""
    nothing: tuple[None, ...] = (None,) * ctx.count
    if not any(ctx.needs_input_grad[FIRST_WEIGHT : FIRST_WEIGHT + ctx.count]):
        return nothing
    deferring = ctx.queue is not None and ctx.queue.deferring
    if any(h.shared for h in ctx.holders) and not deferring:
        full = _rows(entered(x, ctx.seam, "backward") if again is None else again())
        return tuple(g.t().matmul(full) for g in rows)
    # Detached: what waits for its weight gradient would otherwise keep the graph behind it, and the stage's input.
    compute = _accumulation(x.detach(), rows, [h.weight for h in ctx.holders], ctx.seam, again)
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


def _accumulation(
    x: Tensor, rows: list[Tensor], parameters: list[nn.Parameter], seam: Seam, again: Waiting | None
) -> Callable[[], None]:
    """The weight gradients of one linear: needs its input and output gradients, never the weights' values."""

    @torch.no_grad()
    def compute() -> None:
        full = _rows(entered(x, seam, "backward") if again is None else again())
        for grad, parameter in zip(rows, parameters, strict=True):
            add_product(parameter, grad, full)

    return compute


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seam: Seam) -> Tensor:
        ctx.seam = seam
        return entered(x, seam, "forward").view_as(x) if seam.enter == "copy" else entered(x, seam, "forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return entered_backward(grad, ctx.seam), None


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
