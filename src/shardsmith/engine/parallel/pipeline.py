"""The pipeline axis at work: activations and their gradients between the ranks that hold neighbouring stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.interpreter import Key
from shardsmith.schedule.lower import Payload

Shape = tuple[int, ...]


class Wire:
    """Point-to-point messages of one pipeline group; activations and gradients have a communicator each.

    Shapes are known beforehand from the microbatches (`shape_of(microbatch)`), so no header travels;
    in the first step every message is preceded by one all the same, to prove that both ends agree.

    A send is waited for two exchanges later: that bounds what is kept alive, and cannot block for ever,
    since lowered programs run to their end even if every batch blocks at once (`schedule.rendezvous`).
    The recorder's pipeline lane shows the waits for messages, not their time on the wire.
    """

    def __init__(
        self, groups: dict[Payload, Group], shape_of: Callable[[int], Shape], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.groups, self.shape_of, self.dtype, self.device = groups, shape_of, dtype, device
        self.checking = True
        self._arriving: dict[Key, tuple[dist.Work, Tensor]] = {}
        self._sent: deque[list[tuple[dist.Work, Tensor]]] = deque()

    def exchange(self, sends: Sequence[tuple[Key, int, Tensor]], receives: Sequence[tuple[Key, int]]) -> None:
        """Start one batch per direction, without waiting for it."""
        self._sent.append([])
        sends = [(key, peer, value.contiguous()) for key, peer, value in sends]
        if self.checking:
            self._check_headers(sends, receives)
        for payload in self.groups:
            self._batch(
                payload, [s for s in sends if s[0].payload is payload], [r for r in receives if r[0].payload is payload]
            )
        self._settle(keep=2)

    def take(self, key: Key) -> Tensor:
        """The tensor that arrived for `key`."""
        work, value = self._arriving.pop(key)
        recorder = self.groups[key.payload].recorder
        with recorder.waiting("pipeline", f"receive {key.payload.value} {key.stage}.{key.microbatch}", value.nbytes):
            work.wait()
        return value

    def finish(self) -> None:
        """Wait until everything sent has left."""
        self._settle(keep=0)
        assert not self._arriving, f"received but never used: {sorted(self._arriving)}"
        self.checking = False

    def _settle(self, keep: int) -> None:
        """Wait for all sends but those of the last `keep` exchanges."""
        while len(self._sent) > keep:
            for work, _ in self._sent.popleft():
                work.wait()

    def _batch(self, payload: Payload, out: Sequence[tuple[Key, int, Tensor]], into: Sequence[tuple[Key, int]]) -> None:
        group = self.groups[payload]
        buffers = [torch.empty(self.shape_of(key.microbatch), dtype=self.dtype, device=self.device) for key, _ in into]
        works = self._start(
            [(group, peer, value) for _, peer, value in out],
            [(group, peer, buffer) for (_, peer), buffer in zip(into, buffers, strict=True)],
        )
        for (key, _, value), work in zip(out, works[: len(out)], strict=True):
            group.recorder.count("pipeline", "send", key.payload.value, value.nbytes)
            self._sent[-1].append((work, value))
        for (key, _), buffer, work in zip(into, buffers, works[len(out) :], strict=True):
            group.recorder.count("pipeline", "receive", key.payload.value, buffer.nbytes)
            self._arriving[key] = (work, buffer)

    def _start(
        self, out: Sequence[tuple[Group, int, Tensor]], into: Sequence[tuple[Group, int, Tensor]]
    ) -> list[dist.Work]:
        operations = [dist.P2POp(dist.isend, value, group.ranks[peer], group.handle) for group, peer, value in out]
        operations += [dist.P2POp(dist.irecv, value, group.ranks[peer], group.handle) for group, peer, value in into]
        if not operations:
            return []
        works = dist.batch_isend_irecv(operations)
        # A backend that fuses the batch returns one handle for all of it, others one for each message.
        return works if len(works) == len(operations) else works * len(operations)

    def _check_headers(self, out: Sequence[tuple[Key, int, Tensor]], into: Sequence[tuple[Key, int]]) -> None:
        expected = [self._header(key, self.shape_of(key.microbatch)) for key, _ in into]
        arrived = [torch.empty_like(header) for header in expected]
        works: list[dist.Work] = []
        for payload, group in self.groups.items():
            works += self._start(
                [(group, peer, self._header(k, tuple(v.shape))) for k, peer, v in out if k.payload is payload],
                [(group, peer, a) for (k, peer), a in zip(into, arrived, strict=True) if k.payload is payload],
            )
        for work in works:
            work.wait()
        for (key, peer), want, got in zip(into, expected, arrived, strict=True):
            assert torch.equal(want, got), (
                f"pipeline rank {peer} sends {got.tolist()} for {key}, expected {want.tolist()}"
            )

    def _header(self, key: Key, shape: Shape) -> Tensor:
        numbers = [list(Payload).index(key.payload), key.stage, key.microbatch, *shape]
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)
