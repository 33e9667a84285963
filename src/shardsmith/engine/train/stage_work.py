"""Compute actions of one rank: forward, backward and the two halves of a split backward, on real tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardsmith.engine.dataset.batches import Microbatch
from shardsmith.engine.models.decoder import Stage
from shardsmith.engine.parallel.data import DataParallel
from shardsmith.engine.runtime.noise import Noise, noise_of
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.engine.runtime.routing import Choices, Routing, RoutingLog
from shardsmith.schedule.ir import Action, Kind


class _Live(NamedTuple):
    entered: Tensor | None
    left: Tensor


class StageWork:
    """Performs actions on this rank's stages for one step's microbatches.

    `loss_sums[m]` is the unscaled loss of microbatch m once its last stage has run here; what is
    back-propagated is that sum times `loss_scale`, divided by the valid tokens of the whole step.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        data: Mapping[int, Sequence[DataParallel]],
        recorder: Recorder,
        pace: Mapping[Kind, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.stages, self.data, self.recorder = stages, data, recorder
        self.pace = dict(pace or {})
        self.microbatches: list[Microbatch] = []
        self.tokens = 1.0
        self.loss_scale = 1.0
        self.training = True
        self.seed, self.step, self.sequences = seed, 0, 1
        self.loss_sums: dict[int, Tensor] = {}
        self.routing = RoutingLog()
        self.replay: Choices | None = None
        """What routers chose in another run of the same step, to be compared; with `forced` also to be chosen."""
        self.forced = False
        self._live: dict[tuple[int, int], _Live] = {}
        self._deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}

    def begin(
        self,
        microbatches: list[Microbatch],
        tokens: float,
        loss_scale: float = 1.0,
        *,
        sequences: int = 1,
        training: bool = True,
    ) -> None:
        """Take the microbatches of a step, valid tokens and sequences of the step over all ranks, and the loss scale.

        Without `training` forwards keep nothing, and no backward may follow.
        """
        self.microbatches, self.tokens, self.loss_scale, self.training = microbatches, tokens, loss_scale, training
        self.sequences = sequences
        self.loss_sums.clear()
        if training:
            self.routing.clear()

    def before(self, action: Action, *, reduced: bool) -> None:
        """Let a whole backward pass launch the reduction that follows it, bucket by bucket."""
        if reduced and action.kind is Kind.B:
            for data in self.data[action.stage]:
                data.arm()

    def unshard(self, stage: int) -> None:
        """Make the weights of a stage whole, unless they stream through its gate during each pass."""
        gate = self.stages[stage].gate
        if not gate.streaming:
            gate.open_all()

    def reshard(self, stage: int) -> None:
        """The counterpart of `unshard`."""
        gate = self.stages[stage].gate
        if not gate.streaming:
            gate.close_all()

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
        for data in self.data[stage]:
            data.finish()

    def _forward(self, action: Action, incoming: Tensor | None) -> Tensor | None:
        stage, batch = self.stages[action.stage], self.microbatches[action.microbatch]
        entered = None
        if incoming is not None:
            entered = incoming.detach().requires_grad_(self.training)
        with torch.set_grad_enabled(self.training):
            source = batch.tokens.t() if entered is None else entered
            routing = self._routing(action.microbatch)
            left = stage(source, batch.positions.t(), batch.documents, self._noise(batch), routing)
            if stage.stage.head:
                loss = stage.loss_sum(left, batch.labels.t())
                self.loss_sums[action.microbatch] = loss.detach()
                left = loss * (self.loss_scale / self.tokens)
        if self.training:
            self._live[action.stage, action.microbatch] = _Live(entered, left)
        return None if stage.stage.head else left.detach()

    def _routing(self, microbatch: int) -> Routing | None:
        if not self.training:
            return None
        return Routing(
            microbatch=microbatch,
            samples=self.microbatches[microbatch].samples,
            scale=self.loss_scale / self.sequences,
            log=self.routing,
            replay=self.replay,
            forced=self.forced,
        )

    def _noise(self, batch: Microbatch) -> Noise | None:
        return noise_of(self.seed, self.step, batch.samples, batch.tokens.device) if self.training else None

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
