"""Saving and resuming a run: what a trainer holds, as a checkpoint, and back into any legal plan."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from shardsmith.engine.checkpoint import store
from shardsmith.engine.checkpoint.blocks import Block, read_blocks, whole_block, write_blocks
from shardsmith.engine.checkpoint.open import open_weights
from shardsmith.engine.checkpoint.record import Record, plain, read_record
from shardsmith.engine.checkpoint.state import (
    generator_blocks,
    optimizer_blocks,
    optimizer_record,
    prepare_optimizer,
    restore_generators,
)
from shardsmith.engine.checkpoint.team import make_team
from shardsmith.engine.dataset.batches import Batches
from shardsmith.engine.train.beginning import CHECKPOINTS, data_record, decide, goes_on
from shardsmith.engine.train.step import Trainer
from shardsmith.plan.setup import Job
from shardsmith.units import counted

_log = logging.getLogger("shardsmith.checkpoint")


class Checkpoints:
    """The checkpoints of one run, of which this process is one rank.

    `step` is the first step to do, `batches` are the data cut so that they go on there; `fresh` unless it continues
    the run that is in its folder. All ranks must make the same calls.
    """

    def __init__(self, job: Job, trainer: Trainer, batches: Batches) -> None:
        self.job, self.trainer, self.batches, self.step = job, trainer, batches, 0
        self.fresh = True
        self.team = make_team(job.run.timeout_s)
        self.root = Path(job.run.folder) / CHECKPOINTS

    def resume(self) -> None:
        """Load what `job.run.resume` says, if there is anything; else the weights that `job.run.init` names, if any.

        Raises `Refused` as `beginning.decide` does.
        """
        found = self.team.agree(lambda: decide(self.job, self.batches.source))
        for warning in found.warnings:
            self._say(str(warning))
        self.fresh = not goes_on(self.job, found.folder)
        if found.folder is not None:
            self.load(found.folder)
        elif self.job.run.init:
            self.begin_with(Path(self.job.run.init))

    def begin_with(self, folder: Path) -> None:
        """Take the weights in `folder`, whatever format they have, as those of step 0; each rank reads its own rows."""
        source, trainer = open_weights(folder, "run.init"), self.trainer
        for name, block in (self._weights() | self._biases()).items():
            part = source.read(name)
            for dim, (start, size) in enumerate(zip(block.offsets, block.tensor.shape, strict=True)):
                part = part.narrow(dim, start, size)
            block.tensor.copy_(part)
        trainer.spread()
        self._say(f"begun with the weights in {folder}")
        trainer.check_replicas()

    def load(self, folder: Path) -> None:
        """Take the state of the run from the checkpoint in `folder`, whatever plan wrote it."""
        record = self.team.agree(lambda: read_record(folder))
        trainer, reset = self.trainer, self.job.run.reset
        weights = self._weights()
        read_blocks(folder / store.WEIGHTS, weights | self._biases(), self.team.group)
        self._load_optimizer(folder, record, weights)
        if record.dtype == "float16" and trainer.scaler.dynamic:
            trainer.scaler.scale, trainer.scaler.good_steps = record.loss_scale, record.good_steps
        trainer.updates, trainer.steps_taken = record.updates, record.step
        trainer.spread()
        self.step = record.step
        self.batches = self.batches.continuing(record.step, 0 if "data" in reset else record.samples)
        self._say(f"resumed from {folder}: {counted(record.step, 'step')} done under {record.plan or 'one rank'}")
        trainer.check_replicas()

    def after(self, step: int, *, stop: bool = False) -> None:
        """`step` is done: save if it is time, if it was the last one, or if the run is about to `stop`."""
        every, done = self.job.run.save_every, step + 1
        if stop or (every and (done % every == 0 or done == self.job.run.steps)):
            self.save(done)

    def save(self, step: int) -> Path:
        """Write the checkpoint of a run with `step` steps done; returns its folder.

        Returns when it is complete. Raises `Refused` on all ranks: one cannot write (F501) or does not save (R302).
        """
        team, final = self.team, store.folder_of(self.root, step)
        team.meet(f"the checkpoint of step {step}")
        staging = team.agree(lambda: store.begin(self.root, step))
        record, weights = self._record(step), self._weights()
        write_blocks(staging / store.WEIGHTS, weights | self._biases(), team.group)
        write_blocks(staging / store.OPTIMIZER, self._optimizer(record, weights), team.group)
        team.agree(lambda: store.commit(staging, final, record))
        team.agree(lambda: store.prune(self.root, self.job.run.keep))
        return final

    def _load_optimizer(self, folder: Path, record: Record, weights: dict[str, Block]) -> None:
        trainer, saved = self.trainer, record.optimizer
        parameters = {name: held.parameter for name, held in trainer.held().items()}
        if "optimizer" in self.job.run.reset or saved is None:
            if saved is not None:
                self._say(f"the optimiser starts without the moments in {folder}, as run.reset says")
            prepare_optimizer(parameters, trainer.optimizer, None)
            return
        now = optimizer_record(parameters, trainer.optimizer, trainer.optimisation)
        saved = replace(saved, states=tuple(key for key in saved.states if key in now.needs))
        prepare_optimizer(parameters, trainer.optimizer, saved)
        blocks = optimizer_blocks(weights, trainer.held(), trainer.optimizer, saved)
        same = (record.world, record.plan) == (self.team.world, str(trainer.setup.plan))
        generators = generator_blocks(self.team.rank, trainer.device) if same else {}
        read_blocks(folder / store.OPTIMIZER, blocks | generators, self.team.group)
        restore_generators(generators, trainer.device)

    def _weights(self) -> dict[str, Block]:
        """This rank's rows of every tensor, as the optimiser has them: master weights where there are any."""
        trainer = self.trainer
        return {
            name: Block(
                shape=trainer.weights[name].shape,
                offsets=held.offsets,
                tensor=held.placed(held.parameter.detach()),
                owned=trainer.owns(name),
            )
            for name, held in trainer.held().items()
        }

    def _biases(self) -> dict[str, Block]:
        """The balancing biases, which stand in a checkpoint beside the weights."""
        owned = self.trainer.owns_biases
        return {name: replace(whole_block(bias), owned=owned) for name, bias in self.trainer.biases().items()}

    def _optimizer(self, record: Record, weights: dict[str, Block]) -> dict[str, Block]:
        trainer = self.trainer
        assert record.optimizer is not None, "a run has an optimiser"
        moments = optimizer_blocks(weights, trainer.held(), trainer.optimizer, record.optimizer)
        return moments | generator_blocks(self.team.rank, trainer.device)

    def _record(self, step: int) -> Record:
        trainer, setup = self.trainer, self.trainer.setup
        parameters = {name: held.parameter for name, held in trainer.held().items()}
        return Record(
            step=step,
            updates=trainer.updates,
            samples=self.batches.consumed(step),
            model=plain(setup.model),
            data=data_record(self.job.data, self.batches.source),
            seed=self.job.run.seed,
            plan=str(setup.plan),
            world=self.team.world,
            dtype=setup.workload.dtype,
            optimizer=optimizer_record(parameters, trainer.optimizer, trainer.optimisation),
            loss_scale=trainer.scaler.scale,
            good_steps=trainer.scaler.good_steps,
        )

    def _say(self, text: str) -> None:
        if self.team.rank == 0:
            _log.warning(text)
