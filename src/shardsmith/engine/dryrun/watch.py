"""How a tracker learns from the engine what its tensors are for, and how long a backend would hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardsmith.engine.dryrun.stated import routed_as_stated
from shardsmith.engine.dryrun.tracker import Tracker
from shardsmith.engine.models import initialise
from shardsmith.engine.parallel import context
from shardsmith.engine.parallel.data import Bucket
from shardsmith.engine.parallel.pipeline import Wire
from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.units import Unit
from shardsmith.layout.routing import StatedRouting
from shardsmith.specs.model import Weight

LABELS: tuple[tuple[Any, str, str], ...] = (
    (context, "split", "inputs"),
    (Bucket, "_buffer", "buckets"),
    (Bucket, "flush", "buckets"),
    (Bucket, "wait", "buckets"),
    (Unit, "start", "gathered"),
    (Unit, "wait", "gathered"),
    (Wire, "exchange", "messages"),
)
"""Methods and functions of the engine, and what the tensors are for that they make."""

ASYNCHRONOUS = ("all_gather_async", "reduce_scatter_async", "all_reduce_async", "exchange_async")
"""Collectives whose work holds what it works on, as those of gloo and NCCL do, until it is dropped."""

Method = Callable[..., Any]


@contextmanager
def watching(rank: int, stated: StatedRouting | None = None) -> Iterator[Tracker]:
    """A tracker, entered, that the engine's methods tell what their tensors are for; `rank` routes as `stated`."""
    tracker = Tracker()
    replaced: list[tuple[Any, str, Method]]
    replaced = [(owner, name, _labelling(getattr(owner, name), tracker, label)) for owner, name, label in LABELS]
    replaced += [(Group, name, _holding(getattr(Group, name))) for name in ASYNCHRONOUS]
    replaced += [(initialise, "full_rows", _blank_rows)]
    replaced += [] if stated is None else routed_as_stated(stated, rank, tracker)
    plain = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, method in replaced:
            setattr(owner, name, method)
        with tracker:
            yield tracker
    finally:
        for owner, name, method in plain:
            setattr(owner, name, method)


def _blank_rows(weight: Weight, seed: int, start: int, stop: int) -> Tensor:
    """In the place of drawn weights, which would have no values anyway."""
    return torch.empty(stop - start, *weight.shape[1:])


class _Holding(dist.Work):
    """A work and the tensors that it works on."""

    def __init__(self, work: dist.Work, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.work, self.tensors = work, tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait as the work does."""
        return self.work.wait(timeout)


def _labelling(method: Method, tracker: Tracker, label: str) -> Method:
    @wraps(method)
    def labelled(*args: Any, **kwargs: Any) -> Any:
        with tracker.labelling(label):
            return method(*args, **kwargs)

    return labelled


def _holding(method: Method) -> Method:
    @wraps(method)
    def holding(group: Group, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = method(group, x, *args, **kwargs)
        work, *out = found if isinstance(found, tuple) else (found,)
        held = None if work is None else _Holding(work, (x, *out))
        return (held, *out) if out else held

    return holding
