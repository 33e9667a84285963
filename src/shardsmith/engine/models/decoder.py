"""One pipeline stage of a decoder-only transformer: single-device code with named seams.

Seams (`Seam`, filled by `engine/parallel/tensor.py`) are the only places where a block meets other ranks.
Legend: S sequence, B sequences of the microbatch, D hidden, H heads, E head_dim, V vocabulary.
Activations are sequence first, [S, B, D], so that splitting the sequence is splitting dim 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardsmith.engine.models.activation import swiglu
from shardsmith.engine.models.attention_mask import added, attention_mask
from shardsmith.engine.models.norm import RMSNorm
from shardsmith.engine.models.rope import inverse_frequencies, magnitude, rotate, rotations
from shardsmith.engine.runtime.linear import OPEN, Projection, Seam, WeightQueue, arrive, leave, linear
from shardsmith.engine.runtime.noise import Noise, Site
from shardsmith.engine.runtime.overlapped import Turns
from shardsmith.engine.runtime.recompute import Cookbook, full, plain
from shardsmith.engine.runtime.units import OPEN_GATE
from shardsmith.engine.runtime.vocabulary import look_up, token_losses
from shardsmith.engine.runtime.vocabulary_chunks import chunked_loss_sum
from shardsmith.plan.stages import Stage as StageSpec
from shardsmith.specs.model import ModelSpec

Recompute = Literal["none", "selective", "full"]
GELU: dict[str, Callable[..., Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a block needs beside its input.

    `rotation`: cosines and sines of the positions where they are rotary. `mask`: what is added to scores so that
    only those count that should (see `attention_mask`), None for plain causal attention. `noise`: dropout masks of
    the layer, None where nothing is dropped. `cheap` calls a function whose output may be made again in backward
    (see `runtime/recompute.py`).
    """

    rotation: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None
    noise: Noise | None = None
    cheap: Callable[..., Tensor] = plain
    turns: Turns | None = None

    def half(self, at: slice, turns: Turns) -> Surroundings:
        """The same for the sequences `at` of the microbatch, which take `turns` with the others."""
        rotation, mask, noise = self.rotation, self.mask, self.noise
        if rotation is not None and rotation[0].shape[1] > 1:
            rotation = rotation[0][:, at], rotation[1][:, at]
        if mask is not None and mask.shape[0] > 1:
            mask = mask[at]
        if noise is not None:
            noise = replace(noise, keys_B=noise.keys_B[at])
        return replace(self, rotation=rotation, mask=mask, noise=noise, turns=turns)


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
        self.dropout = spec.attention_dropout
        width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q = Projection(width, spec.hidden, bias=spec.attention_bias)
        self.k = Projection(kv_width, spec.hidden, bias=spec.attention_bias)
        self.v = Projection(kv_width, spec.hidden, bias=spec.attention_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.o = Projection(spec.hidden, width, bias=spec.output_bias)

    def forward(self, x_SBD: Tensor, around: Surroundings) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        q, k, v = linear(x_SBD, [self.q, self.k, self.v], self.seam.entering, self.queue, around.turns)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if around.rotation is not None:
            q, k = rotate(q, *around.rotation), rotate(k, *around.rotation)
        q_BHSE, k_BHSE, v_BHSE = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        if around.noise is not None and self.dropout:
            out = self._dropping(q_BHSE, k_BHSE, v_BHSE, around.mask, around.noise)
        else:
            grouped = q_BHSE.shape[1] != k_BHSE.shape[1]
            causal = around.mask is None
            out = F.scaled_dot_product_attention(
                q_BHSE, k_BHSE, v_BHSE, attn_mask=around.mask, is_causal=causal, enable_gqa=grouped
            )
        return linear(out.permute(2, 0, 1, 3).flatten(2), [self.o], self.seam.leaving, self.queue, around.turns)[0]

    def _dropping(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, noise: Noise) -> Tensor:
        """Attention whose probabilities are dropped by named masks, which no fused kernel takes: S x S in memory."""
        heads, length = q.shape[1], q.shape[2]
        k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
        if mask is None:
            mask = added(torch.ones(length, length, dtype=torch.bool, device=q.device).tril(), q.dtype)
        shares = ((q @ k.transpose(2, 3)) * self.head_dim**-0.5 + mask).softmax(-1)
        first = self.seam.group.index * heads if self.seam.group is not None else 0
        return noise.drop_probabilities(shares, self.dropout, first) @ v


class MLP(nn.Module):
    """Feed-forward block: SwiGLU (gate and up share their input) or GELU."""

    def __init__(self, spec: ModelSpec, queue: WeightQueue) -> None:
        super().__init__()
        self.activation, self.queue, self.seam = spec.activation, queue, OPEN
        if spec.gated:
            self.gate = Projection(spec.ffn, spec.hidden, bias=spec.mlp_bias)
        self.up = Projection(spec.ffn, spec.hidden, bias=spec.mlp_bias)
        self.down = Projection(spec.hidden, spec.ffn, bias=spec.mlp_bias)

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


class Block(nn.Module):
    """One transformer layer, pre-norm, with two residual additions."""

    def __init__(self, spec: ModelSpec, queue: WeightQueue) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.norm1 = _norm(spec)
        self.attention = Attention(spec, queue)
        self.norm2 = _norm(spec)
        self.mlp = MLP(spec, queue)

    def forward(self, x_SBD: Tensor, around: Surroundings) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        if "half_microbatches" in self.mlp.seam.overlap and x_SBD.shape[1] % 2 == 0:
            return self._in_halves(x_SBD, around)
        x_SBD = x_SBD + self._dropped(self.attention(around.cheap(self.norm1, x_SBD), around), around, "attention")
        out: Tensor = x_SBD + self._dropped(self.mlp(around.cheap(self.norm2, x_SBD), around), around, "mlp")
        return out

    def _in_halves(self, x_SBD: Tensor, around: Surroundings) -> Tensor:
        """The same for two halves of the sequences in turn, each computed while what the other made is summed."""
        turns, middle = Turns(), x_SBD.shape[1] // 2
        parts = slice(0, middle), slice(middle, None)
        halves = [(x_SBD[:, at].contiguous(), around.half(at, turns)) for at in parts]
        left = [self.attention(near.cheap(self.norm1, x), near) for x, near in halves]
        between = []
        for (x, near), out in zip(halves, left, strict=True):
            x = x + self._dropped(arrive(out, self.attention.seam, turns), near, "attention")
            between.append((x, near, self.mlp(near.cheap(self.norm2, x), near)))
        return torch.cat(
            [x + self._dropped(arrive(out, self.mlp.seam, turns), near, "mlp") for x, near, out in between], 1
        )

    def _dropped(self, x_SBD: Tensor, around: Surroundings, site: Site) -> Tensor:
        if around.noise is None:
            return x_SBD
        return around.noise.drop(x_SBD, self.dropout, site, _first_row(x_SBD, self.mlp.seam))


class Stage(nn.Module):
    """The part of a model that stands on one pipeline stage; parameter names are those of `weights()`."""

    def __init__(self, spec: ModelSpec, stage: StageSpec) -> None:
        super().__init__()
        self.spec, self.stage = spec, stage
        self.queue = WeightQueue()
        self.embedding_seam = self.head_seam = OPEN
        self.gate = OPEN_GATE
        self.recompute: Recompute = "none"
        self.compiled = False
        self.loss_chunk: int | None = None
        self._kept_mask: tuple[tuple[int, torch.dtype, torch.device], Tensor | None] | None = None
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

    def compile_blocks(self, backend: str, *, split: bool) -> None:
        """Compile every block, whole unless weight gradients are put off (`split`), which goes on between its parts."""
        self.compiled, self.queue.split = True, split
        for block in self.blocks():
            block.compile(fullgraph=not split, dynamic=False, backend=backend)

    @property
    def head_table(self) -> Table:
        """The output head, which is the embedding itself where they are tied."""
        return self.embedding if self.spec.tied else self.head

    def forward(
        self,
        x: Tensor,
        positions_SB: Tensor,
        documents_BS: Tensor | None = None,
        noise: Noise | None = None,
    ) -> Tensor:
        """Tokens [S, B] (first stage) or activations [S, B, D] -> activations, or logits [S, B, V] (last stage).

        With `loss_chunk` the last stage stops short of its logits, and `loss_sum` makes them chunk by chunk.
        `positions_SB` are positions [S, B or 1] in each token's document, `documents_BS` says which that is
        (None: a sequence is one document). Under sequence parallelism activations between blocks and stages
        hold this rank's part of S; positions, documents and logits always hold all of S.
        """
        if noise is not None and not (self.spec.dropout or self.spec.attention_dropout):
            noise = None
        if self.stage.embedding:
            with self.gate.forward_only("embedding"):
                x = self._embed(x, positions_SB, noise)
        rotation = None
        if self.inverse is not None and self.stage.layers:
            inverse = self.inverse.to(positions_SB.device)
            rotation = rotations(positions_SB, inverse, x.dtype, magnitude(self.spec))
        mask = self._mask(len(positions_SB), x, documents_BS) if self.stage.layers else None
        for layer, block in zip(self.stage.layers, self.blocks(), strict=True):
            around = Surroundings(rotation=rotation, mask=mask, noise=None if noise is None else noise.of(layer))
            x = self.gate.leave(str(layer), self._run(block, self.gate.enter(str(layer), x), around))
        if self.stage.head:
            x = self.final_norm(self.gate.enter("head", x))
            if self.loss_chunk is None:
                (x,) = linear(x, [self.head_table], self.head_seam, self.queue)  # type: ignore[list-item]
                x = self.gate.leave("head", x)
        return x

    def loss_sum(self, left: Tensor, labels_SB: Tensor) -> Tensor:
        """Sum of the cross-entropies of all tokens whose label is not ignored (a scalar, float32 or wider).

        `left` is what `forward` gave: logits [S, B, V], or with `loss_chunk` the input of the head [S, B, D].
        """
        table = self.head_table
        if self.loss_chunk is not None:
            return self.gate.leave(
                "head",
                chunked_loss_sum(left, table, labels_SB, seam=self.head_seam, queue=self.queue, chunk=self.loss_chunk),
            )
        group = self.head_seam.group if table.split else None
        return token_losses(left.flatten(0, 1), labels_SB.flatten(), table.first, group).sum()

    def _mask(self, length: int, x: Tensor, documents_BS: Tensor | None) -> Tensor | None:
        """The mask of a pass; one that does not depend on the documents is kept for all passes."""
        if documents_BS is not None:
            mask = attention_mask(length, device=x.device, documents_BS=documents_BS, window=self.spec.window)
            return None if mask is None else added(mask, x.dtype)
        if self._kept_mask is None or self._kept_mask[0] != (length, x.dtype, x.device):
            mask = attention_mask(length, device=x.device, window=self.spec.window)
            self._kept_mask = (length, x.dtype, x.device), None if mask is None else added(mask, x.dtype)
        return self._kept_mask[1]

    def _run(self, block: Block, x_SBD: Tensor, around: Surroundings) -> Tensor:
        """One block, its activations kept or not."""
        if self.recompute == "full":
            return full(block, x_SBD, around)
        if self.recompute == "none":
            return cast(Tensor, block(x_SBD, around))
        if self.compiled:
            # A compiler knows a checkpoint: what is cheap lies in small ones, and is made again wherever it is needed.
            return cast(Tensor, block(x_SBD, replace(around, cheap=full)))
        cookbook = Cookbook()
        with cookbook.open():
            return cast(Tensor, block(x_SBD, replace(around, cheap=cookbook.cheap)))

    def _embed(self, tokens_SB: Tensor, positions_SB: Tensor, noise: Noise | None) -> Tensor:
        table, seam = self.embedding, self.embedding_seam
        x = leave(look_up(tokens_SB, table.weight, table.first, split=table.split, shared=table.shared), seam)
        if self.spec.positions == "learned":
            if seam.leave == "scatter" and seam.group is not None:
                positions_SB = seam.group.part(positions_SB)
            x = x + F.embedding(positions_SB, self.position.weight)
        if noise is not None:
            x = noise.of(-1).drop(x, self.spec.dropout, "embedding", _first_row(x, seam))
        return x


def _first_row(x_SBD: Tensor, seam: Seam) -> int:
    """The place in the sequence of the first row of activations between blocks."""
    return seam.group.index * x_SBD.shape[0] if seam.leave == "scatter" and seam.group is not None else 0


def _norm(spec: ModelSpec) -> nn.Module:
    if spec.norm == "rmsnorm":
        return RMSNorm(spec.hidden, spec.norm_eps)
    return nn.LayerNorm(spec.hidden, spec.norm_eps)
