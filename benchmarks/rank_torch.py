"""One rank of raw PyTorch on the same work: DDP, ZeroRedundancyOptimizer, fully_shard, DTensor layers, pipelining.

Each is used as its documentation shows; a gradient-accumulation loop around DDP and fully_shard reduces once a step.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from inputs import batch, decay_groups
from llama import Llama, mean_loss
from meter import Meter
from rank_options import rank_options
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from workload import BETAS, EPS, GLOBAL_BATCH, LR, MICROBATCH, SHAPE

Batches = list[tuple[Tensor, Tensor]]


def main() -> None:
    chosen = rank_options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = (chosen.pipeline, chosen.data, chosen.tensor)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pipeline", "data", "tensor"))
    model, optimizer = _build(chosen, mesh)
    run = _pipelined(chosen, mesh, model) if chosen.pipeline > 1 else _accumulated(chosen, model)
    data_rank = mesh["data"].get_local_rank()
    meter = Meter(chosen.warmup)
    for step in range(chosen.steps):
        optimizer.zero_grad(set_to_none=True)
        loss = run(batch(chosen.inputs, step, data_rank, chosen.data))
        optimizer.step()
        meter.step(loss)
    meter.done()
    dist.destroy_process_group()


def _build(chosen: argparse.Namespace, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    each = SHAPE.layers // chosen.pipeline
    at = mesh["pipeline"].get_local_rank()
    model: nn.Module = Llama(at * each, (at + 1) * each).load_initial(chosen.inputs)
    if chosen.tensor > 1:
        _split_tensors(model, mesh["tensor"])
    if chosen.data > 1:
        model = _replicate(model, chosen, mesh)
    groups = decay_groups(dict(model.named_parameters()))
    settings: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS}
    if chosen.zero == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        group = mesh["data"].get_group()
        return model, ZeroRedundancyOptimizer(groups, torch.optim.AdamW, process_group=group, **settings)
    return model, torch.optim.AdamW(groups, **settings)


def _split_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Megatron's layout by DTensor, without sequence parallelism; every parameter becomes a DTensor."""
    plan: dict[str, Any] = {
        "layers.*.attention.q": ColwiseParallel(),
        "layers.*.attention.k": ColwiseParallel(),
        "layers.*.attention.v": ColwiseParallel(),
        "layers.*.attention.o": RowwiseParallel(),
        "layers.*.mlp.gate": ColwiseParallel(),
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(),
    }
    if model.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if model.head is not None:
        plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, plan)


def _replicate(model: nn.Module, chosen: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    """DDP below level 2, fully_shard from level 2 on; DTensor layers go with fully_shard, as DDP refuses them."""
    if chosen.zero < 2 and chosen.tensor == 1:
        group = mesh["data"].get_group()
        return nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import fully_shard

    for block in model.layers.values():
        fully_shard(block, mesh=mesh["data"], reshard_after_forward=chosen.zero == 3)
    return fully_shard(model, mesh=mesh["data"], reshard_after_forward=False)


def _accumulated(chosen: argparse.Namespace, model: nn.Module) -> Callable[[Batches], float]:
    count = GLOBAL_BATCH // MICROBATCH // chosen.data

    def run(microbatches: Batches) -> float:
        total = 0.0
        for index, (tokens, targets) in enumerate(microbatches):
            with _synchronised(model, last=index == count - 1), _split_loss(chosen):
                loss = mean_loss(model(tokens), targets) / count
                loss.backward()
            total += _number(loss)
        return total

    return run


def _pipelined(chosen: argparse.Namespace, mesh: DeviceMesh, model: nn.Module) -> Callable[[Batches], float | None]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    count, at = GLOBAL_BATCH // MICROBATCH // chosen.data, mesh["pipeline"].get_local_rank()
    group = mesh["pipeline"].get_group()
    stage = PipelineStage(model, at, chosen.pipeline, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=count, loss_fn=mean_loss)

    def run(microbatches: Batches) -> float | None:
        losses: list[Tensor] = []
        if at == 0:
            schedule.step(torch.cat([tokens for tokens, _ in microbatches]))
        elif at == chosen.pipeline - 1:
            with _split_loss(chosen):
                schedule.step(target=torch.cat([targets for _, targets in microbatches]), losses=losses)
        else:
            schedule.step()
        return sum(map(_number, losses)) / count if losses else None

    return run


@contextlib.contextmanager
def _synchronised(model: nn.Module, *, last: bool) -> Any:
    """Reduce gradients only in the last microbatch of a step."""
    if isinstance(model, nn.parallel.DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    yield


def _split_loss(chosen: argparse.Namespace) -> Any:
    return loss_parallel() if chosen.tensor > 1 else contextlib.nullcontext()


def _number(loss: Tensor) -> float:
    loss = loss.detach()
    return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


if __name__ == "__main__":
    main()
