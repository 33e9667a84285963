"""The data axis at level 0: gradients live in buckets that are all-reduced while backward goes on.

Buckets are filled in reverse order of the parameters (the order in which backward reaches them) and are
flushed in that fixed order, never in order of arrival, so all ranks issue the same collectives. The loss
is already divided by the tokens of the whole step: reductions are plain sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardsmith.engine.runtime.group import Group
from shardsmith.layout.axes.data import buckets
from shardsmith.units import MIB


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are views of one flat buffer, reduced by one collective."""

    flat: Tensor
    parameters: list[nn.Parameter]
    waiting: int = 0
    work: dist.Work | None = None
    flushed: bool = False


@dataclass(eq=False)
class StageGradients:
    """Gradient buffers of one stage and their reduction over the data ranks.

    `arm` says that the backward pass to come is the stage's last of the step: from then on a bucket is
    reduced as soon as it and all before it are complete. `finish` flushes what is left, `wait` ends it.
    """

    parameters: Sequence[tuple[str, nn.Parameter]]
    group: Group
    bucket_mb: float
    dtype: torch.dtype
    buckets: list[Bucket] = field(init=False)
    armed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        by_name = dict(self.parameters)
        sizes = [(name, p.numel() * self.dtype.itemsize) for name, p in self.parameters]
        self.buckets = [
            _bucket([by_name[name] for name in names], self.dtype) for names in buckets(sizes, self.bucket_mb * MIB)
        ]
        self._bucket_of = {id(p): b for b in self.buckets for p in b.parameters}
        for _, parameter in self.parameters:
            if parameter.numel() == 0:
                parameter.grad = torch.zeros_like(parameter)
                continue
            parameter.register_post_accumulate_grad_hook(self._ready)

    def zero(self) -> None:
        """Start a step: all gradients 0, nothing in flight."""
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.flushed, bucket.work = False, None
        self.armed = False

    def arm(self) -> None:
        """Let the backward pass to come launch the reductions."""
        self.armed = True
        for bucket in self.buckets:
            bucket.waiting = len(bucket.parameters)

    def finish(self) -> None:
        """Flush every bucket that backward did not (a parameter without gradient counts as zero)."""
        for bucket in self.buckets:
            bucket.waiting = 0
        self._flush()
        self.armed = False

    def wait(self) -> None:
        """Return when all reductions are done."""
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    def _ready(self, parameter: Tensor) -> None:
        if self.armed:
            self._bucket_of[id(parameter)].waiting -= 1
            self._flush()

    def _flush(self) -> None:
        for bucket in self.buckets:
            if bucket.waiting:
                return
            if not bucket.flushed:
                bucket.flushed = True
                bucket.work = self.group.all_reduce_async(bucket.flat, "gradients")


def _bucket(parameters: list[nn.Parameter], dtype: torch.dtype) -> Bucket:
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
    start = 0
    for parameter in parameters:
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return Bucket(flat=flat, parameters=parameters)
