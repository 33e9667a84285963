"""One pipeline stage of a decoder-only transformer: single-device code with named seams.

Seams (`Seam`, filled by `engine/parallel/tensor.py`) are the only places where a block meets other ranks.
Legend: S sequence, B sequences of the microbatch, D hidden, H heads, E head_dim, V vocabulary.
Activations are sequence first, [S, B, D], so that splitting the sequence is splitting dim 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardsmith.engine.models.norm import RMSNorm
from shardsmith.engine.models.rope import inverse_frequencies, rotate, rotations
from shardsmith.engine.runtime.linear import OPEN, Projection, WeightQueue, leave, linear
from shardsmith.engine.runtime.vocabulary import look_up, token_losses
from shardsmith.plan.stages import Stage as StageSpec
from shardsmith.specs.model import ModelSpec

Rotation = tuple[Tensor, Tensor]


class Table(nn.Module):
    """Holder of a table [rows, D]: token embedding, position embedding or output head.

    `first` is the index of its first row in the full table, `split` whether other ranks hold other rows,
    `shared` whether it serves as embedding and as head of one stage (see `Projection`).
    """

    def __init__(self, rows: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden))
        self.bias = None
        self.first = 0
        self.split = self.shared = False


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads; the number of heads follows from the weights held."""

    def __init__(self, spec: ModelSpec, queue: WeightQueue) -> None:
        super().__init__()
        self.head_dim, self.queue, self.seam = spec.head_dim, queue, OPEN
        width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q = Projection(width, spec.hidden, bias=spec.attention_bias)
        self.k = Projection(kv_width, spec.hidden, bias=spec.attention_bias)
        self.v = Projection(kv_width, spec.hidden, bias=spec.attention_bias)
        self.o = Projection(spec.hidden, width, bias=spec.output_bias)

    def forward(self, x_SBD: Tensor, rotation: Rotation | None) -> Tensor:
        """[S, B, D] -> [S, B, D]; queries and keys are rotated by `rotation` where positions are rotary."""
        q, k, v = linear(x_SBD, [self.q, self.k, self.v], self.seam.entering, self.queue)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        q_BHSE, k_BHSE, v_BHSE = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        grouped = q_BHSE.shape[1] != k_BHSE.shape[1]
        out = F.scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE, is_causal=True, enable_gqa=grouped)
        return linear(out.permute(2, 0, 1, 3).flatten(2), [self.o], self.seam.leaving, self.queue)[0]


class MLP(nn.Module):
    """Feed-forward block: SwiGLU (gate and up share their input) or GELU."""

    def __init__(self, spec: ModelSpec, queue: WeightQueue) -> None:
        super().__init__()
        self.activation, self.queue, self.seam = spec.activation, queue, OPEN
        if spec.gated:
            self.gate = Projection(spec.ffn, spec.hidden, bias=spec.mlp_bias)
        self.up = Projection(spec.ffn, spec.hidden, bias=spec.mlp_bias)
        self.down = Projection(spec.hidden, spec.ffn, bias=spec.mlp_bias)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        enter = self.seam.entering
        if self.activation == "swiglu":
            gate, up = linear(x_SBD, [self.gate, self.up], enter, self.queue)
            inner = F.silu(gate) * up
        else:
            (up,) = linear(x_SBD, [self.up], enter, self.queue)
            inner = F.gelu(up, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return linear(inner, [self.down], self.seam.leaving, self.queue)[0]


class Block(nn.Module):
    """One transformer layer, pre-norm, with two residual additions."""

    def __init__(self, spec: ModelSpec, queue: WeightQueue) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(spec), _norm(spec)
        self.attention = Attention(spec, queue)
        self.mlp = MLP(spec, queue)

    def forward(self, x_SBD: Tensor, rotation: Rotation | None) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        x_SBD = x_SBD + self.attention(self.norm1(x_SBD), rotation)
        out: Tensor = x_SBD + self.mlp(self.norm2(x_SBD))
        return out


class Stage(nn.Module):
    """The part of a model that stands on one pipeline stage; parameter names are those of `weights()`."""

    def __init__(self, spec: ModelSpec, stage: StageSpec) -> None:
        super().__init__()
        self.spec, self.stage = spec, stage
        self.queue = WeightQueue()
        self.embedding_seam = self.head_seam = OPEN
        if stage.embedding or (stage.head and spec.tied):
            self.embedding = Table(spec.vocab, spec.hidden)
            self.embedding.shared = stage.embedding and stage.head and spec.tied
        if stage.embedding and spec.positions == "learned":
            self.position = Table(spec.context, spec.hidden)
        self.layers = nn.ModuleDict({str(i): Block(spec, self.queue) for i in stage.layers})
        if stage.head:
            self.final_norm = _norm(spec)
            if not spec.tied:
                self.head = Table(spec.vocab, spec.hidden)
        self.inverse = inverse_frequencies(spec) if spec.positions == "rope" else None

    def blocks(self) -> list[Block]:
        """The transformer layers of this stage, in order."""
        return [block for block in self.layers.values() if isinstance(block, Block)]

    @property
    def head_table(self) -> Table:
        """The output head, which is the embedding itself where they are tied."""
        return self.embedding if self.spec.tied else self.head

    def forward(self, x: Tensor, positions_SB: Tensor) -> Tensor:
        """Tokens [S, B] (first stage) or activations [S, B, D] -> activations, or logits [S, B, V] (last stage).

        `positions_SB` are global positions [S, B or 1]. Under sequence parallelism activations between
        blocks and stages hold this rank's part of S; logits always hold all of S.
        """
        if self.stage.embedding:
            x = self._embed(x, positions_SB)
        rotation = None
        if self.inverse is not None and self.stage.layers:
            rotation = rotations(positions_SB, self.inverse.to(positions_SB.device), x.dtype)
        for block in self.blocks():
            x = block(x, rotation)
        if self.stage.head:
            (x,) = linear(self.final_norm(x), [self.head_table], self.head_seam, self.queue)  # type: ignore[list-item]
        return x

    def loss_sum(self, logits_SBV: Tensor, labels_SB: Tensor) -> Tensor:
        """Sum of the cross-entropies of all tokens whose label is not ignored (a scalar, float32 or wider)."""
        table = self.head_table
        group = self.head_seam.group if table.split else None
        return token_losses(logits_SBV.flatten(0, 1), labels_SB.flatten(), table.first, group).sum()

    def _embed(self, tokens_SB: Tensor, positions_SB: Tensor) -> Tensor:
        table, seam = self.embedding, self.embedding_seam
        x = leave(look_up(tokens_SB, table.weight, table.first, split=table.split), seam)
        if self.spec.positions == "learned":
            if seam.leave == "scatter" and seam.group is not None:
                positions_SB = seam.group.part(positions_SB)
            x = x + F.embedding(positions_SB, self.position.weight)
        return x


def _norm(spec: ModelSpec) -> nn.Module:
    if spec.norm == "rmsnorm":
        return RMSNorm(spec.hidden, spec.norm_eps)
    return nn.LayerNorm(spec.hidden, spec.norm_eps)
