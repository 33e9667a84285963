"""One rank of DeepSpeed on its CPU accelerator: ZeRO 0 to 3 around torch's AdamW, or its pipeline module."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from inputs import batch, decay_groups, initial_weights
from llama import Block, Embedding, Llama, mean_loss, rotations
from meter import Meter
from rank_options import rank_options
from torch import Tensor, nn
from workload import BETAS, EPS, GLOBAL_BATCH, LR, MICROBATCH, SHAPE

Batches = list[tuple[Tensor, Tensor]]


class Piece(nn.Module):
    """One layer of DeepSpeed's pipeline: the embedding, block number `what`, or final norm and head."""

    def __init__(self, what: str, inputs: Path) -> None:
        super().__init__()
        self.what = what
        if what == "embedding":
            self.embedding = Embedding()
        elif what == "head":
            self.final_norm = nn.RMSNorm(SHAPE.hidden, SHAPE.norm_eps)
            self.head = nn.Linear(SHAPE.hidden, SHAPE.vocab, bias=False)
        else:
            self.layers = nn.ModuleDict({what: Block()})
            self.rotations = rotations()
        full = initial_weights(inputs)
        self.load_state_dict({name: full[name] for name in self.state_dict()})

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "embedding":
            return self.embedding(x)
        if self.what == "head":
            return self.head(self.final_norm(x))
        return self.layers[self.what](x, *self.rotations)


def main() -> None:
    chosen = rank_options()
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed("gloo")
    run, data_rank = (_pipelined if chosen.pipeline > 1 else _accumulated)(chosen)
    meter = Meter(chosen.warmup)
    for step in range(chosen.steps):
        meter.step(run(batch(chosen.inputs, step, data_rank, chosen.data)))
    meter.done()


def _engine(chosen: argparse.Namespace, model: nn.Module) -> Any:
    count = GLOBAL_BATCH // MICROBATCH // chosen.data
    settings = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": MICROBATCH,
        "gradient_accumulation_steps": count,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": chosen.zero},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(decay_groups(dict(model.named_parameters())), lr=LR, betas=BETAS, eps=EPS)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def _accumulated(chosen: argparse.Namespace) -> tuple[Callable[[Batches], float], int]:
    engine = _engine(chosen, Llama().load_initial(chosen.inputs))

    def run(microbatches: Batches) -> float:
        total = 0.0
        for tokens, targets in microbatches:
            loss = mean_loss(engine(tokens), targets)
            engine.backward(loss)
            engine.step()
            total += loss.item()
        return total / len(microbatches)

    return run, dist.get_rank()


def _pipelined(chosen: argparse.Namespace) -> tuple[Callable[[Batches], float], int]:
    names = ["embedding", *map(str, range(SHAPE.layers)), "head"]
    pieces = [LayerSpec(Piece, name, chosen.inputs) for name in names]
    module = PipelineModule(layers=pieces, loss_fn=mean_loss, num_stages=chosen.pipeline, partition_method="uniform")
    engine = _engine(chosen, module)
    return lambda microbatches: float(engine.train_batch(iter(microbatches))), engine.grid.get_data_parallel_rank()


if __name__ == "__main__":
    main()
