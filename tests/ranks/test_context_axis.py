"""The context axis in training: what ranks are given, keep, send and count."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardsmith.engine.dataset.batches import IGNORED, Microbatch, Synthetic, batches_of, held_out_of
from shardsmith.engine.dataset.samples import positions_in
from shardsmith.engine.parallel.context import split
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.noise import noise_of
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.engine.runtime.sequence_parts import Parts
from shardsmith.engine.train.evaluate import evaluate
from shardsmith.engine.train.first_steps import check_batches
from shardsmith.engine.train.step import Trainer
from shardsmith.errors import Refused
from shardsmith.layout.collectives import collectives
from shardsmith.plan.file import make_setup
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import ModelSpec

pytestmark = pytest.mark.ranks

LLAMA = ModelSpec(
    name="llama", layers=2, hidden=32, heads=8, kv_heads=4, head_dim=4, ffn=48, vocab=29, context=256, init_std=0.2
)


def setup(line: str, *, seq_len: int = 24, dtype: str = "float32", batch: int = 4, **changes: object) -> Setup:
    found = make_setup(plan=line, seq_len=seq_len, global_batch=batch, dtype=dtype)
    return replace(found, model=LLAMA.with_(**changes))


def trainer_of(found: Setup) -> Trainer:
    return Trainer(found, Optimisation(), rank=dist.get_rank(), seed=0, device=torch.device("cpu"))


def part(index: int, count: int) -> Parts:
    """Part `index` of `count`, seen without other ranks."""
    ring = Group(axis="context", ranks=tuple(range(count)), index=index, recorder=Recorder(index))
    alone = Group(axis="context", ranks=(index,), index=0, recorder=Recorder(index))
    return Parts(ring=ring, ulysses=alone)


def microbatch(documents: Iterable[int] | None = None) -> Microbatch:
    """Tokens 0..7, each with the next one as its label, the last without."""
    numbers = None if documents is None else torch.tensor([list(documents)])
    positions = torch.arange(8)[None] if numbers is None else torch.from_numpy(positions_in(numbers.numpy()))
    labels = torch.tensor([[*range(1, 8), IGNORED]])
    return Microbatch(
        index=0, samples=(0,), tokens=torch.arange(8)[None], labels=labels, positions=positions, documents=numbers
    )


def test_a25_labels_are_shifted_once_on_the_whole_sequence() -> None:
    first, second = (split(microbatch(), part(index, 2)) for index in (0, 1))
    assert first.tokens.tolist() == [[0, 1, 6, 7]]
    assert first.labels.tolist() == [[1, 2, 7, IGNORED]]
    assert second.tokens.tolist() == [[2, 3, 4, 5]]
    assert second.labels.tolist() == [[3, 4, 5, 6]]
    assert first.targets + second.targets == 7


def test_a26_positions_are_those_of_the_whole_sequence_or_document() -> None:
    for documents, expected in (
        (None, ([0, 1, 6, 7], [2, 3, 4, 5])),
        ([0] * 3 + [1] * 5, ([0, 1, 3, 4], [2, 0, 1, 2])),
    ):
        parts = [split(microbatch(documents), part(index, 2)) for index in (0, 1)]
        assert tuple(p.positions[0].tolist() for p in parts) == expected


def test_a29_dropout_masks_differ_over_context_ranks_and_are_those_of_the_places() -> None:
    noise = noise_of(1, 0, (3,), torch.device("cpu")).of(0)
    whole = noise.drop(torch.ones(160, 1, 4), 0.5, "mlp")
    for index in range(2):
        parts = part(index, 2)
        held = replace(noise, places_S=parts.places_of(80, torch.device("cpu")))
        own = held.drop(torch.ones(80, 1, 4), 0.5, "mlp")
        assert torch.equal(own, parts.split(whole, 0))
        half = held.drop(torch.ones(40, 1, 4), 0.5, "mlp", first=40)
        assert torch.equal(half, own[40:])


Counts = dict[tuple[str, str, str], tuple[int, int]]

SENDING = (
    ("context=4,microbatches=2", {}),
    ("context=4,ulysses=4,microbatch=2,recompute=full", {"kv_heads": 2}),
    ("context=4,ulysses=2,microbatches=1,loss_chunk=5", {"kv_heads": 1}),
    ("context=2,tensor=2,sequence_parallel=true,microbatches=2", {}),
    ("context=2,tensor=2,ulysses=2,recompute=full,microbatches=2", {"qk_norm": True}),
    ("context=2,data=2,zero=3,microbatches=2,bucket_mb=0.001", {}),
    ("context=2,data=2,replicate=2,zero=1,microbatches=2", {"tied": True}),
    ("context=2,data=2,microbatches=2", {"window": 4}),
    ("context=2,pipeline=2,schedule=zb_h1,microbatches=4", {"tied": True}),
    ("context=2,tensor=2,microbatch=2,overlap=half_microbatches", {}),
    ("context=2,tensor=2,microbatch=2,overlap=chunks,sequence_parallel=true", {}),
)


def recorded(found: Setup) -> Counts:
    """Counts and bytes of this rank's second step: in the first, headers go ahead of messages."""
    trainer = trainer_of(found)
    source = Synthetic(seed=0, vocab=29, seq_len=found.workload.seq_len, ignored=0.5, packed=True)
    batches = batches_of(source, seed=0, setup=trainer.setup)
    trainer.step(batches.batch(0, trainer.data_index))
    trainer.recorder.counting = True
    trainer.step(batches.batch(1, trainer.data_index))
    return {tuple(traffic): (tally.count, tally.bytes) for traffic, tally in trainer.recorder.tallies.items()}


