"""One pipeline stage of a decoder-only transformer: single-device code with named seams.

Seams (`Seam`, filled by `engine/parallel/tensor.py`) are the only places where a block meets other ranks.
Legend: S sequence, B sequences of the microbatch, D hidden, H heads, E head_dim, V vocabulary.
Activations are sequence first, [S, B, D], so that splitting the sequence is splitting dim 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardsmith.engine.models.activation import swiglu
from shardsmith.engine.models.attention_mask import added, attention_mask
from shardsmith.engine.models.experts import MoE
from shardsmith.engine.models.norm import RMSNorm
from shardsmith.engine.models.rope import inverse_frequencies, magnitude, rotate, rotations, score_factor
from shardsmith.engine.runtime.linear import OPEN, Projection, Seam, WeightQueue, arrive, enter, leave, linear
from shardsmith.engine.runtime.noise import Noise, Site
from shardsmith.engine.runtime.overlapped import Turns
from shardsmith.engine.runtime.recompute import Cookbook, full, plain
from shardsmith.engine.runtime.routing import Routing
from shardsmith.engine.runtime.sequence_parts import Dropped, Parts, View
from shardsmith.engine.runtime.units import OPEN_GATE
from shardsmith.engine.runtime.vocabulary import look_up, token_losses
from shardsmith.engine.runtime.vocabulary_chunks import chunked_loss_sum
from shardsmith.plan.stages import Stage as StageSpec
from shardsmith.specs.model import ModelSpec

Recompute = Literal["none", "selective", "full"]
LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever that of the other norms is."""
GELU: dict[str, Callable[..., Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a block needs beside its input.

    `rotation`: cosines and sines of the positions where they are rotary. `mask`: what is added to scores so that
    only those count that should (see `attention_mask`), None for plain causal attention. `view`: who attends to whom
    where the sequence is cut over the context axis, None where it is whole. `noise`: dropout masks of the layer, None
    where nothing is dropped. `routing`: where routers note what they did, None where nothing is trained. `places`:
    places in the sequence of this rank's rows, all of it in order where None. `cheap` calls a function whose output
    may be made again in backward (see `runtime/recompute.py`).
    """

    rotation: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None
    view: View | None = None
    noise: Noise | None = None
    routing: Routing | None = None
    places: Tensor | None = None
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
        view = None if self.view is None else self.view.of(at)
        return replace(self, rotation=rotation, mask=mask, view=view, noise=noise, turns=turns)


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
        self.scale, self.value_dim = spec.head_dim**-0.5, spec.head_dim
        self._make_projections(spec)

    def _make_projections(self, spec: ModelSpec) -> None:
        width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q = Projection(width, spec.hidden, bias=spec.attention_bias)
        self.k = Projection(kv_width, spec.hidden, bias=spec.attention_bias)
        self.v = Projection(kv_width, spec.hidden, bias=spec.attention_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.o = Projection(spec.hidden, width, bias=spec.output_bias)

    def forward(self, x_SBD: Tensor, around: Surroundings) -> Tensor:
        """[S, B, D] -> [S, B, D]."""
        q, k, v = self._projected(x_SBD, around)
        if around.view is not None:
            out = around.view.attend(q, k, v, self.scale, self._dropped(around.noise, q.shape[2]))
        else:
            out = self._attend(q, k, v, around)
        out = out[..., : self.value_dim]
        return linear(out.flatten(2), [self.o], self.seam.leaving, self.queue, around.turns)[0]

    def _projected(self, x_SBD: Tensor, around: Surroundings) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [S, B, H, E], rotated keys and values [S, B, key/value heads, E] of this rank."""
        q, k, v = linear(x_SBD, [self.q, self.k, self.v], self.seam.entering, self.queue, around.turns)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if around.rotation is not None:
            q, k = rotate(q, *around.rotation), rotate(k, *around.rotation)
        return q, k, v

    def _attend(self, q_SBHE: Tensor, k_SBHE: Tensor, v_SBHE: Tensor, around: Surroundings) -> Tensor:
        """Attention where the whole sequence is on this rank, [S, B, H, E]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q_SBHE, k_SBHE, v_SBHE))
        if around.noise is not None and self.dropout:
            out = self._dropping(q, k, v, around.mask, around.noise)
        else:
            grouped, causal = q.shape[1] != k.shape[1], around.mask is None
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=around.mask, is_causal=causal, scale=self.scale, enable_gqa=grouped
            )
        return out.permute(2, 0, 1, 3)

    def _dropping(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, noise: Noise) -> Tensor:
        """Attention whose probabilities are dropped by named masks, which no fused kernel takes: S x S in memory."""
        heads, length = q.shape[1], q.shape[2]
        k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
        if mask is None:
            mask = added(torch.ones(length, length, dtype=torch.bool, device=q.device).tril(), q.dtype)
        shares = ((q @ k.transpose(2, 3)) * self.scale + mask).softmax(-1)
        return noise.drop_probabilities(shares, self.dropout, self._first_head(heads)) @ v

    def _dropped(self, noise: Noise | None, heads: int) -> Dropped | None:
        if noise is None or not self.dropout:
            return None
        return Dropped(noise=noise, first_head=self._first_head(heads), rate=self.dropout)

    def _first_head(self, heads: int) -> int:
        """The first of the `heads` query heads of this tensor rank."""
        return self.seam.group.index * heads if self.seam.group is not None else 0


class LatentAttention(Attention):
    """Attention whose keys and values of all heads are made from one latent a token (DeepSeek-AI 2024).

    A head has channels without position and rotated ones, and all heads share the rotated key. Values, which are
    narrower than queries, are padded to their width for the attention kernels.
    """

    def _make_projections(self, spec: ModelSpec) -> None:
        latent = spec.latent
        assert latent is not None, "only for latent attention"
        self.latent, self.value_dim = latent, latent.value
        self.scale *= score_factor(spec)
        self.q_down = self.q_norm = None
        if latent.q_rank is not None:
            self.q_down = Projection(latent.q_rank, spec.hidden, bias=False)
            self.q_norm = RMSNorm(latent.q_rank, LATENT_EPS)
        self.q = Projection(spec.heads * spec.head_dim, latent.q_rank or spec.hidden, bias=False)
        self.kv_down = Projection(latent.kv_rank + latent.rope, spec.hidden, bias=False)
        self.kv_norm = RMSNorm(latent.kv_rank, LATENT_EPS)
        self.kv_up = Projection(spec.heads * (latent.nope + latent.value), latent.kv_rank, bias=False)
        self.o = Projection(spec.hidden, spec.heads * latent.value, bias=False)

    def _projected(self, x_SBD: Tensor, around: Surroundings) -> tuple[Tensor, Tensor, Tensor]:
        """Every tensor rank makes the latents; they enter its own heads together, in the place of `x`."""
        latent, queue = self.latent, self.queue
        widths = [latent.kv_rank, latent.rope, *([] if latent.q_rank is None else [latent.q_rank])]
        kv, key, *q_latent = enter(self._latents(x_SBD), self.seam).split(widths, -1)
        if q_latent:
            (q,) = linear(q_latent[0], [self.q], OPEN, queue)
        else:
            (q,) = linear(x_SBD, [self.q], self.seam.entering, queue)
        (kv,) = linear(kv, [self.kv_up], OPEN, queue)
        q, q_turned = q.unflatten(-1, (-1, self.head_dim)).split((latent.nope, latent.rope), -1)
        k, v = kv.unflatten(-1, (-1, latent.nope + latent.value)).split((latent.nope, latent.value), -1)
        key = key[:, :, None]
        if around.rotation is not None:
            q_turned, key = rotate(q_turned, *around.rotation), rotate(key, *around.rotation)
        q, k = torch.cat((q, q_turned), -1), torch.cat((k, key.expand(*k.shape[:3], -1)), -1)
        return q, k, F.pad(v, (0, self.head_dim - latent.value))

    def _latents(self, x_SBD: Tensor) -> Tensor:
        """Normed latent of keys and values, the rotated key ahead of its rotation, normed latent of queries."""
        down = [self.kv_down] if self.q_down is None else [self.kv_down, self.q_down]
        kv, *q_latent = linear(x_SBD, down, OPEN, self.queue)
        kv, key = kv.split((self.latent.kv_rank, self.latent.rope), -1)
        return torch.cat([self.kv_norm(kv), key, *(self.q_norm(q) for q in q_latent if self.q_norm is not None)], -1)


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
            return self.gate.leave(
                "head",
                chunked_loss_sum(left, table, labels_SB, seam=self.head_seam, queue=self.queue, chunk=self.loss_chunk),
            )
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
