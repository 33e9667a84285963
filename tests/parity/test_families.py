"""Every family of models under tensor and pipeline parallelism, against one process, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plans import Row
from together import Together

from shardsmith.engine.dataset.batches import Synthetic, batches_of
from shardsmith.engine.parity.certificate import SGD, certify
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.engine.train.step import Trainer
from shardsmith.layout.check import check
from shardsmith.layout.facts import Shard
from shardsmith.plan.file import make_setup
from shardsmith.plan.setup import Setup
from shardsmith.specs.model import ModelSpec, RopeScaling, YarnScaling

SMALL = ModelSpec(name="small", layers=2, hidden=24, heads=4, kv_heads=2, head_dim=6, ffn=40, vocab=37, context=64)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"kv_heads": 4},
    "llama3": {"rope_theta": 500.0, "rope_scaling": RopeScaling(original_context=16), "tied": True},
    "llama-yarn": {"rope_scaling": YarnScaling(kind="yarn", factor=4.0, original_context=8), "head_dim": 10},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 10, "tied": True},
    "mistral": {"window": 5},
    "gpt": {
        "kv_heads": 4, "norm": "layernorm", "activation": "gelu_tanh", "positions": "learned",
        "attention_bias": True, "output_bias": True, "mlp_bias": True, "tied": True,
    },
}  # fmt: skip
PLAN = "tensor=2,pipeline=2,microbatches=2"


def setup(plan: str, **changes: Any) -> Setup:
    base = make_setup(plan=plan, model="tiny-llama", seq_len=16, global_batch=4, dtype="float64")
    found = replace(base, model=SMALL.with_(**changes))
    assert not [fault for fault in check(found, running=True) if fault.severity == "error"]
    return found


TABLE = [
    Row(
        name=f"{family}{', sp' if parallel else ''}",
        setup=setup(f"{PLAN}{',sequence_parallel=true' * parallel}", **changes),
    )
    for family, changes in FAMILIES.items()
    for parallel in (False, True)
]
CERTIFICATES = Together(TABLE)


@pytest.mark.parametrize("found", TABLE, ids=lambda found: found.name)
def test_a_family_in_tensor_and_pipeline_parallel(found: Row) -> None:
    CERTIFICATES.holds(found)


COPIES = {
    "2 heads, 1 KV, tensor 2": ("tensor=2,data=2,microbatches=1", {"heads": 2, "kv_heads": 1}),
    "4 heads, 2 KV, tensor 4": ("tensor=4,microbatches=2", {"heads": 4, "kv_heads": 2}),
    "biases, norms, SP, pipeline": (
        f"{PLAN},sequence_parallel=true",
        {"heads": 4, "kv_heads": 1, "attention_bias": True, "qk_norm": True},
    ),
}


@pytest.mark.parametrize("case", COPIES)
def test_a22_copied_key_value_heads_train_as_one(case: str) -> None:
    plan, changes = COPIES[case]
    found = setup(f"{plan},replicate_kv=true", **changes)
    certificate = certify(found, steps=5, timeout_s=150.0)
    assert certificate.passed, certificate.summary()
    assert max(p.value_error for p in certificate.parameters) <= 1e-10
    by_head: dict[tuple[str, int], list[Any]] = {}
    for held in run_forked(_trained, found.plan.world, found, 5, timeout_s=150.0):
        for name, (shard, value) in held.items():
            if shard.copy is not None:
                by_head.setdefault((name, shard.offsets[0]), []).append(value)
    roles = {name.split("attention.")[1][0] for name, _ in by_head}
    assert roles == {"k", "v"}
    assert len({first for _, first in by_head}) == found.model.kv_heads
    for copies in by_head.values():
        assert len(copies) == found.plan.data * found.plan.tensor // found.model.kv_heads
        assert all(np.array_equal(copies[0], other) for other in copies)


def _trained(found: Setup, steps: int) -> dict[str, tuple[Shard, Any]]:
    """This rank's shards and their values after `steps` steps, whose replicas are then found to be equal."""
    trainer = Trainer(found, SGD, rank=torch.distributed.get_rank(), seed=0, device=torch.device("cpu"))
    source = Synthetic(seed=0, vocab=found.model.vocab, seq_len=found.workload.seq_len, ignored=0.5)
    batches = batches_of(source, seed=0, setup=trainer.setup)
    for step in range(steps):
        trainer.step(batches.batch(step, trainer.data_index))
    trainer.check_replicas()
    return {name: (trainer.shards[name], p.detach().numpy().copy()) for name, p in trainer.parameters().items()}
