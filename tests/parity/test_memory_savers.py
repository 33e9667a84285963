"""Plans that trade computation for memory, and compiled blocks: against one process, and bit for bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from plans import GPT, LLAMA, SEQ_LEN, TIED, Row, llama, row
from together import Together

from shardsmith.engine.parity.certificate import SGD, Case, _batches
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.engine.runtime.noise import noise_of
from shardsmith.engine.train.step import Trainer
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
    row("chunks, zero 3, zb_h1", "loss_chunk=7,data=2,pipeline=2,zero=3,schedule=zb_h1"),
    row("chunks, tied, zero 3 per step, zb_v", "loss_chunk=7,zero=3,zero_gather=per_step,schedule=zb_v", TIED),
    row("dropout, tensor 2 sp, full", "recompute=full,tensor=2,sequence_parallel=true", DROPPING),
    row("dropout, data 2 pipeline 2", "data=2,pipeline=2", DROPPING),
)

COMPILED = (
    row("compiled", "compile=true"),
    row("compiled, tensor 2 sp, full", "compile=true,tensor=2,sequence_parallel=true,recompute=full"),
    row("compiled, tensor 2, zero 3", "compile=true,tensor=2,data=2,zero=3", TIED),
    row("compiled, tensor 2 sp, selective", "compile=true,tensor=2,sequence_parallel=true,recompute=selective"),
    row("compiled, tensor 2 sp, dropout", "compile=true,tensor=2,sequence_parallel=true", DROPPING),
    row("compiled, full, dropout", "compile=true,recompute=full", DROPPING),
    row("compiled, zb_h1", "compile=true,pipeline=2,schedule=zb_h1,microbatches=4"),
    row("compiled, dualpipe_v, dropout", "compile=true,pipeline=2,schedule=dualpipe_v,microbatches=4", DROPPING),
)


PLAIN_FOUND, COMPILED_FOUND = Together(ROWS), Together(COMPILED, timeout_s=380.0)


@pytest.mark.parametrize("found", ROWS, ids=lambda found: found.name)
def test_equal_to_one_process(found: Row) -> None:
    PLAIN_FOUND.holds(found)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("found", COMPILED, ids=lambda found: found.name)
def test_compiled_blocks_trace_whole_and_compute_the_same(found: Row) -> None:
    COMPILED_FOUND.holds(found)


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
    """What residual and attention dropout make of ones on this rank, in its first microbatch."""
    trainer = Trainer(setup, SGD, rank=torch.distributed.get_rank(), seed=0, device=torch.device("cpu"))
    batch = _batches(Case(setup=setup, steps=1)).batch(0, trainer.data_index)[0]
    noise = noise_of(0, 0, batch.samples, torch.device("cpu")).of(0)
    residual = noise.drop(torch.ones(16, 1, 4), 0.5, "mlp")
    heads = trainer.setup.model.heads // setup.plan.tensor
    attention = noise.drop_probabilities(torch.ones(1, heads, 8, 8), 0.5, trainer.groups.tensor.index * heads)
    return residual.numpy().tobytes(), attention.numpy().tobytes()


def test_a29_masks_agree_in_a_tensor_group_and_differ_elsewhere() -> None:
    """DP2 x TP2, p = 0.5, 64 elements: residual masks in 2 equal pairs, attention masks all different."""
    found = run_forked(masks, 4, row("a29", "data=2,tensor=2", DROPPING).setup, timeout_s=120)
    residual, attention = [r for r, _ in found], [a for _, a in found]
    assert residual[0] == residual[1] != residual[2] == residual[3]
    assert len(set(attention)) == 4


def saved_shapes(setup: Setup) -> list[tuple[int, ...]]:
    """Shapes of what one step keeps for its backward passes."""
    kept: list[tuple[int, ...]] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(x.shape))
        return x

    trainer = Trainer(setup, SGD, rank=0, seed=3, device=torch.device("cpu"), compile_backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        trainer.step(_batches(Case(setup=setup, steps=1, seed=3)).batch(0, 0))
    return kept


@pytest.mark.timeout(200)
def test_selective_recomputation_in_compiled_blocks_keeps_products_alone() -> None:
    """Outputs of the two norms [SB, D] and of SwiGLU [SB, F] of 4 layers are made again, for each of 3 microbatches."""
    kept, again = (
        Counter(run_forked(saved_shapes, 1, row("x", f"compile=true,recompute={mode}").setup, timeout_s=180)[0])
        for mode in ("none", "selective")
    )
    tokens, layers, microbatches = SEQ_LEN, LLAMA.layers, 3
    assert kept[tokens, LLAMA.hidden] - again[tokens, LLAMA.hidden] == 2 * layers * microbatches
    assert kept[tokens, LLAMA.ffn] - again[tokens, LLAMA.ffn] == layers * microbatches
    assert not again - kept
