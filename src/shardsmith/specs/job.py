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
    """Where tokens come from: the common prefix of a `.bin`/`.idx` pair, or `synthetic` for random tokens."""

    path: str = "synthetic"
    seed: int = 1234
    tokenizer: str | None = None


@dataclass(frozen=True, kw_only=True)
class Optimisation:
    """Optimiser and its settings; `clip` is the largest allowed global gradient norm (0: no clipping)."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0
    clip: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """How long and where: `steps` optimiser steps, outputs under `folder`, `seed` of the initial weights.

    `timeout_s` bounds every wait for another rank. `timeline_step` is recorded (-1: none).

    A checkpoint is saved after every `save_every` steps and the last one (0: never), and the newest `keep` are
    kept (0: all). `resume` from the newest checkpoint in the folder (`auto`), from the one at a path, or `never`.
    What `reset` names is not resumed: the `optimizer` starts without its moments, the `data` from their start.
    """

    steps: int = 100
    folder: str = "runs/default"
    seed: int = 0
    log_every: int = 1
    timeout_s: float = 300.0
    timeline_step: int = -1
    tensorboard: bool = True
    save_every: int = 0
    keep: int = 2
    resume: str = "auto"
    reset: tuple[Literal["optimizer", "data"], ...] = ()
