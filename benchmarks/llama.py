"""The model as a user of raw torch writes it: batch first, torch's own modules, no seams.

Parameter names are Shardsmith's, so that the same initial weights load. Legend: B sequences, S positions.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from inputs import initial_weights
from torch import Tensor, nn
from workload import SHAPE


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, kv_width = SHAPE.heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim
        self.q = nn.Linear(SHAPE.hidden, width, bias=False)
        self.k = nn.Linear(SHAPE.hidden, kv_width, bias=False)
        self.v = nn.Linear(SHAPE.hidden, kv_width, bias=False)
        self.o = nn.Linear(width, SHAPE.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, S = x.shape[:2]
        q, k, v = (project(x).view(B, S, -1, SHAPE.head_dim).transpose(1, 2) for project in (self.q, self.k, self.v))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(B, S, -1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(SHAPE.hidden, SHAPE.ffn, bias=False)
        self.up = nn.Linear(SHAPE.hidden, SHAPE.ffn, bias=False)
        self.down = nn.Linear(SHAPE.ffn, SHAPE.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(SHAPE.hidden, SHAPE.norm_eps) for _ in range(2))
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Embedding):
    """The first piece of the model cut into a sequence."""

    def __init__(self) -> None:
        super().__init__(SHAPE.vocab, SHAPE.hidden)


class Llama(nn.Module):
    """Layers [first, last): with the embedding if `first` is 0, with norm and head if `last` is the model's end."""

    def __init__(self, first: int = 0, last: int = SHAPE.layers) -> None:
        super().__init__()
        self.embedding = Embedding() if first == 0 else None
        self.layers = nn.ModuleDict({str(i): Block() for i in range(first, last)})
        ends = last == SHAPE.layers
        self.final_norm = nn.RMSNorm(SHAPE.hidden, SHAPE.norm_eps) if ends else None
        self.head = nn.Linear(SHAPE.hidden, SHAPE.vocab, bias=False) if ends else None
        cos, sin = rotations()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.layers.values():
            x = block(x, self.cos, self.sin)
        return x if self.head is None else self.head(self.final_norm(x))

    def load_initial(self, folder: Path) -> Llama:
        """Take the common initial weights of the parts held."""
        full = initial_weights(folder)
        self.load_state_dict({name: full[name] for name in self.state_dict()})
        return self


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens of a microbatch."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotations() -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, head_dim]."""
    inverse = 1.0 / SHAPE.rope_theta ** (torch.arange(0, SHAPE.head_dim, 2).double() / SHAPE.head_dim)
    angles = torch.outer(torch.arange(SHAPE.seq_len).double(), inverse)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin
