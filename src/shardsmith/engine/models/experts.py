"""A mixture of experts in the place of an MLP: router, routed experts, shared expert.

Legend: S sequence (this rank's part), B sequences of the microbatch, D hidden, N = S x B tokens, E experts, K choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardsmith.engine.models.activation import swiglu
from shardsmith.engine.models.feed_forward import MLP
from shardsmith.engine.models.surroundings import Surroundings
from shardsmith.engine.runtime.dispatch import ALONE, Dispatch, Placement, combine, make_route
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.grouped import Sorted, Stack, grouped
from shardsmith.engine.runtime.linear import OPEN, Projection, Seam, WeightQueue
from shardsmith.engine.runtime.routing import attached
from shardsmith.layout.axes.expert import capacity
from shardsmith.specs.model import Experts, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Choices of a router: `chosen` experts and their `weights` [N, K], `shares` [N, E] of each expert in a token.

    `z` is the squared log-sum-exp of the logits of each token [N].
    """

    chosen: Tensor
    weights: Tensor
    shares: Tensor
    z: Tensor


class Router(nn.Module):
    """Scores every expert for a token and chooses the best, in float32 or wider."""

    balance: Tensor

    def __init__(self, spec: ModelSpec, experts: Experts) -> None:
        super().__init__()
        self.spec = experts
        self.weight = nn.Parameter(torch.empty(experts.count, spec.hidden))
        if experts.balance == "bias":
            self.register_buffer("balance", torch.zeros(experts.count))

    def forward(self, x_ND: Tensor, replayed_NK: Tensor | None = None) -> tuple[Scored, Tensor]:
        """The choices, `replayed` or its own, and what it would have chosen by itself [N, K]."""
        e = self.spec
        logits: Tensor = _Logits.apply(x_ND, self.weight)
        scores = logits.softmax(-1) if e.score == "softmax" else logits.sigmoid()
        own = self._choice(scores.detach())
        chosen = own if replayed_NK is None else replayed_NK
        weights = scores.gather(1, chosen)
        if e.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        shares = scores if e.score == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        z = (logits if e.z_loss else logits.detach()).logsumexp(-1).square()
        return Scored(chosen=chosen, weights=weights * e.scale, shares=shares, z=z), own

    def _choice(self, scores_NE: Tensor) -> Tensor:
        """The best K experts [N, K] of each token, inside its best groups; biases count for the choice alone."""
        e = self.spec
        if e.balance == "bias":
            scores_NE = scores_NE + self.balance
        if e.groups > 1:
            by_group = scores_NE.unflatten(1, (e.groups, -1))
            # A group stands for its best expert (DeepSeek-V2), with sigmoid scores for its best two (DeepSeek-V3).
            best = by_group.topk(1 if e.score == "softmax" else 2, -1).values.sum(-1)
            outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, best.topk(e.top_groups, -1).indices, False)
            scores_NE = by_group.masked_fill(outside[:, :, None], -torch.inf).flatten(1)
        return scores_NE.topk(e.top_k, -1).indices


class RoutedExperts(nn.Module):
    """The experts of this rank, each a gated MLP (or this rank's part of its inner width)."""

    def __init__(self, spec: ModelSpec, experts: Experts, queue: WeightQueue) -> None:
        super().__init__()
        self.queue = queue
        self.gate = Stack(experts.count, experts.ffn, spec.hidden)
        self.up = Stack(experts.count, experts.ffn, spec.hidden)
        self.down = Stack(experts.count, spec.hidden, experts.ffn)

    def forward(self, x_TD: Tensor, rows: Sorted, around: Surroundings) -> Tensor:
        """[T, D] -> [T, D], rows sorted by expert."""
        gate, up = grouped(x_TD, rows, [self.gate, self.up], self.queue)
        return grouped(around.cheap(swiglu, gate, up), rows, [self.down], self.queue)[0]


