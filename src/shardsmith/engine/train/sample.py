"""Text from trained weights, in one process: the most likely token each time, or one drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardsmith.engine.checkpoint.open import open_weights
from shardsmith.engine.models.decoder import Stage
from shardsmith.engine.models.whole import whole_model
from shardsmith.engine.parallel.expert import biases


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """At most `count` tokens follow a prompt; one of `ends` is the last.

    `temperature` 0 takes the most likely token; above it, tokens are drawn from the softmax of the logits divided by
    it, among the `top_k` likeliest (0: all), by a generator that `seed` starts anew for each prompt.
    """

    count: int
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    ends: tuple[int, ...] = ()


@torch.no_grad()
def load_model(folder: Path) -> Stage:
    """The whole model of `folder` (Hugging Face's, a run's, a checkpoint), in float32 or wider.

    Raises `Refused` as `open_weights`.
    """
    source = open_weights(folder)
    wide = torch.float64 if torch.float64 in source.dtypes.values() else torch.float32
    module = whole_model(source.model, seed=0, dtype=wide, device=torch.device("cpu"))
    tensors: dict[str, Tensor] = dict(module.named_parameters()) | dict(biases([module]))
    for name, tensor in source:
        tensors[name].copy_(tensor)
    return module.eval()


@torch.no_grad()
def continue_prompt(module: Stage, prompt: Sequence[int], sampling: Sampling) -> list[int]:
    """The tokens that follow `prompt`, one after another; the context slides once it is full."""
    generator = torch.Generator().manual_seed(sampling.seed)
    out = list(prompt)
    while len(out) < len(prompt) + sampling.count:
        window = torch.tensor(out[-module.spec.context :])[:, None]
        logits_SBV = module(window, torch.arange(len(window))[:, None])
        out.append(_choose(logits_SBV[-1, 0], sampling, generator))
        if out[-1] in sampling.ends:
            break
    return out[len(prompt) :]


def continue_from(folder: Path, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
    """`continue_prompt` for each of `prompts` with the weights in `folder`."""
    module = load_model(folder)
    return [continue_prompt(module, prompt, sampling) for prompt in prompts]


def _choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    kept = logits_V.topk(min(sampling.top_k, len(logits_V)) if sampling.top_k else len(logits_V))
    chances = torch.softmax(kept.values.double() / sampling.temperature, 0)
    return int(kept.indices[torch.multinomial(chances, 1, generator=generator)])
