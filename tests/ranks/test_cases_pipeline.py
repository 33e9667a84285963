"""Faults of pipelines that others have met: shapes that vary, labels that get mixed up, memory that grows."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import PLAIN, assert_same, random_microbatch, small, trained

from shardsmith.engine.dataset.batches import Microbatch
from shardsmith.engine.models import initialise
from shardsmith.engine.runtime.failures import RankFailed
from shardsmith.engine.train.step import Trainer
from shardsmith.layout.shards import local_shards
from shardsmith.plan.batch import batching
from shardsmith.plan.setup import Setup

pytestmark = pytest.mark.ranks


def of_lengths(*lengths: int) -> list[Microbatch]:
    return [random_microbatch(index, length, valid=length - index) for index, length in enumerate(lengths)]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe", "interleaved"])
def test_b08_microbatches_of_lengths_5_9_3(run_ranks, schedule):
    setup = small(f"tensor=2,pipeline=2,microbatches=3,schedule={schedule}")
    assert_same(run_ranks, setup, [of_lengths(5, 9, 3), of_lengths(7, 3, 8)])


def test_b08_lengths_vary_under_sequence_parallelism_too(run_ranks):
    setup = small("tensor=2,pipeline=2,microbatches=3,sequence_parallel=true", "tiny-gpt")
    assert_same(run_ranks, setup, [of_lengths(4, 8, 2)])


def test_b08_ends_that_expect_other_shapes_say_so_in_the_first_step(run_ranks):
    setup = small("pipeline=2,microbatches=2")

    def step():
        lengths = (6, 4) if dist.get_rank() == 0 else (6, 5)
        trained(setup, [of_lengths(*lengths)])

    with pytest.raises(RankFailed, match=r"the peer sends \[0, 0, 1, 4, 1, 24\] for .* expected \[0, 0, 1, 5, 1, 24\]"):
        run_ranks(2, step)


@pytest.mark.parametrize("widths", [(4, 6), (5, 5)])
def test_b10_labels_belong_to_their_microbatch(run_ranks, widths):
    first, second = of_lengths(*widths)
    loss = {}
    for line in ("microbatches=2", "pipeline=2,microbatches=2", "pipeline=2,microbatches=2,schedule=gpipe"):
        ranks = run_ranks(small(line).plan.world, trained, small(line), [[first, second]])
        loss[line] = {results[0].loss for results, _ in ranks}
    assert len({frozenset(found) for found in loss.values()}) == 1, loss
    if widths[0] == widths[1]:  # the silent case: only now could they be exchanged at all
        exchanged = [replace(first, labels=second.labels), replace(second, labels=first.labels)]
        ((results, _),) = run_ranks(1, trained, small("microbatches=2"), [exchanged])
        assert {results[0].loss} != loss["microbatches=2"]


class Storage(TorchDispatchMode):
    """The most bytes of tensors, made while this is on, that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def watched(setup: Setup) -> dict[str, Any]:
    """One step of this rank after a first one: bytes of gradients, live activations, peak of new storage."""
    trainer = Trainer(setup, PLAIN, rank=dist.get_rank(), seed=0, device=torch.device("cpu"))
    batch = [random_microbatch(i, 8) for i in range(batching(setup.plan, setup.workload).microbatches)]
    trainer.step(batch)
    perform, live, lefts, alive = trainer.work.perform, [], [], []

    def watch(action, incoming):
        out = perform(action, incoming)
        live.append(len(trainer.work._live))
        if (action.stage, action.microbatch) in trainer.work._live:
            left = trainer.work._live[action.stage, action.microbatch].left
            # A node of a graph takes no weak reference itself, but keeps what it is given along.
            node, mark = left.node if isinstance(left, GradientEdge) else left.grad_fn, set()
            node.metadata["mark"] = mark
            lefts.append(weakref.ref(mark))
        alive.append(sum(left() is not None for left in lefts))
        return out

    trainer.work.perform = watch
    with Storage() as storage:
        trainer.step(batch)
    parameters = list(trainer.parameters().values())
    flats = [bucket.flat for data in trainer._all_data() for bucket in data.buckets]
    homes = {flat.untyped_storage().data_ptr() for flat in flats}
    return {
        "gradient bytes": sum(flat.nbytes for flat in flats) / sum(p.nbytes for p in parameters),
        "in place": all(p.grad.untyped_storage().data_ptr() in homes for p in parameters),
        "live": max(live),
        "alive": max(alive),
        "left over": len(trainer.work._live) + sum(left() is not None for left in lefts),
        "peak": storage.peak,
    }


def test_b16_memory_does_not_grow_with_microbatches(run_ranks):
    peaks = []
    for microbatches in (2, 4, 8):
        found = run_ranks(2, watched, small(f"pipeline=2,microbatches={microbatches}"))
        for rank, seen in enumerate(found):
            assert seen["gradient bytes"] == 1.0
            assert seen["in place"]
            assert seen["live"] == seen["alive"] == min(2 - rank, microbatches)
            assert seen["left over"] == 0
        peaks.append([seen["peak"] for seen in found])
    for rank in range(2):  # a few numbers a microbatch, such as its loss, and no activation or gradient more
        assert max(peak[rank] for peak in peaks) <= 1.02 * peaks[0][rank], peaks


def test_b16_gpipe_keeps_all_microbatches(run_ranks):
    """The same measurement sees growth where there is some."""
    four, eight = (run_ranks(2, watched, small(f"pipeline=2,schedule=gpipe,microbatches={m}"))[0] for m in (4, 8))
    assert (four["live"], eight["live"]) == (4, 8)
    assert eight["gradient bytes"] == 1.0
    assert eight["peak"] > 1.4 * four["peak"]


def test_h16_real_shards_are_as_planned(run_ranks):
    setup = small("tensor=2,pipeline=2", "tiny-gpt", hidden=8, ffn=4, heads=2, kv_heads=2, head_dim=4)

    def shapes():
        trainer = Trainer(setup, PLAIN, rank=dist.get_rank(), seed=0, device=torch.device("cpu"))
        return {name: tuple(p.shape) for name, p in trainer.parameters().items()}

    for rank, found in enumerate(run_ranks(4, shapes)):
        assert found == {h.weight.name: h.shard.shape for h in local_shards(setup, rank)}
        up = next(name for name in found if name.endswith("mlp.up.weight"))
        assert found[up] == (2, 8)  # of 4 x 8


def test_h16_a_shard_that_is_not_as_planned_stops_the_run(run_ranks, monkeypatch):
    def whole(weight, shard, seed):
        return initialise.full_rows(weight, seed, 0, weight.shape[0])

    monkeypatch.setattr(initialise, "initial_shard", whole)
    with pytest.raises(RankFailed, match=r"embedding\.weight: shard is not as planned"):
        run_ranks(2, trained, small("tensor=2"), [])