class MoE(nn.Module):
    """Router, routed experts and a shared expert; loads are balanced by losses attached here, or by biases."""

    def __init__(self, spec: ModelSpec, queue: WeightQueue, layer: int, shared: MLP | None) -> None:
        super().__init__()
        assert spec.experts is not None, "only for layers with experts"
        self.spec, self.layer, self.queue = spec.experts, layer, queue
        self.seam: Seam = OPEN
        self.placement: Placement = ALONE
        self.sequence: Group | None = None
        self.capacity_factor: float | None = None
        self.router = Router(spec, spec.experts)
        self.experts = RoutedExperts(spec, spec.experts, queue)
        if shared is not None:
            self.shared = shared
        if spec.experts.shared_gate:
            self.shared_gate = Projection(1, spec.hidden, bias=False)

    def forward(self, x_SBD: Tensor, around: Surroundings) -> Tensor:
        """[S, B, D] -> [S, B, D]; without sequence parallelism tensor ranks route a part of the sequence each."""
        part = self.seam.group if self.seam.enter == "copy" else None
        mine: Tensor = x_SBD if part is None else _Split.apply(x_SBD, part)
        x_ND, shape = mine.flatten(0, 1), (mine.shape[0], mine.shape[1])
        chosen, weights, kept = self._routed(x_ND, shape, around)
        route = make_route(chosen, kept, self.spec.count, self.placement)
        dispatch = Dispatch(route)
        pending = dispatch.start(x_ND, self.spec.top_k)
        shared = self._shared(x_SBD, around)
        received = dispatch.wait(pending)
        del pending  # rows of many tokens each: none of them is held longer than it is needed
        left = [self.experts(received, route.rows, around)]
        del received
        out: Tensor = combine(left.pop(), weights.to(x_SBD.dtype), route).unflatten(0, shape)
        if part is not None:
            out = _Join.apply(out, part)
        return out if shared is None else out + shared

    def _shared(self, x_SBD: Tensor, around: Surroundings) -> Tensor | None:
        if not self.spec.shared_ffn:
            return None
        out: Tensor = self.shared(x_SBD, around)
        if self.spec.shared_gate:
            out = out * F.linear(x_SBD, self.shared_gate.weight).sigmoid()
        return out

    def _routed(
        self, x_ND: Tensor, shape: tuple[int, int], around: Surroundings
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Chosen experts, their weights (losses attached) and which choices are kept (None: all); each [N, K]."""
        routing, replayed = around.routing, None
        whole = None if routing is None else routing.replayed(self.layer)
        if whole is not None:
            replayed = whole[self._places(shape[0], around, whole.device)].flatten(0, 1)
        forced = routing is not None and routing.forced
        scored, own = self.router(x_ND, replayed if forced else None)
        kept = self._kept(scored.chosen, shape, around)
        if routing is None:
            return scored.chosen, scored.weights, kept
        counts_BE = self._counts(scored.chosen, shape[1])
        aux, z = self._losses(scored, counts_BE, shape)
        weights = scored.weights
        if (self.spec.has_aux_loss or self.spec.z_loss) and torch.is_grad_enabled():
            loss = aux * (self.spec.aux_loss if self.spec.has_aux_loss else 0.0) + z * self.spec.z_loss
            weights = attached(weights, loss, routing.scale)
        dropped = aux.new_zeros(()) if kept is None else (~kept).sum()
        flips = None if replayed is None else (own.sort(-1).values != replayed.sort(-1).values).any(-1).sum()
        routing.note(
            self.layer,
            scored.chosen.unflatten(0, shape),
            counts_BE.sum(0),
            torch.stack([aux.detach().double(), z.detach().double(), dropped.double()]),
            flips,
        )
        return scored.chosen, weights, kept

    def _counts(self, chosen_NK: Tensor, sequences: int) -> Tensor:
        """How often this rank's tokens of each sequence chose each expert [B, E]."""
        e = self.spec.count
        sequence = torch.arange(len(chosen_NK), device=chosen_NK.device) % sequences
        flat = (chosen_NK + sequence[:, None] * e).flatten()
        return torch.bincount(flat, minlength=sequences * e).view(sequences, e)

    def _losses(self, scored: Scored, counts_BE: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """This rank's shares of the auxiliary loss and the z-loss, each summed over sequences, before coefficients.

        For a sequence of S tokens the first is E / (K S^2) x sum over experts of (choices x sum of its shares in each
        token), which is 1 where both are even (Fedus et al. 2021, by sequence as in DeepSeek-AI 2024); the second is
        the mean of z (Zoph et al. 2022). Choices are counted over the whole sequence, wherever it lies.
        """
        length, e = shape[0], self.spec
        if self.sequence is not None:
            length *= self.sequence.size
            if e.has_aux_loss:
                counts_BE = self.sequence.all_reduce(counts_BE.clone(), "sequence_counts")
        shares_BE = scored.shares.unflatten(0, shape).sum(0)
        aux = (counts_BE.to(shares_BE.dtype) * shares_BE).sum() * (e.count / (e.top_k * length**2))
        return aux, scored.z.sum() / length

    def _kept(self, chosen_NK: Tensor, shape: tuple[int, int], around: Surroundings) -> Tensor | None:
        """Which choices an expert has room for [N, K]: in each sequence the first ones, in its order."""
        ranks = 1 if self.sequence is None else self.sequence.size
        room = capacity(self.spec, self.capacity_factor, shape[0] * ranks)
        if room is None:
            return None
        own = self._places(shape[0], around, chosen_NK.device)
        placed_SBK = torch.cat((own[:, None, None].expand(*shape, 1), chosen_NK.unflatten(0, shape)), -1)
        if self.sequence is not None:
            placed_SBK = self.sequence.all_gather(placed_SBK, "sequence_choices")
            placed_SBK = placed_SBK[placed_SBK[:, 0, 0].argsort()]
        return in_room(placed_SBK[..., 1:], self.spec.count, room)[own].flatten(0, 1)

    def _places(self, rows: int, around: Surroundings, device: torch.device) -> Tensor:
        """The places in the sequence of the `rows` rows that this rank routes."""
        group = self.seam.group
        held = rows if group is None else rows * group.size
        places = torch.arange(held, device=device) if around.places is None else around.places
        return places if group is None else group.part(places)


def in_room(chosen_SBK: Tensor, experts: int, room: int) -> Tensor:
    """Which choices [S, B, K] are among the first `room` of their expert in their sequence, in order of S."""
    length, sequences, k = chosen_SBK.shape
    sequence = torch.arange(sequences, device=chosen_SBK.device)[:, None, None]
    keys = (chosen_SBK.transpose(0, 1) + sequence * experts).flatten()
    order = keys.argsort(stable=True)
    counts = torch.bincount(keys, minlength=sequences * experts)
    firsts = counts.cumsum(0) - counts
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - firsts[keys[order]]
    return (rank < room).view(sequences, length, k).transpose(0, 1)


class _Logits(torch.autograd.Function):
    """Logits [N, E] in float32 or wider; what is kept for backward is `x` as it came, not its widened copy."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_ED)
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        return F.linear(x_ND.to(wide), weight_ED.to(wide))

    @staticmethod
    def backward(ctx: Any, grad_NE: Tensor) -> tuple[Tensor, Tensor]:
        x_ND, weight_ED = ctx.saved_tensors
        by_x = grad_NE.matmul(weight_ED.to(grad_NE.dtype)).to(x_ND.dtype)
        by_weight = grad_NE.t().matmul(x_ND.to(grad_NE.dtype)).to(weight_ED.dtype)
        return by_x, by_weight


class _Split(torch.autograd.Function):
    """This rank's part of what all tensor ranks hold; its gradient is gathered from the parts.

    A copy: the router keeps it, and would keep the other parts, too, if it were a view.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.part(x).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(grad, "layer_backward"), None


class _Join(torch.autograd.Function):
    """The counterpart of `_Split`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_gather(x, "layer_forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.part(grad), None