def all_recorded(setups: list[Setup]) -> list[Counts]:
    return [recorded(found) for found in setups]


def test_a_step_sends_what_the_layout_says(run_ranks: Callable[..., list[Any]]) -> None:
    setups = [setup(line, **changes) for line, changes in SENDING]
    setups.append(setup("context=4,ulysses=2,microbatches=2", dtype="bfloat16"))
    for rank, found in enumerate(run_ranks(4, all_recorded, setups, timeout=100)):
        for each, counts in zip(setups, found, strict=True):
            stated = {(c.axis, c.kind, c.purpose): (c.count, c.bytes) for c in collectives(each, rank)}
            assert counts == stated, f"{each.plan} on rank {rank}"
            assert any(axis == "context" for axis, _, _ in counts)


def saved_bytes(setups: list[Setup]) -> list[int]:
    """Bytes that a forward pass of one microbatch keeps for its backward pass on this rank, without weights."""
    return [_saved_bytes(found) if dist.get_rank() < found.plan.world else 0 for found in setups]


def _saved_bytes(found: Setup) -> int:
    trainer = trainer_of(found)
    (stage,) = trainer.stages.values()
    weights = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    source = Synthetic(seed=0, vocab=29, seq_len=found.workload.seq_len)
    batch = batches_of(source, seed=0, setup=trainer.setup).batch(0, trainer.data_index)[0]
    batch = split(batch, trainer.parts)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        stage.loss_sum(stage(batch.tokens.t(), batch.positions.t()), batch.labels.t())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for at, size in storages.items() if at not in weights)


def test_activations_fall_as_1_over_context(run_ranks: Callable[..., list[Any]]) -> None:
    found = {}
    for line in ("context=1", "context=2", "context=2,ulysses=2", "context=4", "context=4,ulysses=2"):
        each = setup(line, seq_len=256, batch=1)
        found[line] = max(sizes[0] for sizes in run_ranks(each.plan.world, saved_bytes, [each]))
    print(found)
    whole = found.pop("context=1")
    for line, size in found.items():
        # Where heads are exchanged the output is kept in both forms: for attention, and for the projection behind it.
        assert size * int(line[8]) <= (1.08 if "ulysses" in line else 1.0) * whole, line


LINES = ("context=2", "context=2,ulysses=2", "context=2,zero=2")


def evaluated(setups: list[Setup]) -> list[tuple[float, int, int]]:
    """Held-out loss and its tokens, and the tokens that a training step reports."""
    found = []
    for each in setups:
        trainer = trainer_of(each)
        held_out = held_out_of(
            Synthetic(seed=5, vocab=29, seq_len=24, samples=6, ignored=0.7, packed=True), seed=0, setup=each
        )
        result = evaluate(trainer, held_out)
        batches = batches_of(Synthetic(seed=0, vocab=29, seq_len=24, ignored=0.5), seed=0, setup=trainer.setup)
        step = trainer.step(batches.batch(0, trainer.data_index))
        found.append((result.loss, result.tokens, step.tokens))
    return found


def test_a04_evaluation_and_tokens_count_every_token_once(run_ranks: Callable[..., list[Any]]) -> None:
    ((loss, tokens, trained),) = run_ranks(1, evaluated, [setup("", dtype="float64")])[0]
    assert tokens > 0
    for found in run_ranks(2, evaluated, [setup(line, dtype="float64") for line in LINES]):
        for other in found:
            assert other == (pytest.approx(loss, rel=1e-12), tokens, trained)


def traced(found: Setup) -> list[tuple[str, str, int]]:
    trainer = trainer_of(found)
    trainer.recorder.tracing = True
    batches = batches_of(Synthetic(seed=0, vocab=29, seq_len=24), seed=0, setup=trainer.setup)
    trainer.step(batches.batch(0, trainer.data_index))
    dist.barrier()
    return [(s.lane, s.name, s.bytes) for s in trainer.recorder.spans if s.end >= s.start]


def test_hops_and_exchanges_have_a_lane(run_ranks: Callable[..., list[Any]]) -> None:
    found = setup("context=4,ulysses=2,microbatches=2", batch=2)
    for rank, spans in enumerate(run_ranks(4, traced, found)):
        own = [(name, size) for lane, name, size in spans if lane == "context"]
        stated = [c for c in collectives(found, rank) if c.axis == "context" and c.kind != "send"]
        for c in stated:
            sizes = [size for name, size in own if name == f"{c.kind} {c.purpose}"]
            assert (len(sizes), sum(sizes)) == (c.count, c.bytes), c
        assert len(own) == sum(c.count for c in stated)


def altered(found: Setup) -> str:
    trainer = trainer_of(found)
    batches = batches_of(Synthetic(seed=0, vocab=29, seq_len=24), seed=0, setup=trainer.setup)
    microbatches = batches.batch(0, trainer.data_index)
    check_batches(microbatches, batches, trainer.groups, 0)
    if dist.get_rank() == 1:
        microbatches[0].tokens[0, 0] += 1
    with pytest.raises(Refused) as refused:
        check_batches(microbatches, batches, trainer.groups, 0)
    return str(refused.value)


def test_f07_a_context_rank_with_another_batch_is_named(run_ranks: Callable[..., list[Any]]) -> None:
    for message in run_ranks(2, altered, setup("context=2")):
        assert "G502" in message
        assert "the context ranks 0, 1 should compute one batch, but rank 1 holds another" in message
