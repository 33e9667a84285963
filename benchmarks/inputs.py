"""Files and tensors that every contestant starts from: one token stream, one set of initial weights.

Needs numpy and torch alone, so that it also runs in the environments of other frameworks. `make_inputs.py`
fills the folder before the first run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from workload import GLOBAL_BATCH, MICROBATCH, SHAPE, WEIGHT_DECAY

TOKENS_FILE, WEIGHTS_FILE = "tokens.npy", "weights.pt"


def token_stream(sequences: int) -> np.ndarray:
    """Int32 [sequences, seq_len + 1]: a Markov chain, every token with 8 successors, so that there is much to learn."""
    random = np.random.default_rng(1234)
    successors = random.integers(0, SHAPE.vocab, (SHAPE.vocab, 8))
    shares = 1 / np.arange(1, 9)
    length = sequences * (SHAPE.seq_len + 1)
    choices = np.searchsorted(np.cumsum(shares / shares.sum()), random.random(length)).clip(0, 7)
    out, token = np.empty(length, np.int32), 0
    for at, choice in enumerate(choices):
        token = out[at] = successors[token, choice]
    return out.reshape(sequences, SHAPE.seq_len + 1)


def batch(folder: Path, step: int, data_rank: int, data: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets, int64 [MICROBATCH, seq_len] each, of every microbatch of one data rank in a step."""
    each = GLOBAL_BATCH // data
    first = step * GLOBAL_BATCH + data_rank * each
    rows = np.load(folder / TOKENS_FILE, mmap_mode="r")[first : first + each]
    tokens = torch.from_numpy(rows.astype(np.int64))
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens.split(MICROBATCH)]


def initial_weights(folder: Path) -> dict[str, Tensor]:
    """All full initial tensors, float32, under Shardsmith's names."""
    weights: dict[str, Tensor] = torch.load(folder / WEIGHTS_FILE)
    return weights


def decay_groups(named: dict[str, Tensor]) -> list[dict[str, object]]:
    """Parameter groups for AdamW: matrices decay, norms (vectors) do not."""
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in named.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]
