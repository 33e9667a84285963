"""Recomputation: activations that are made a second time in backward instead of being kept.

`full` is torch's own checkpoint around a whole layer, which stops its second forward pass as soon as the last
saved tensor is there, so the layer's closing collective is not repeated. `selective` keeps every product of a
matrix and recomputes what is cheap: norms and MLP activations. There autograd is handed a recipe in the place of a
tensor (saved-tensor hooks), because it is the linear *behind* the cheap function that would save its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Function = Callable[..., Tensor]


def plain(function: Function, *inputs: Tensor) -> Tensor:
    """`function(*inputs)`, kept like anything else."""
    return function(*inputs)


def full(function: Function, *args: Any) -> Tensor:
    """`function(*args)`, keeping only its inputs; gradients are bitwise those of a plain call."""
    # Dropout draws its masks from names, not from a global state, so there is no state to restore.
    out: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, early_stop=True)
    return out


@dataclass(frozen=True)
class Recipe:
    """How to make one tensor again, and the shape in which it was saved."""

    function: Function
    inputs: tuple[Tensor, ...]
    shape: torch.Size

    def make(self) -> Tensor:
        """The tensor, computed again."""
        with torch.no_grad():
            return self.function(*self.inputs).view(self.shape)


class Cookbook:
    """Outputs of cheap functions in one layer's forward; whoever saves one of them saves its recipe."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[Tensor, Function, tuple[Tensor, ...]]] = {}

    def cheap(self, function: Function, *inputs: Tensor) -> Tensor:
        """`function(*inputs)`, which can be made again from `inputs`."""
        out = function(*inputs)
        # The output itself is held until the layer is over, so that its place names nothing else meanwhile.
        self._made[_place(out)] = (out, function, tuple(x.detach() for x in inputs))
        return out

    @contextmanager
    def open(self) -> Iterator[None]:
        """Around a layer's forward."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield
        self._made.clear()

    def _pack(self, saved: Tensor) -> Tensor | Recipe:
        made = self._made.get(_place(saved))
        if made is None or not saved.numel() or saved.numel() != made[0].numel() or not saved.is_contiguous():
            return saved
        _, function, inputs = made
        return Recipe(function, inputs, saved.shape)


def _place(x: Tensor) -> tuple[int, int]:
    """Which storage a tensor lies in, and where it begins there (tensors without data have no address)."""
    return x.untyped_storage()._cdata, int(x.storage_offset())


def _unpack(kept: Tensor | Recipe) -> Tensor:
    return kept.make() if isinstance(kept, Recipe) else kept
