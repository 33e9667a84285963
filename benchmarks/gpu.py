"""Tokens a second, MFU and peak memory of one GPU that trains a model of 1.2 billion parameters with our Trainer.

    python benchmarks/gpu.py --json gpu.json                                   one GPU, under 4 minutes
    python benchmarks/gpu.py --tiny --device cpu --dtype float32 --no-compile  the same code on any machine

The model has the shape of Llama 3.2 1B; sequences of 4,096 random tokens, bfloat16 with float32 master weights,
blocks compiled, attention by torch's scaled_dot_product_attention. MFU counts attention as causal, against the
dense peak of the device. Where there is no GPU the figures stay empty.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from shardsmith.engine.dataset.batches import Synthetic, batches_of
from shardsmith.engine.runtime import environment, process
from shardsmith.engine.train.step import Trainer
from shardsmith.errors import raise_errors
from shardsmith.layout.check import check
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.specs.flops import mfu, model_flops
from shardsmith.specs.job import Optimisation, Workload
from shardsmith.specs.library import cluster_named, cluster_names
from shardsmith.specs.model import ModelSpec, parameter_count

LLAMA_1B = ModelSpec(
    name="llama-1b",
    layers=16,
    hidden=2048,
    heads=32,
    kv_heads=8,
    head_dim=64,
    ffn=8192,
    vocab=128256,
    context=8192,
    rope_theta=500000.0,
    tied=True,
)
TINY = LLAMA_1B.with_(name="tiny", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512)
WARMUP = 4
"""Steps before the clock: they compile, and let the allocator find its size."""


def main() -> int:
    chosen = _options()
    begun = time.monotonic()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        _report(chosen, {"device": None, "tokens_per_s": None, "mfu": None, "peak_memory_gib": None})
        print("there is no GPU here: the figures stay empty", file=sys.stderr)
        return 0
    here = process.start(environment.detect(), device=chosen.device)
    try:
        _report(chosen, _measure(chosen, here.device, begun))
    finally:
        process.stop()
    return 0


def _measure(chosen: argparse.Namespace, device: torch.device, begun: float) -> dict[str, Any]:
    setup = _setup(chosen)
    raise_errors(check(setup, running=True))
    torch.manual_seed(0)
    trainer = Trainer(setup, Optimisation(lr=3e-4, clip=1.0), rank=0, seed=0, device=device)
    source = Synthetic(seed=0, vocab=setup.model.vocab, seq_len=setup.workload.seq_len)
    batches = batches_of(source, seed=0, setup=trainer.setup)
    losses: list[float] = []
    seconds: list[float] = []
    start_s = 0.0
    for step in range(WARMUP + chosen.steps):
        microbatches = trainer.move(batches.batch(step, 0))
        _finish_device_work(device)
        start = time.monotonic()
        losses.append(trainer.step(microbatches).loss)
        _finish_device_work(device)
        seconds.append(time.monotonic() - start)
        if step == WARMUP - 1:
            start_s = time.monotonic() - begun
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
        if step >= WARMUP and time.monotonic() - begun > chosen.limit:
            break
    step_s = statistics.median(seconds[WARMUP:])
    tokens = setup.workload.global_batch * setup.workload.seq_len
    flops = model_flops(setup.model, seq_len=setup.workload.seq_len, tokens=tokens, convention="causal").total
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "parameters": parameter_count(setup.model),
        "plan": str(setup.plan),
        "dtype": setup.workload.dtype,
        "tokens_per_step": tokens,
        "measured_steps": len(seconds) - WARMUP,
        "start_s": round(start_s, 1),
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "tflops": flops / step_s / 1e12,
        "mfu": mfu(flops / step_s, _peak(device, setup.workload.dtype)),
        "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _setup(chosen: argparse.Namespace) -> Setup:
    """One rank; two microbatches a step, so that accumulation is part of what is measured."""
    plan = Plan(microbatch=chosen.microbatch, microbatches=2, compile=not chosen.no_compile)
    workload = Workload(seq_len=chosen.seq_len, global_batch=2 * chosen.microbatch, dtype=chosen.dtype)
    model = TINY if chosen.tiny else LLAMA_1B
    return Setup(model=model, workload=workload, cluster=cluster_named("local"), plan=plan, source="benchmarks/gpu.py")


def _peak(device: torch.device, dtype: str) -> float | None:
    """Dense peak of the device in FLOP/s by the preset that its name speaks of; None where none does."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    known = [preset for preset in cluster_names() if preset in name]
    return cluster_named(max(known, key=len)).device.peak(dtype) if known else None


def _finish_device_work(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _report(chosen: argparse.Namespace, figures: dict[str, Any]) -> None:
    text = json.dumps(figures, indent=1)
    print(text)
    if chosen.json is not None:
        chosen.json.write_text(text + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model and sequences for a test of this file")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--microbatch", type=int, help="sequences at a time (4; tiny: 1)")
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence (4096; tiny: 64)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds after which no further step begins")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    chosen = parser.parse_args()
    chosen.microbatch = chosen.microbatch or (1 if chosen.tiny else 4)
    chosen.seq_len = chosen.seq_len or (64 if chosen.tiny else 4096)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
