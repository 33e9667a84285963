"""Products beside their collectives: what a linear does where the plan asks for overlap.

Three policies, all exact, because each only changes when something is sent and never what is added up:
`chunks` cuts a product into parts along the sequence and sends each while the next is computed;
`weight_gradient` sends the input gradient while the weight gradients are computed; `half_microbatches` (`Turns`)
sends what one half of a microbatch has made while the other half is computed.
Legend: S sequence (all of it), T tensor ranks, R = S / T, B sequences of the microbatch, I input width, O output
width (this rank's).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardsmith.engine.runtime.group import Group
from shardsmith.layout.overlap import parts

Keep = Literal["all", "part"]
"""What a rank keeps of a sum over ranks: all rows, or its part of them."""

Waiting = Callable[[], Tensor]
"""A tensor on its way; call it once to have it."""


def start_all_reduce(x: Tensor, group: Group, purpose: str) -> tuple[Tensor, Waiting]:
    """Start to sum `x` in place over `group`: the tensor, and how to wait until it holds the sum."""
    return _when(group.all_reduce_async(x, purpose), x, x)


def start_all_gather(x: Tensor, group: Group, purpose: str) -> tuple[Tensor, Waiting]:
    """Start to join the ranks' `x` [n, ...] along dim 0 -> [n x size, ...]."""
    sent = x.contiguous().view(-1)
    work, out = group.all_gather_async(sent, purpose)
    return _when(work, out.view(x.shape[0] * group.size, *x.shape[1:]), sent)


def start_reduce_scatter(x: Tensor, group: Group, purpose: str) -> tuple[Tensor, Waiting]:
    """Start to sum `x` [n x size, ...] over the ranks, keeping this rank's part [n, ...] of dim 0."""
    sent = x.contiguous().view(-1)
    work, out = group.reduce_scatter_async(sent, purpose)
    return _when(work, out.view(x.shape[0] // group.size, *x.shape[1:]), sent)


def _when(work: dist.Work | None, result: Tensor, sent: Tensor) -> tuple[Tensor, Waiting]:
    def wait(sent: Tensor = sent) -> Tensor:  # what is sent lives until it has left
        if work is not None:
            work.wait()
        return result

    return result, wait


def gathered_products(
    x_RBI: Tensor, weights: list[Tensor], biases: list[Tensor | None], group: Group, purpose: str
) -> list[Tensor]:
    """Gather `x` [R, B, I] by chunks and multiply each while the next is on its way -> [S, B, O] per weight."""
    outs = [x_RBI.new_empty(group.size, *x_RBI.shape[:-1], w.shape[0]) for w in weights]
    for part, whole in gathered_chunks(x_RBI, group, purpose):
        for out, weight, bias in zip(outs, weights, biases, strict=True):
            out[:, part] = F.linear(whole, weight, bias)
    return [out.flatten(0, 1) for out in outs]


def reduced_product(multiply: Callable[[Tensor], Tensor], x_S: Tensor, group: Group, purpose: str) -> Waiting:
    """`multiply` (row by row) of `x` [S, ...], summed over the ranks chunk by chunk -> [S, ...]."""
    sent = [start_all_reduce(multiply(x_S[part]), group, purpose)[1] for part in parts(x_S.shape[0])]
    return lambda: torch.cat([wait() for wait in sent])


def scattered_product(multiply: Callable[[Tensor], Tensor], x_S: Tensor, group: Group, purpose: str) -> Waiting:
    """`multiply` (row by row) of `x` [S, ...], summed over the ranks chunk by chunk, this rank's part kept -> [R, ...].

    A chunk takes rows of every rank's part, so that each rank's part arrives in its own order.
    """
    x_TR = x_S.unflatten(0, (group.size, -1))
    sent = [
        start_reduce_scatter(multiply(x_TR[:, part]).flatten(0, 1), group, purpose)[1] for part in parts(x_TR.shape[1])
    ]
    return lambda: torch.cat([wait() for wait in sent])


def gathered_chunks(x_R: Tensor, group: Group, purpose: str) -> Iterator[tuple[slice, Tensor]]:
    """The chunks of `x` [R, ...] gathered over the ranks [T, part of R, ...], each as soon as it has arrived."""
    chunks = parts(x_R.shape[0])
    arriving = [start_all_gather(x_R[part], group, purpose)[1] for part in chunks]
    for part, wait in zip(chunks, arriving, strict=True):
        yield part, wait().unflatten(0, (group.size, -1))


@dataclass
class Box:
    """A gradient on its way."""

    wait: Waiting | None = None

    def take(self) -> Tensor:
        """Wait for it, once."""
        assert self.wait is not None, "nothing is on its way"
        wait, self.wait = self.wait, None
        return wait()


@dataclass
class Turns:
    """The two halves of a microbatch in one block: what is on its way, first in, first out.

    Forward, a half's output is waited for (`arrive`) only after the other half has been computed. Backward the
    same: autograd takes nodes in reverse order of their making, so the node that waits for an input gradient is
    given the number of its predecessor, which puts the other half's computation ahead of the wait.
    """

    flying: deque[tuple[Waiting, Box, Tensor | None]] = field(default_factory=deque)
    last: int | None = None

    def enter(self, x: Tensor) -> tuple[Tensor, Box]:
        """`x`, and where the linear behind it leaves its gradient; backward waits for that here."""
        box = Box()
        x = _Enter.apply(x, box)
        if x.grad_fn is not None:
            natural = x.grad_fn._sequence_nr()
            if self.last is not None:
                x.grad_fn._set_sequence_nr(self.last)  # type: ignore[attr-defined]
            self.last = natural
        return x, box

    def leave(
        self, partial: Tensor, bias: Tensor | None, group: Group, purposes: tuple[str, str], *, keep: Keep
    ) -> Tensor:
        """Start to sum `partial` [S, ...] over `group`; `keep` "all" of it or this rank's "part".

        `purposes` name the collectives of forward and backward. The result must pass through `arrive`.
        """
        box = Box()
        waits: list[Waiting] = []
        out: Tensor = _Depart.apply(partial, group, purposes, keep, waits, box)
        self.flying.append((waits[0], box, bias))
        return out

    def arrive(self, x: Tensor, group: Group, purpose: str, *, keep: Keep) -> Tensor:
        """The oldest result on its way, which is `x`: complete, its bias added."""
        wait, box, bias = self.flying.popleft()
        out: Tensor = _Arrive.apply(x, group, purpose, keep, wait, box)
        return out if bias is None else out + bias


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, box: Box) -> Tensor:
        ctx.box = box
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.box.take(), None


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, partial: Tensor, group: Group, purposes: tuple[str, str], keep: Keep, waits: list[Waiting], box: Box
    ) -> Tensor:
        ctx.box, ctx.keep = box, keep
        if keep == "part":
            out, wait = start_reduce_scatter(partial, group, purposes[0])
        else:
            ctx.mark_dirty(partial)
            out, wait = start_all_reduce(partial, group, purposes[0])
        waits.append(wait)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # The rows of all ranks are on their way since `_Arrive`.
        return (ctx.box.take() if ctx.keep == "part" else grad, None, None, None, None, None)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, purpose: str, keep: Keep, wait: Waiting, box: Box) -> Tensor:
        ctx.group, ctx.purpose, ctx.keep, ctx.box = group, purpose, keep, box
        wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.keep == "part":
            _, ctx.box.wait = start_all_gather(grad, ctx.group, ctx.purpose)
        return (grad, None, None, None, None, None)
