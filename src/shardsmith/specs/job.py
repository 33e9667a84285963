"""What is asked of a training run beside model and plan: Workload, Data, Optimisation, Run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`global_batch` sequences of `seq_len` tokens a step, computed in `dtype`."""

    seq_len: int
    global_batch: int
    dtype: Dtype = "float32"


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where tokens come from: the common prefix of a `.bin`/`.idx` pair, or `synthetic` for random tokens.

    A `tokenizer`, where one is named, must fit the model's vocabulary.
    """

    path: str = "synthetic"
    seed: int = 1234
    tokenizer: str | None = None


@dataclass(frozen=True, kw_only=True)
class Optimisation:
    """Optimiser and its settings; `clip` is the largest allowed global gradient norm (0: no clipping).

    `norm` is the norm that is clipped and reported: `l2`, or `max`, the largest absolute entry.
    """

    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0
    clip: float = 1.0
    norm: Literal["l2", "max"] = "l2"


@dataclass(frozen=True, kw_only=True)
class Run:
    """How long and where: `steps` optimiser steps, outputs under `folder`, `seed` of the initial weights.

    `timeout_s` bounds every wait for another rank. `timeline_step` is recorded (-1: none).
    """

    steps: int = 100
    folder: str = "runs/default"
    seed: int = 0
    timeout_s: float = 300.0
    timeline_step: int = -1
    tensorboard: bool = True
