"""Greedy sampling from the final weights of a run, in one process."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from shardsmith.engine.models.decoder import Stage
from shardsmith.engine.models.whole import whole_model
from shardsmith.specs.model import ModelSpec


def load_weights(model: ModelSpec, path: Path) -> Stage:
    """The whole model with the full tensors of `path`; every tensor must be there in its full shape."""
    full = load_file(path)
    module = whole_model(model, seed=0, dtype=next(iter(full.values())).dtype, device=torch.device("cpu"))
    module.load_state_dict(full)
    return module


@torch.no_grad()
def greedy(module: Stage, tokens: list[int], count: int) -> list[int]:
    """The `count` most likely next tokens after `tokens`, one after another; the context slides once it is full."""
    out = list(tokens)
    for _ in range(count):
        window = torch.tensor(out[-module.spec.context :])[:, None]
        logits_SBV = module(window, torch.arange(len(window))[:, None])
        out.append(int(logits_SBV[-1, 0].argmax()))
    return out[len(tokens) :]


def greedy_from(model: ModelSpec, path: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`greedy` for each of `prompts` from the weights in `path`."""
    module = load_weights(model, path)
    return [greedy(module, prompt, count) for prompt in prompts]
