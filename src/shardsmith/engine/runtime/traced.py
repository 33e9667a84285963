"""The seams of a compiled block: collectives as operators that a compiler passes through whole.

A compiler cannot look into a process group, so inside a compiled block a seam is one of four operators on a group's
name, each with its backward; they do what `linear.Seam` says, without the re-gather of sharded inputs, which
the compiler decides about by itself. These calls are not counted by the recorder.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]


@torch.library.custom_op("shardsmith::all_reduce", mutates_args=())
def all_reduce(x: Tensor, group: str) -> Tensor:
    """Sum over the ranks of `group`."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=_resolve_process_group(GroupName(group)))
    return out


@torch.library.custom_op("shardsmith::all_gather", mutates_args=())
def all_gather(x: Tensor, group: str, size: int) -> Tensor:
    """Parts [n, ...] joined along dim 0 -> [n x size, ...]."""
    out = x.new_empty((x.shape[0] * size, *x.shape[1:]))
    dist.all_gather_single(out, x.contiguous(), group=_resolve_process_group(GroupName(group)))
    return out


@torch.library.custom_op("shardsmith::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, group: str, size: int) -> Tensor:
    """Sum of [n x size, ...] over the ranks, of which this rank keeps its part [n, ...]."""
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    dist.reduce_scatter_single(out, x.contiguous(), group=_resolve_process_group(GroupName(group)))
    return out


@torch.library.custom_op("shardsmith::copy_in", mutates_args=())
def copy_in(x: Tensor, group: str) -> Tensor:
    """The same values; backward sums the gradient over the ranks."""
    return x.clone()


@all_reduce.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@all_gather.register_fake
def _(x: Tensor, group: str, size: int) -> Tensor:
    return x.new_empty((x.shape[0] * size, *x.shape[1:]))


@reduce_scatter.register_fake
def _(x: Tensor, group: str, size: int) -> Tensor:
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


@copy_in.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rest = inputs[1:]


all_reduce.register_autograd(lambda ctx, grad: (grad, None), setup_context=_keep)
copy_in.register_autograd(lambda ctx, grad: (all_reduce(grad, *ctx.rest), None), setup_context=_keep)
all_gather.register_autograd(lambda ctx, grad: (reduce_scatter(grad, *ctx.rest), None, None), setup_context=_keep)
reduce_scatter.register_autograd(lambda ctx, grad: (all_gather(grad, *ctx.rest), None, None), setup_context=_keep)
