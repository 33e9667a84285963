"""The global gradient norm and one clip factor, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Sum of squares of all `gradients`, float64; those that other ranks count are left out by the caller."""
    counted = list(gradients)
    if not counted:
        return torch.zeros((), dtype=torch.float64)
    # A norm in the gradients' own narrow dtype would be rounded, or overflow where they do not.
    wide = torch.float64 if counted[0].dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(counted, 2, dtype=wide)).double().square().sum()


def largest_entry(gradients: Iterable[Tensor]) -> Tensor:
    """The infinity norm of all `gradients` together, float64."""
    entries = [g.abs().max().double() for g in gradients if g.numel()]
    return torch.stack(entries).max() if entries else torch.zeros((), dtype=torch.float64)


def clip_factor(norm: float, largest: float) -> float:
    """What to multiply every gradient with so that the global norm is at most `largest` (0: never clip)."""
    if largest <= 0 or norm <= largest:
        return 1.0
    return largest / (norm + 1e-6)
