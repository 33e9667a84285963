"""Dynamic loss scaling for float16 gradients (Micikevicius et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScaler:
    """Multiplies the loss by `scale`; halves it when a gradient overflows, doubles it after `patience` good steps.

    Every rank sees the same norm and so takes the same decision. A run in a wider dtype has scale 1 for good.
    """

    scale: float = 1.0
    dynamic: bool = False
    patience: int = 1000
    smallest: float = 2.0**-14
    largest: float = 2.0**24
    good_steps: int = 0

    def update(self, *, finite: bool) -> None:
        """Learn how the step went; a step that is not finite is skipped by the trainer."""
        if not self.dynamic:
            return
        if not finite:
            self.scale, self.good_steps = max(self.scale / 2, self.smallest), 0
            return
        self.good_steps += 1
        if self.good_steps == self.patience:
            self.scale, self.good_steps = min(self.scale * 2, self.largest), 0
