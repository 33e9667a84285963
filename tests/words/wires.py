"""Wires in memory for the interpreter, and a Work that trusts nobody.

Two wires, the two extremes of what a communication library may do. `Rendezvous`: a batch ends only when every
send and receive in it has met its other end, and nothing is matched by name, only first in, first out.
`Mailboxes`: sends never wait, a receive waits for its own message.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from shardsmith.engine.runtime.interpreter import Interpreter, Key
from shardsmith.schedule.ir import Action, Kind, Order, needs
from shardsmith.schedule.lower import Exchange, Program, Step, transfer_of

PATIENCE_S = 30.0
RANKS = ThreadPoolExecutor(max_workers=8, thread_name_prefix="rank")


class Stuck(Exception):
    """Nobody can go on any more."""


class Broken(Exception):
    """A rank was given something else than it needs, or does what it must not."""


@dataclass
class Net:
    """What all ranks of one run share: one lock, and a count of who waits."""

    ranks: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: int = 0
    over: int = 0
    dead: bool = False

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait, holding the lock, until `ready()`; raises `Stuck` when no rank is left that could change it."""
        while not ready():
            if self.dead:
                raise Stuck
            self.waiting += 1
            if self.waiting + self.over == self.ranks:
                self.dead = True
                self.changed.notify_all()
                raise Stuck
            assert self.changed.wait(PATIENCE_S), "the test itself hangs"

    def moved(self) -> None:
        """Something happened: everybody who waits looks again."""
        self.waiting = 0
        self.changed.notify_all()

    def ended(self) -> None:
        """A rank does nothing any more."""
        with self.changed:
            self.over += 1
            if not self.dead and self.waiting + self.over == self.ranks and self.waiting:
                self.dead = True
                self.changed.notify_all()


class Rendezvous:
    """One rank's end of wires on which every batch blocks until all of it has passed."""

    def __init__(self, net: Net, rank: int, queues: dict[tuple[int, int, str], tuple[deque[Any], deque[Any]]]) -> None:
        self.net, self.rank, self.queues = net, rank, queues
        self.arrived: dict[Key, Any] = {}

    def exchange(self, sends: Sequence[tuple[Key, int, Any]], receives: Sequence[tuple[Key, int]]) -> None:
        """Post everything, then wait until it has all met its other ends."""
        with self.net.changed:
            mine = []
            for side, ends in enumerate(([(k, p, v) for k, p, v in sends], [(k, p, None) for k, p in receives])):
                for key, peer, value in ends:
                    pair = (self.rank, peer) if side == 0 else (peer, self.rank)
                    queues = self.queues.setdefault((*pair, key.payload.value), (deque(), deque()))
                    end = {"key": key, "value": value, "met": False, "rank": self}
                    mine.append(end)
                    if queues[1 - side]:
                        other = queues[1 - side].popleft()
                        self._meet(*((end, other) if side == 0 else (other, end)))
                    else:
                        queues[side].append(end)
            self.net.moved()
            self.net.wait_until(lambda: all(end["met"] for end in mine))

    @staticmethod
    def _meet(sent: dict[str, Any], received: dict[str, Any]) -> None:
        sent["met"] = received["met"] = True
        # No tags: what arrives is what was sent, whatever the receiver calls it.
        received["rank"].arrived[received["key"]] = sent["value"]

    def take(self, key: Key) -> Any:
        """What arrived under that name."""
        if key not in self.arrived:
            raise Broken(f"rank {self.rank} uses {key} before it has arrived")
        return self.arrived.pop(key)

    def finish(self) -> None:
        """Everything has left already."""


