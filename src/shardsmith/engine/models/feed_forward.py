"""The feed-forward block of a layer.

Legend: S sequence, B sequences of the microbatch, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from shardsmith.engine.models.activation import swiglu
from shardsmith.engine.models.surroundings import Surroundings
from shardsmith.engine.runtime.linear import OPEN, Projection, WeightQueue, linear
from shardsmith.specs.model import ModelSpec

GELU: dict[str, Callable[..., Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    """Feed-forward block of inner width `ffn`: SwiGLU (gate and up share their input) or GELU."""

    def __init__(self, spec: ModelSpec, queue: WeightQueue, ffn: int) -> None:
        super().__init__()
        self.activation, self.queue, self.seam = spec.activation, queue, OPEN
        if spec.gated:
            self.gate = Projection(ffn, spec.hidden, bias=spec.mlp_bias)
        self.up = Projection(ffn, spec.hidden, bias=spec.mlp_bias)
        self.down = Projection(spec.hidden, ffn, bias=spec.mlp_bias)

    def forward(self, x_SBD: Tensor, around: Surroundings) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        enter = self.seam.entering
        if self.activation == "swiglu":
            gate, up = linear(x_SBD, [self.gate, self.up], enter, self.queue, around.turns)
            inner = around.cheap(swiglu, gate, up)
        else:
            (up,) = linear(x_SBD, [self.up], enter, self.queue, around.turns)
            inner = around.cheap(GELU[self.activation], up)
        return linear(inner, [self.down], self.seam.leaving, self.queue, around.turns)[0]
