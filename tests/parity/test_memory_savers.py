"""Plans that trade computation for memory, and compiled blocks: against one process, and bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from plans import GPT, LLAMA, TIED, Row, llama, row

from shardsmith.engine.parity.certificate import SGD, Case, _batches, certify
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.engine.runtime.noise import Noise
from shardsmith.engine.train.step import Trainer
from shardsmith.layout.check import check
from shardsmith.plan.setup import Setup

pytestmark = pytest.mark.ranks

DROPPING = LLAMA.with_(name="dropping", dropout=0.3, attention_dropout=0.2)

ROWS = (
    row("full", "recompute=full"),
    row("full, tensor 2 sp", "recompute=full,tensor=2,sequence_parallel=true"),
    row("full, zero 3, zb_h1", "recompute=full,data=2,zero=3,pipeline=2,schedule=zb_h1,microbatches=4"),
    row("selective, zero 3, zb_v, tied", "recompute=selective,data=2,zero=3,pipeline=2,schedule=zb_v", TIED, layers=8),
    row("selective, tensor 2 sp, gpt", "recompute=selective,tensor=2,sequence_parallel=true", GPT),
    row("chunks, tensor 2 sp", "loss_chunk=5,tensor=2,sequence_parallel=true"),
    row("chunks, a rank without a token", "loss_chunk=7,tensor=4", llama(4, vocab=5)),
    row("chunks, tied, zb_v", "loss_chunk=7,pipeline=2,schedule=zb_v", TIED, layers=4),
    row("chunks, tied, zero 3", "loss_chunk=100,data=2,zero=3", TIED),
    row("dropout, tensor 2 sp, full", "recompute=full,tensor=2,sequence_parallel=true", DROPPING),
    row("dropout, data 2 pipeline 2", "data=2,pipeline=2", DROPPING),
)

COMPILED = (
    row("compiled", "compile=true"),
    row("compiled, tensor 2 sp, full", "compile=true,tensor=2,sequence_parallel=true,recompute=full"),
    row("compiled, tensor 2, zero 3", "compile=true,tensor=2,data=2,zero=3", TIED),
)


@pytest.mark.parametrize("found", ROWS, ids=lambda r: r.name)
def test_equal_to_one_process(found: Row) -> None:
    certificate = certify(found.setup, steps=2, timeout_s=170)
    assert certificate.passed, certificate.summary()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("found", COMPILED, ids=lambda r: r.name)
def test_compiled_blocks_trace_whole_and_compute_the_same(found: Row) -> None:
    certificate = certify(found.setup, steps=2, timeout_s=380)
    assert certificate.passed, certificate.summary()


def gradients(setup: Setup) -> list[bytes]:
    trainer = Trainer(setup, SGD, rank=torch.distributed.get_rank(), seed=3, device=torch.device("cpu"))
    trainer.step(_batches(Case(setup=setup, steps=1, seed=3)).batch(0, trainer.data_index))
    return [g.numpy().tobytes() for g in trainer.gradients().values()]


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("model", [LLAMA, DROPPING], ids=["plain", "dropout"])
def test_a30_recomputation_changes_no_bit(mode: str, model: object) -> None:
    plain = row("plain", "tensor=2,pipeline=2,sequence_parallel=true", model).setup  # type: ignore[arg-type]
    again = replace(plain, plan=plain.plan.with_(recompute=mode))
    assert run_forked(gradients, 4, plain, timeout_s=120) == run_forked(gradients, 4, again, timeout_s=120)


def masks(setup: Setup) -> tuple[bytes, bytes]:
    """What residual and attention dropout multiply on this rank, in its first microbatch."""
    trainer = Trainer(setup, SGD, rank=torch.distributed.get_rank(), seed=0, device=torch.device("cpu"))
    batch = _batches(Case(setup=setup, steps=1)).batch(0, trainer.data_index)[0]
    noise = Noise(seed=0, step=0, samples=batch.samples)
    residual = noise.drop(torch.ones(16, 1, 4), 0.5, 0, "mlp")
    heads = trainer.setup.model.heads // setup.plan.tensor
    first = trainer.groups.tensor.index * heads
    attention = noise.attention(range(first, first + heads), [range(8)], [range(8)], 8, 0.5, 0)
    return residual.numpy().tobytes(), attention.numpy().tobytes()


def test_a29_masks_agree_in_a_tensor_group_and_differ_elsewhere() -> None:
    """DP2 x TP2, p = 0.5, 64 elements: residual masks in 2 equal pairs, attention masks all different."""
    found = run_forked(masks, 4, row("a29", "data=2,tensor=2", DROPPING).setup, timeout_s=120)
    residual, attention = [r for r, _ in found], [a for _, a in found]
    assert residual[0] == residual[1] != residual[2] == residual[3]
    assert len(set(attention)) == 4


def test_a29_a_part_of_the_sequence_has_its_part_of_the_mask_and_steps_go_on() -> None:
    noise, later = (Noise(seed=1, step=step, samples=(4, 9)) for step in (0, 1))
    whole = noise.drop(torch.ones(130, 2, 6), 0.25, 3, "mlp")
    part = noise.drop(torch.ones(40, 2, 6), 0.25, 3, "mlp", first=50)
    assert torch.equal(part, whole[50:90])
    assert set(np.unique(whole.numpy()).tolist()) == {0.0, np.float32(4 / 3)}
    assert not torch.equal(whole, later.drop(torch.ones(130, 2, 6), 0.25, 3, "mlp"))
    assert abs((whole == 0).float().mean().item() - 0.25) < 0.03


def test_what_a_compiler_cannot_keep_is_refused() -> None:
    both = row("x", "compile=true,recompute=selective").setup
    assert [f.code for f in check(both, running=True)] == ["X103"]
    dropping = row("x", "compile=true", DROPPING).setup
    assert [f.code for f in check(dropping, running=True)] == ["X104"]
    split = row("x", "compile=true,pipeline=2,schedule=zb_h1").setup
    assert [f.code for f in check(split, running=True) if f.severity == "error"] == ["X105"]
