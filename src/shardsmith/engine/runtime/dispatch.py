"""Rows of tokens on their way to the ranks that hold their experts, and back.

A rank sorts its rows by expert; since ranks hold experts in turn, rows for one rank stand together, and one
all-to-all of uneven parts moves them. Where an expert is cut over several ranks, each of them gets the row, and
their partial outputs are summed by the owner, who knows which row belongs to which token. Legend: N tokens of this
rank, K choices a token, R rows as sent, T rows as received, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.grouped import Sorted


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the experts are: `group` has `parts` ranks for each share of `experts` experts, in the order of experts."""

    group: Group | None = None
    parts: int = 1


ALONE = Placement()
"""All experts on this rank."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """How the rows of one pass travel.

    `choices` [R] are places in the flat [N x K] of each row, as sent. `sent` and `received` are rows by rank of
    the group. `regroup` sorts received rows by expert (None: they are), `back` undoes it; `rows` tells experts apart.
    """

    choices: Tensor
    sent: list[int]
    received: list[int]
    regroup: Tensor | None
    back: Tensor | None
    rows: Sorted
    group: Group | None


def make_route(chosen_NK: Tensor, kept_NK: Tensor | None, experts: int, placement: Placement) -> Route:
    """The route of rows whose experts are `chosen` (int64), less those that are not `kept`; sends counts of rows."""
    flat = chosen_NK.flatten()
    if kept_NK is not None:
        flat = torch.where(kept_NK.flatten(), flat, experts)
    order = flat.argsort(stable=True)
    counts_E = torch.bincount(flat, minlength=experts)[:experts]
    if kept_NK is not None:
        order = order[: int(counts_E.sum())]
    group, parts = placement.group, placement.parts
    if group is None or group.handle is None:
        return Route(choices=order, sent=[], received=[], regroup=None, back=None, rows=Sorted(counts_E), group=None)
    by_share = counts_E.view(group.size // parts, -1)
    mine = by_share.repeat_interleave(parts, 0)
    theirs = group.all_to_all(mine, "expert_rows")
    if parts > 1:
        shares = order.split(by_share.sum(1).tolist())
        order = torch.cat([share for share in shares for _ in range(parts)])
    regroup = back = None
    local = theirs.shape[1]
    if local > 1:
        expert = torch.arange(local, device=flat.device).repeat(group.size).repeat_interleave(theirs.flatten())
        regroup = expert.argsort(stable=True)
        back = torch.empty_like(regroup)
        back[regroup] = torch.arange(len(regroup), device=flat.device)
    return Route(
        choices=order,
        sent=mine.sum(1).tolist(),
        received=theirs.sum(1).tolist(),
        regroup=regroup,
        back=back,
        rows=Sorted(theirs.sum(0)),
        group=group,
    )


class Dispatch:
    """The dispatch of one pass: begun by `start`, complete when `wait` returns; what is computed between is beside it.

    The backward pass mirrors it: gradients leave when it reaches `wait`, and are there when it reaches `start`.
    """

    def __init__(self, route: Route) -> None:
        self.route = route
        self._arriving: tuple[dist.Work | None, Tensor] | None = None

    def start(self, x_ND: Tensor, top_k: int) -> Tensor:
        """Send the rows of `x`; what comes back must not be read before `wait` has been given it."""
        rows = x_ND.index_select(0, self.route.choices // top_k)
        if self.route.group is None:
            return rows
        out: Tensor = _Start.apply(rows, self)
        return out

    def wait(self, pending: Tensor) -> Tensor:
        """The received rows [T, D], sorted by expert."""
        if self.route.group is None:
            return pending
        return _reordered(_Wait.apply(pending, self), self.route.regroup, self.route.back)

    def move(self, x: Tensor, *, home: bool, purpose: str) -> Tensor:
        """Begin to send rows out, or `home` to their owners; where they arrive, not to be read before `settle`."""
        route = self.route
        assert route.group is not None, "rows travel in a group"
        assert self._arriving is None, "one exchange at a time"
        out, into = (route.received, route.sent) if home else (route.sent, route.received)
        owners = sum(route.sent) * x.shape[1] * x.element_size()
        self._arriving = route.group.exchange_async(x, out, into, purpose, payload=owners)
        return self._arriving[1]

    def settle(self) -> Tensor:
        """What arrived."""
        assert self._arriving is not None, "an exchange was begun"
        (work, received), self._arriving = self._arriving, None
        if work is not None:
            work.wait()
        return received


def combine(rows_TD: Tensor, weights_NK: Tensor, route: Route) -> Tensor:
    """Outputs of the experts, sorted by expert, weighted and summed for each token [N, D]."""
    if route.group is not None:
        rows_TD = _reordered(rows_TD, route.back, route.regroup)
        rows_TD = _Combine.apply(rows_TD, route)
    weights_R = weights_NK.flatten().index_select(0, route.choices)
    tokens = route.choices // weights_NK.shape[1]
    out: Tensor = _Weighed.apply(rows_TD, weights_R, tokens, len(weights_NK))
    return out


class _Weighed(torch.autograd.Function):
    """Rows [R, D] times their weights, summed for each token; torch's own sum of rows would keep the product, too."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_R: Tensor, tokens_R: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(rows_RD, weights_R, tokens_R)
        weighted = rows_RD * weights_R[:, None]
        return weighted.new_zeros(count, rows_RD.shape[1]).index_add_(0, tokens_R, weighted)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_RD, weights_R, tokens_R = ctx.saved_tensors
        by_row = grad_ND.index_select(0, tokens_R)
        by_weight = (by_row * rows_RD).sum(1)
        return by_row.mul_(weights_R[:, None]), by_weight, None, None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return dispatch.move(rows, home=False, purpose="dispatch_forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # What comes in only marks that the exchange has begun; what that brought has the shape of the rows sent.
        return ctx.dispatch.settle(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        dispatch.settle()
        return pending.view_as(pending)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.dispatch.move(grad, home=True, purpose="dispatch_backward")
        return grad, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _moved(rows, route, home=True, purpose="combine_forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _moved(grad, ctx.route, home=False, purpose="combine_backward"), None


def _moved(x: Tensor, route: Route, *, home: bool, purpose: str) -> Tensor:
    dispatch = Dispatch(route)
    dispatch.move(x, home=home, purpose=purpose)
    return dispatch.settle()


class _Reorder(torch.autograd.Function):
    """A permutation of rows; its gradient is the inverse permutation, no sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None


def _reordered(x: Tensor, index: Tensor | None, inverse: Tensor | None) -> Tensor:
    if index is None:
        return x
    out: Tensor = _Reorder.apply(x, index, inverse)
    return out
