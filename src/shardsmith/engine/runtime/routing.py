"""What routing leaves behind in a step, and what it may be told: loads, losses, choices to replay.

Legend: S sequence, B sequences of the microbatch, K choices a token, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Choices = Mapping[tuple[int, int], Tensor]
"""Chosen experts [S, K] of a whole sequence, by (layer, sample)."""


@dataclass
class RoutingLog:
    """What the routers of this rank's stages did in a step, by (layer, microbatch); a recomputed pass writes it again.

    `loads` are choices of each expert [E] by this rank's tokens; `losses` its shares of auxiliary loss and z-loss, and
    the number of dropped rows; `flips` choices that differ from those replayed. `choices` are kept where `keeping`.
    """

    keeping: bool = False
    loads: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    losses: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    flips: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    choices: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        """Start a step."""
        for kept in (self.loads, self.losses, self.flips, self.choices):
            kept.clear()

    def layer_loads(self, layer: int) -> Tensor | None:
        """Choices of each expert of `layer` [E] over all microbatches; None where this rank has no such layer."""
        found = [loads for (at, _), loads in sorted(self.loads.items(), key=_first) if at == layer]
        return torch.stack(found).sum(0) if found else None


def _first(item: tuple[Any, Any]) -> Any:
    return item[0]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Routing of one microbatch, whose sequences are `samples` of the data.

    Auxiliary losses are means over the sequences of the step: `scale` is what each sequence's gradient is multiplied
    with, 1 / global batch times the loss scale. Choices are compared with those of `replay`, where it is given, and
    with `forced` taken from it.
    """

    microbatch: int
    samples: tuple[int, ...]
    scale: float
    log: RoutingLog
    replay: Choices | None = None
    forced: bool = False

    def replayed(self, layer: int) -> Tensor | None:
        """The choices [S, B, K] for whole sequences to compare with, if any are given."""
        if self.replay is None:
            return None
        return torch.stack([self.replay[layer, sample] for sample in self.samples], 1)

    def note(
        self, layer: int, chosen_SBK: Tensor, loads_E: Tensor, losses: Tensor, flips: Tensor | None = None
    ) -> None:
        """Keep what the router of `layer` did."""
        key = layer, self.microbatch
        self.log.loads[key], self.log.losses[key] = loads_E, losses
        if flips is not None:
            self.log.flips[key] = flips
        if self.log.keeping:
            self.log.choices[key] = chosen_SBK


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return grad, torch.full_like(loss, ctx.scale), None


def attached(x: Tensor, loss: Tensor, scale: float) -> Tensor:
    """`x`, whose backward also brings `scale` to the scalar `loss`: a loss inside a layer, under any schedule."""
    out: Tensor = _Attached.apply(x, loss, scale)
    return out
