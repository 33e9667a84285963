"""One rank of a plan's world, alone in this process: the Trainer's own step on fake tensors and a group of nobody else.

Fake tensors (torch's FakeTensorMode, on the CPU) have shapes and storages but no data, and the `fake` process group
has as many ranks as asked for and moves nothing. So the very code of a run goes through a step of a job
of thousands of ranks, allocating, communicating and multiplying as there, in the memory of a laptop.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardsmith.engine.checkpoint.record import OptimizerRecord, needed_states
from shardsmith.engine.checkpoint.state import prepare_optimizer
from shardsmith.engine.dataset.batches import Microbatch
from shardsmith.engine.dryrun.tracker import Tracker
from shardsmith.engine.dryrun.watch import watching
from shardsmith.engine.train.step import Trainer
from shardsmith.layout.facts import CollectiveCount
from shardsmith.layout.record import StepRecord
from shardsmith.layout.routing import StatedRouting
from shardsmith.plan.batch import batching
from shardsmith.plan.setup import Setup
from shardsmith.schedule.ir import Action, Kind
from shardsmith.specs.job import Optimisation


def dry_run_rank(setup: Setup, rank: int, optimisation: Optimisation, *, imbalance: float = 1.0) -> StepRecord:
    """The record of one step of global `rank`, as a run has it from its second step on.

    Of a model with experts, those of this rank receive `imbalance` times the mean (see `layout.routing`). No process
    group may be up in this process; none is left behind.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=setup.plan.world)
    try:
        stated = StatedRouting(setup, rank, imbalance) if setup.model.experts is not None else None
        # Choices of experts have data (see `stated.py`), and meet tensors that have none.
        with FakeTensorMode(allow_non_fake_inputs=True), watching(rank, stated) as tracker:
            trainer = _ready(setup, rank, optimisation, tracker)
            with tracker.labelling("inputs"):
                microbatches = fake_batch(setup)
            tracker.start()
            trainer.step(microbatches)
            return StepRecord(
                rank=rank,
                pipeline_rank=trainer.coord.pipeline,
                memory={item: size for item, size in tracker.at_peak.items() if size},
                collectives=recorded(trainer),
                flops=dict(tracker.flops),
            )
    finally:
        dist.destroy_process_group()


def recorded(trainer: Trainer) -> tuple[CollectiveCount, ...]:
    """What the recorder of `trainer` counted since it was cleared."""
    return tuple(
        CollectiveCount(axis=t.axis, kind=t.kind, purpose=t.purpose, count=tally.count, bytes=tally.bytes)  # type: ignore[arg-type]
        for t, tally in trainer.recorder.tallies.items()
    )


def fake_batch(setup: Setup) -> list[Microbatch]:
    """The microbatches of a step, as whole sequences of one document each."""
    cut, length = batching(setup.plan, setup.workload), setup.workload.seq_len
    places = torch.arange(length)[None]

    def batch(index: int) -> Microbatch:
        tokens, labels = (torch.zeros(cut.microbatch, length, dtype=torch.int64) for _ in range(2))
        samples = tuple(range(index * cut.microbatch, (index + 1) * cut.microbatch))
        return Microbatch(index=index, samples=samples, tokens=tokens, labels=labels, positions=places.clone())

    return [batch(index) for index in range(cut.microbatches)]


def _ready(setup: Setup, rank: int, optimisation: Optimisation, tracker: Tracker) -> Trainer:
    """A trainer as it stands between two steps: the optimiser has its states, messages go without headers."""
    trainer = Trainer(setup, optimisation, rank=rank, seed=0, device=torch.device("cpu"), stays=False)
    states = needed_states(optimisation)
    owned = {name: held.parameter for name, held in trainer.held().items()}
    record = OptimizerRecord(kind=optimisation.optimizer, steps=1, states=states, needs=states)
    prepare_optimizer(owned, trainer.optimizer, record)
    trainer.wire.checking = False
    trainer.recorder.counting = True
    masters = [p.data for p in owned.values()]
    moments = [x for state in trainer.optimizer.state.values() for x in state.values()]
    tracker.name([*masters, *moments], "optimizer")
    tracker.name([x for data in trainer._all_data() for x in data.stored.values()], "weights")
    whole = "gathered" if setup.plan.zero == 3 else "weights"
    tracker.name(trainer.parameters().values(), whole)
    tracker.name([b.flat for data in trainer._all_data() for b in data.buckets], "gradients")
    _follow_actions(trainer, tracker)
    return trainer


def _follow_actions(trainer: Trainer, tracker: Tracker) -> None:
    """Let what outlives an action be for what waits (activations), and what it passes on a message."""
    plain = trainer.work.perform

    def perform(action: Action, incoming: torch.Tensor | None) -> torch.Tensor | None:
        if action.kind is Kind.F and incoming is not None:
            tracker.name([incoming], "activations")
        with tracker.surviving("activations"):
            out = plain(action, incoming)
        if out is not None:
            tracker.name([out], "messages")
        return out

    trainer.work.perform = perform  # type: ignore[method-assign]
