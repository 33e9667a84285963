"""The pipeline axis at work: activations and their gradients between the ranks that hold neighbouring stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.interpreter import Key
from shardsmith.schedule.lower import Payload

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Arriving:
    """A message on its way, and the header ahead of it where headers travel."""

    work: dist.Work
    value: Tensor
    header: tuple[dist.Work, Tensor] | None


class Wire:
    """Point-to-point messages of one pipeline group; activations and gradients have a communicator each.

    Shapes are known beforehand from the microbatches (`shape_of(microbatch)`), so no header travels;
    in the first step every message follows one all the same, to prove that both ends agree.

    A send is waited for two exchanges later: that bounds what is kept alive, and cannot block for ever,
    since lowered programs run to their end even if every batch blocks at once (`schedule.rendezvous`).
    The recorder's pipeline lane shows the waits for messages, not their time on the wire.
    """

    def __init__(
        self, groups: dict[Payload, Group], shape_of: Callable[[int], Shape], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.groups, self.shape_of, self.dtype, self.device = groups, shape_of, dtype, device
        self.checking = True
        self._arriving: dict[Key, _Arriving] = {}
        self._sent: deque[list[tuple[dist.Work, Tensor]]] = deque()

    def exchange(self, sends: Sequence[tuple[Key, int, Tensor]], receives: Sequence[tuple[Key, int]]) -> None:
        """Start one batch per direction, without waiting for it."""
        self._sent.append([])
        for payload in self.groups:
            out = [(key, peer, value.contiguous()) for key, peer, value in sends if key.payload is payload]
            into = [receive for receive in receives if receive[0].payload is payload]
            if out or into:
                self._batch(self.groups[payload], out, into)
        self._settle(keep=2)

    def take(self, key: Key) -> Tensor:
        """The tensor that arrived for `key`."""
        arriving = self._arriving.pop(key)
        if arriving.header is not None:
            work, header = arriving.header
            work.wait()
            want = self._header(key, tuple(arriving.value.shape))
            assert torch.equal(want, header), f"the peer sends {header.tolist()} for {key}, expected {want.tolist()}"
        recorder, name = self.groups[key.payload].recorder, f"receive {key.payload.value} {key.stage}.{key.microbatch}"
        with recorder.waiting("pipeline", name, arriving.value.nbytes):
            arriving.work.wait()
        return arriving.value

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

    def _batch(self, group: Group, out: Sequence[tuple[Key, int, Tensor]], into: Sequence[tuple[Key, int]]) -> None:
        """Start the messages of one direction; a header directly ahead of its message, on both ends."""
        sends: list[tuple[int, Tensor]] = []
        for key, peer, value in out:
            group.recorder.count("pipeline", "send", key.payload.value, value.nbytes)
            sends += [(peer, self._header(key, tuple(value.shape)))] * self.checking + [(peer, value)]
        receives: list[tuple[int, Tensor]] = []
        for key, peer in into:
            buffer = torch.empty(self.shape_of(key.microbatch), dtype=self.dtype, device=self.device)
            group.recorder.count("pipeline", "receive", key.payload.value, buffer.nbytes)
            blank = torch.empty_like(self._header(key, tuple(buffer.shape)))
            receives += [(peer, blank)] * self.checking + [(peer, buffer)]
        works = _start(group, sends, receives)
        self._sent[-1] += [(work, value) for work, (_, value) in zip(works, sends, strict=False)]
        arriving = list(zip(works[len(sends) :], (value for _, value in receives), strict=True))
        for key, _ in into:
            header = arriving.pop(0) if self.checking else None
            work, value = arriving.pop(0)
            self._arriving[key] = _Arriving(work=work, value=value, header=header)

    def _header(self, key: Key, shape: Shape) -> Tensor:
        numbers = [list(Payload).index(key.payload), key.stage, key.microbatch, *shape]
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)


def _start(group: Group, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]) -> list[dist.Work]:
    """Start one batch; one handle for each message, sends first, in the given order."""
    operations = [dist.P2POp(dist.isend, value, group.ranks[peer], group.handle) for peer, value in out]
    operations += [dist.P2POp(dist.irecv, value, group.ranks[peer], group.handle) for peer, value in into]
    works: list[dist.Work] = dist.batch_isend_irecv(operations)
    # A backend that fuses the batch returns one handle for all of it.
    return works if len(works) == len(operations) else works * len(operations)
