"""What a real rank allocates, told by torch's profiler: its own tensors, without the backend's.

gloo works in threads of its own, and in them lets go of a tensor a moment after a collective is over. If the rank
has let go of it by then, such a thread frees it, and the profiler, which sees frees of the thread alone that it
was started in, counts that memory for ever. So here every collective ends when the backend holds none of its tensors
any more. What gloo allocates for itself (it copies what it reduces and scatters) is left out.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

COLLECTIVES = ("all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single")
PATIENCE_S = 30.0
Change = tuple[int, int, int, bool]
"""An allocation: when, where, by how many bytes (less than 0: freed), and whether the backend made it for itself."""


Made = TypeVar("Made")


def largest_sum(make: Callable[[], Made], step: Callable[[Made, int], object], *, of: int) -> tuple[int, Made]:
    """Bytes of all allocations since the call when they are most during step `of` of what `make` makes, and that.

    Steps 0 to `of` are run.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, settled_collectives():
        made = make()
        for number in range(of + 1):
            with record_function(f"step {number}"):
                step(made, number)
    tree = profiled.profiler.kineto_results.experimental_event_tree()
    last: list[Any] = []
    changes = sorted(_changes(tree, f"step {of}", last))
    start, end = last[0].start_time_ns, last[0].end_time_ns
    own: set[int] = set()
    total = peak = 0
    for at, place, size, by_backend in changes:
        if size > 0 and not by_backend:
            own.add(place)
        elif size < 0 and place in own:
            own.discard(place)
        else:
            continue
        total += size
        peak = max(peak, total) if start <= at <= end else peak
    return peak, made


@contextmanager
def settled_collectives() -> Iterator[None]:
    """Within, a collective is over only when the backend has let go of its tensors."""
    plain = {name: getattr(dist, name) for name in COLLECTIVES}
    try:
        for name, call in plain.items():
            setattr(dist, name, _settled(call))
        yield
    finally:
        for name, call in plain.items():
            setattr(dist, name, call)


def _settled(call: Callable[..., Any]) -> Callable[..., Any]:
    def settled(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        # The backend is given other tensors of the same storages, so that it alone holds them.
        lent = [x.detach() if isinstance(x, Tensor) else x for x in args]
        held = [weakref.ref(x) for x in lent if isinstance(x, Tensor)]
        work = call(*lent, async_op=async_op, **kwargs)
        del lent
        if async_op:
            return _Work(work, held, [x for x in args if isinstance(x, Tensor)])
        _let_go(held)
        return work

    return settled


class _Work(dist.Work):
    """A work that holds its `tensors` as the backend's does, until it is dropped."""

    def __init__(self, work: dist.Work, lent: list[weakref.ref[Tensor]], tensors: list[Tensor]) -> None:
        super().__init__()
        self.work: dist.Work | None = work
        self.lent, self.tensors = lent, tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the work is done and the backend has let go."""
        if self.work is not None:
            self.work.wait(timeout)
            self.work = None
            _let_go(self.lent)
        return True


def _let_go(held: list[weakref.ref[Tensor]]) -> None:
    patience = time.monotonic() + PATIENCE_S
    while any(x() is not None for x in held):
        assert time.monotonic() < patience, "the backend keeps a tensor of a collective that is over"
        time.sleep(1e-4)


def _changes(tree: Iterable[Any], sought: str, found: list[Any], by_backend: bool = False) -> Iterator[Change]:
    for event in tree:
        inside = by_backend or event.name.startswith(("c10d::", "gloo:"))
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size, inside
        elif event.name == sought:
            found.append(event)
        yield from _changes(event.children, sought, found, inside)
