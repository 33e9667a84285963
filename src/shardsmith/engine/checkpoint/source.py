"""Source: full tensors of a model, read one at a time. Every reader gives one, every writer takes one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardsmith.specs.model import ModelSpec, stored_weights


@dataclass(frozen=True, kw_only=True)
class Source:
    """The tensors of `model` under its own names and logical shapes, wherever they are.

    `read(name)` brings one full tensor into memory and keeps nothing, so that a writer which takes them in
    turn never holds more than one; `dtypes` says what it will be before it is read.
    """

    model: ModelSpec
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], Tensor]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for weight in stored_weights(self.model):
            yield weight.name, self.read(weight.name)


def in_memory(model: ModelSpec, tensors: Mapping[str, Tensor]) -> Source:
    """The source of `tensors` that are in memory already: all of `model`, in full."""
    expected = {w.name: w.shape for w in stored_weights(model)}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    assert found == expected, f"not the tensors of {model.name}: {sorted(set(found.items()) ^ set(expected.items()))}"
    return Source(model=model, dtypes={name: t.dtype for name, t in tensors.items()}, read=tensors.__getitem__)