class Mailboxes:
    """One rank's end of wires on which sends never wait."""

    def __init__(self, net: Net, rank: int, boxes: dict[Key, Any]) -> None:
        self.net, self.rank, self.boxes = net, rank, boxes

    def exchange(self, sends: Sequence[tuple[Key, int, Any]], receives: Sequence[tuple[Key, int]]) -> None:
        """Put what is sent into its box."""
        with self.net.changed:
            self.boxes.update({key: value for key, _, value in sends})
            self.net.moved()

    def take(self, key: Key) -> Any:
        """Wait for the box to be filled."""
        with self.net.changed:
            self.net.wait_until(lambda: key in self.boxes)
            return self.boxes.pop(key)

    def finish(self) -> None:
        """Everything has left already."""


class Sceptic:
    """Work whose values are their own names; it checks every input, and that each action happens once, in its turn."""

    def __init__(self, order: Order, rank: int) -> None:
        self.order, self.rank = order, rank
        self.done: set[Action] = set()

    def perform(self, action: Action, incoming: Any) -> Any:
        """Return `action` itself; raises `Broken` where an input is another than it needs or is not there."""
        if action in self.done or self.order.placement[action.stage] != self.rank:
            raise Broken(f"{action} twice, or on rank {self.rank}, which has no such stage")
        halves = {Kind.B: (Kind.I, Kind.W), Kind.I: (Kind.B,), Kind.W: (Kind.B,), Kind.F: ()}[action.kind]
        if any(action._replace(kind=kind) in self.done for kind in halves):
            raise Broken(f"{action} beside the other form of the same backward")
        for one_of in needs(action, self.order.stages):
            if not any(a in self.done if a.stage == action.stage else a == incoming for a in one_of):
                raise Broken(f"{action} needs one of {one_of}, has {incoming}")
        self.done.add(action)
        return action

    def reduce(self, stage: int) -> None:
        """Nothing to reduce."""

    def unshard(self, stage: int) -> None:
        """Nothing to gather."""

    def reshard(self, stage: int) -> None:
        """Nothing to free."""

    def before(self, action: Action, *, reduced: bool) -> None:
        """Nothing to prepare."""


def runs(programs: Sequence[Sequence[Step]], order: Order, wires: type[Rendezvous] | type[Mailboxes]) -> bool:
    """Whether the interpreter brings all ranks to the end of a whole step of `order` over such wires."""
    net, shared = Net(ranks=len(programs)), {}

    def one(rank: int) -> set[Action] | None:
        work = Sceptic(order, rank)
        try:
            Interpreter(programs[rank], order.stages).run(work, wires(net, rank, shared))
        except (Stuck, Broken, KeyError, AssertionError):
            return None
        finally:
            net.ended()
        return work.done

    done = [future.result(PATIENCE_S) for future in [RANKS.submit(one, rank) for rank in range(len(programs))]]
    if any(found is None for found in done):
        return False
    performed = set().union(*(found for found in done if found is not None))
    pairs = [(stage, m) for stage in range(order.stages) for m in range(order.microbatches)]
    return all(
        Action(Kind.F, *at) in performed and (Action(Kind.B, *at) in performed or Action(Kind.W, *at) in performed)
        for at in pairs
    )


def naive(order: Order) -> list[list[Step]]:
    """Programs for `Mailboxes`, of any order, legal or not: each message is sent as soon as it is made."""
    made = {a for actions in order.ranks for a in actions}
    programs: list[list[Step]] = []
    for rank, actions in enumerate(order.ranks):
        steps: list[Step] = []
        awaited = [
            t for a in made if (t := transfer_of(a, order.placement)) is not None and t.target == rank != t.source
        ]
        if awaited:
            steps.append(Exchange(sends=(), receives=tuple(awaited)))
        for action in actions:
            steps.append(action)
            transfer = transfer_of(action, order.placement)
            if transfer is not None:
                steps.append(Exchange(sends=(transfer,), receives=()))
        programs.append(steps)
    return programs


def meets(program: Program) -> bool:
    """Whether the interpreter runs `program` to its end over blocking, untagged wires."""
    return runs(program.ranks, program.order, Rendezvous)
