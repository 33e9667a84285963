"""Causal self-attention, grouped or latent.

Legend: S sequence, B sequences of the microbatch, D hidden, H heads, E head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardsmith.engine.models.attention_mask import added
from shardsmith.engine.models.norm import RMSNorm
from shardsmith.engine.models.rope import rotate, score_factor
from shardsmith.engine.models.surroundings import Surroundings
from shardsmith.engine.runtime.linear import OPEN, Projection, WeightQueue, enter, linear
from shardsmith.engine.runtime.noise import Noise
from shardsmith.engine.runtime.sequence_parts import Dropped
from shardsmith.specs.model import ModelSpec

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever that of the other norms is."""


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
