"""What is asked of a training run beside model and plan: Workload, Data, Optimisation, Run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Packing = Literal["joined", "masked", "whole"]
Schedule = Literal["constant", "linear", "cosine", "wsd"]
DecayRule = Literal["matrices", "linear", "all"]

SYNTHETIC = "synthetic"
"""The path that stands for random tokens."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`global_batch` sequences of `seq_len` tokens a step, computed in `dtype`."""

    seq_len: int
    global_batch: int
    dtype: Dtype = "float32"


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where tokens come from: the common prefix of a `.bin`/`.idx` pair, or `synthetic` for random tokens.

    Several paths are one data set; `weights` draws from them in that proportion instead of by their sizes.
    `packing` says how documents become sequences: `joined` end to end, `masked` the same but without seeing
    each other, or `whole`, as many as fit. Held out for evaluation is `eval_path`, or `eval_fraction` of the
    documents.
    """

    path: str | tuple[str, ...] = SYNTHETIC
    weights: tuple[float, ...] = ()
    packing: Packing = "joined"
    eval_path: str | tuple[str, ...] = ()
    eval_fraction: float = 0.0
    seed: int = 1234
    tokenizer: str | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """What is trained on."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def eval_paths(self) -> tuple[str, ...]:
        """What is only evaluated on."""
        return (self.eval_path,) if isinstance(self.eval_path, str) else self.eval_path


@dataclass(frozen=True, kw_only=True)
class Optimisation:
    """Optimiser and its settings; `clip` is the largest allowed global gradient norm (0: no clipping).

    `norm` is the norm that is clipped and reported: `l2`, or `max`, the largest absolute entry.
    The learning rate follows `schedule` as `specs.learning_rate` says. `weight_decay_on` names the
    weights that are decayed: `matrices` (all but norms and biases), `linear` (those without the tables of
    embeddings, positions and head) or `all`. `nonfinite` says what a loss or gradient that is not a finite
    number does: `stop` the run, or `skip` the step.
    """

    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    min_lr: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    weight_decay_on: DecayRule = "matrices"
    momentum: float = 0.0
    clip: float = 1.0
    norm: Literal["l2", "max"] = "l2"
    nonfinite: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True, kw_only=True)
class Run:
    """How long and where: `steps` optimiser steps, outputs under `folder`, `seed` of the initial weights.

    What is held out is evaluated every `eval_every` steps and after the last (0: never), on at most `eval_batches`
    global batches (0: on all of it). `timeout_s` bounds every wait for another rank. `timeline_step` is recorded
    (-1: none).

    A checkpoint is saved after every `save_every` steps and the last one (0: never), and the newest `keep` are
    kept (0: all). `resume` from the newest checkpoint in the folder (`auto`), from the one at a path, or `never`.
    What `reset` names is not resumed: the `optimizer` starts without its moments, the `data` from their start.

    A run that does not resume begins with the weights in the folder `init` (Hugging Face's, a run's, or a
    checkpoint), or with random ones (empty). It may replace an earlier run in its folder only if `overwrite`.
    """

    steps: int = 100
    folder: str = "runs/default"
    seed: int = 0
    eval_every: int = 0
    eval_batches: int = 20
    timeout_s: float = 300.0
    timeline_step: int = -1
    tensorboard: bool = True
    save_every: int = 0
    keep: int = 2
    resume: str = "auto"
    reset: tuple[Literal["optimizer", "data"], ...] = ()
    init: str = ""
    overwrite: bool = False
