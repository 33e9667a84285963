"""One pipeline stage of a decoder-only transformer: single-device code with named seams.

Seams (`Seam`, filled by `engine/parallel/tensor.py`) are the only places where a block meets other ranks.
Legend: S sequence, B sequences of the microbatch, D hidden, H heads, E head_dim, V vocabulary.
Activations are sequence first, [S, B, D], so that splitting the sequence is splitting dim 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardsmith.engine.models.attention import Attention, LatentAttention
from shardsmith.engine.models.attention_mask import added, attention_mask
from shardsmith.engine.models.experts import MoE
from shardsmith.engine.models.feed_forward import MLP
from shardsmith.engine.models.norm import RMSNorm
from shardsmith.engine.models.rope import inverse_frequencies, magnitude, rotations
from shardsmith.engine.models.surroundings import Surroundings
from shardsmith.engine.runtime.linear import OPEN, Seam, WeightQueue, arrive, leave, linear
from shardsmith.engine.runtime.noise import Noise, Site
from shardsmith.engine.runtime.overlapped import Turns
from shardsmith.engine.runtime.recompute import Cookbook, full
from shardsmith.engine.runtime.routing import Routing
from shardsmith.engine.runtime.sequence_parts import Parts
from shardsmith.engine.runtime.units import OPEN_GATE
from shardsmith.engine.runtime.vocabulary import look_up, token_losses
from shardsmith.engine.runtime.vocabulary_chunks import chunked_loss_sum
from shardsmith.plan.stages import Stage as StageSpec
from shardsmith.specs.model import ModelSpec

Recompute = Literal["none", "selective", "full"]


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


class Block(nn.Module):
    """One transformer layer, pre-norm, with two residual additions."""

    def __init__(self, spec: ModelSpec, queue: WeightQueue, layer: int) -> None:
        super().__init__()
        self.layer, self.dropout = layer, spec.dropout
        self.norm1 = _norm(spec)
        self.attention = (LatentAttention if spec.latent else Attention)(spec, queue)
        self.norm2 = _norm(spec)
        self.mlp = _feed_forward(spec, queue, layer)

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
        for x, near in halves:
            x = x + self._dropped(arrive(left.pop(0), self.attention.seam, turns), near, "attention")
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
        self.parts: Parts | None = None
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
        self.layers = nn.ModuleDict({str(i): Block(spec, self.queue, i) for i in stage.layers})
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
        routing: Routing | None = None,
    ) -> Tensor:
        """Tokens [S, B] (first stage) or activations [S, B, D] -> activations, or logits [S, B, V] (last stage).

        With `loss_chunk` the last stage stops short of its logits, and `loss_sum` makes them chunk by chunk.
        `positions_SB` are positions [S, B or 1] in each token's document, `documents_BS` says which that is
        (None: a sequence is one document). With `parts` S is this rank's part of the sequence, but documents are
        those of the whole. Under sequence parallelism activations between blocks and stages hold this rank's part
        of S; positions and logits always hold all of S.
        """
        if noise is not None and not (self.spec.dropout or self.spec.attention_dropout):
            noise = None
        if noise is not None and self.parts is not None:
            noise = replace(noise, places_S=self.parts.places_of(len(positions_SB), positions_SB.device))
        if self.stage.embedding:
            with self.gate.forward_only("embedding"):
                x = self._embed(x, positions_SB, noise)
        rotation = None
        if self.inverse is not None and self.stage.layers:
            inverse = self.inverse.to(positions_SB.device)
            rotation = rotations(positions_SB, inverse, x.dtype, magnitude(self.spec))
        seen = self._seen(positions_SB, documents_BS, x.dtype)
        for layer, block in zip(self.stage.layers, self.blocks(), strict=True):
            drops = None if noise is None else noise.of(layer)
            around = Surroundings(rotation=rotation, noise=drops, routing=routing, **seen)
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
            seam, queue, stays = self.head_seam, self.queue, self.gate is OPEN_GATE
            total = chunked_loss_sum(left, table, labels_SB, seam=seam, queue=queue, chunk=self.loss_chunk, stays=stays)
            return self.gate.leave("head", total)
        group = self.head_seam.group if table.split else None
        return token_losses(left.flatten(0, 1), labels_SB.flatten(), table.first, group).sum()

    def _seen(self, positions_SB: Tensor, documents_BS: Tensor | None, dtype: torch.dtype) -> dict[str, Any]:
        """Who attends to whom, for `Surroundings`."""
        rows, window = len(positions_SB), self.spec.window
        if self.parts is not None:
            held = [torch.arange(r.start, r.stop, device=positions_SB.device) for r in self.parts.places(rows)]
            return {"view": self.parts.view(rows, documents_BS, window), "places": torch.cat(held)}
        return {"mask": self._mask(rows, dtype, positions_SB.device, documents_BS) if self.stage.layers else None}

    def _mask(
        self, length: int, dtype: torch.dtype, device: torch.device, documents_BS: Tensor | None
    ) -> Tensor | None:
        """The mask of a pass; one that does not depend on the documents is kept for all passes."""
        if documents_BS is not None:
            mask = attention_mask(length, device=device, documents_BS=documents_BS, window=self.spec.window)
            return None if mask is None else added(mask, dtype)
        if self._kept_mask is None or self._kept_mask[0] != (length, dtype, device):
            mask = attention_mask(length, device=device, window=self.spec.window)
            self._kept_mask = (length, dtype, device), None if mask is None else added(mask, dtype)
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


def _feed_forward(spec: ModelSpec, queue: WeightQueue, layer: int) -> MLP | MoE:
    if not spec.is_sparse(layer):
        return MLP(spec, queue, spec.ffn)
    assert spec.experts is not None, "a sparse layer has experts"
    width = spec.experts.shared_ffn
    return MoE(spec, queue, layer, MLP(spec, queue, width) if width else None)


def _norm(spec: ModelSpec) -> nn.Module:
    if spec.norm == "rmsnorm":
        return RMSNorm(spec.hidden, spec.norm_eps)
    return nn.LayerNorm(spec.hidden, spec.norm_eps)
