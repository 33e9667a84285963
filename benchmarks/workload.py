"""The work itself, in numbers: one model, one batch, one optimiser for every contestant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama: RMSNorm, rotary positions, SwiGLU, grouped key/value heads, untied head."""

    layers: int = 8
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 688
    vocab: int = 4096
    seq_len: int = 256
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


SHAPE = Shape()
GLOBAL_BATCH = 16
"""Sequences of a step over all ranks."""
MICROBATCH = 2
"""Sequences of a microbatch."""
TOKENS_PER_STEP = GLOBAL_BATCH * SHAPE.seq_len
SEED = 7
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
"""AdamW, constant learning rate, no clipping; norms are exempt from weight decay."""
