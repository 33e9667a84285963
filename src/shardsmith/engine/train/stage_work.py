"""Compute actions of one rank: forward, backward and the two halves of a split backward, on real tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardsmith.engine.dataset.batches import Microbatch
from shardsmith.engine.models.decoder import Stage
from shardsmith.engine.parallel.data import StageGradients
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.schedule.ir import Action, Kind


class _Live(NamedTuple):
    entered: Tensor | None
    left: Tensor


class StageWork:
    """Performs actions on this rank's stages for one step's microbatches.

    `loss_sums[m]` is the unscaled loss of microbatch m once its last stage has run here; what is
    back-propagated is that sum divided by the valid tokens of the whole step.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        gradients: Mapping[int, StageGradients],
        recorder: Recorder,
        pace: Mapping[Kind, float] | None = None,
    ) -> None:
        self.stages, self.gradients, self.recorder = stages, gradients, recorder
        self.pace = dict(pace or {})
        self.microbatches: list[Microbatch] = []
        self.tokens = 1.0
        self.training = True
        self.loss_sums: dict[int, Tensor] = {}
        self._live: dict[tuple[int, int], _Live] = {}
        self._deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}

    def begin(self, microbatches: list[Microbatch], tokens: float, *, training: bool = True) -> None:
        """Take the microbatches of a step, and the number of valid tokens of the step over all ranks.

        Without `training` forwards keep nothing, and no backward may follow.
        """
        self.microbatches, self.tokens, self.training = microbatches, tokens, training
        self.loss_sums.clear()

    def before(self, action: Action, *, last: bool) -> None:
        """Arm the reduction of a stage ahead of its last backward work."""
        if last:
            self.gradients[action.stage].arm()

    def perform(self, action: Action, incoming: Tensor | None) -> Tensor | None:
        """Compute one action; see `Work`."""
        start = time.monotonic()
        perform = {Kind.F: self._forward, Kind.B: self._backward, Kind.I: self._backward, Kind.W: self._weights}
        out = perform[action.kind](action, incoming)
        if action.kind in self.pace:
            time.sleep(max(0.0, start + self.pace[action.kind] - time.monotonic()))
        self.recorder.computed(str(action), start, stage=action.stage, microbatch=action.microbatch)
        return out

    def reduce(self, stage: int) -> None:
        """Flush the reduction of a stage."""
        self.gradients[stage].finish()

    def _forward(self, action: Action, incoming: Tensor | None) -> Tensor | None:
        stage, batch = self.stages[action.stage], self.microbatches[action.microbatch]
        entered = None
        if incoming is not None:
            entered = incoming.detach().requires_grad_(self.training)
        with torch.set_grad_enabled(self.training):
            left = stage(batch.tokens.t() if entered is None else entered, batch.positions.t(), batch.documents)
            if stage.stage.head:
                loss = stage.loss_sum(left, batch.labels.t())
                self.loss_sums[action.microbatch] = loss.detach()
                left = loss / self.tokens
        if self.training:
            self._live[action.stage, action.microbatch] = _Live(entered, left)
        return None if stage.stage.head else left.detach()

    def _backward(self, action: Action, incoming: Tensor | None) -> Tensor | None:
        entered, left = self._live.pop((action.stage, action.microbatch))
        queue = self.stages[action.stage].queue
        queue.deferring = action.kind is Kind.I
        torch.autograd.backward(left, incoming)
        if queue.deferring:
            self._deferred[action.stage, action.microbatch] = queue.take()
            queue.deferring = False
        return None if entered is None else entered.grad

    def _weights(self, action: Action, incoming: Tensor | None) -> None:
        for compute in self._deferred.pop((action.stage, action.microbatch)):
            compute()
