"""Prove that programs meet: no deadlock with blocking batches, both ends agree, inputs arrive in time.

The checker knows nothing of how `lower.py` made the programs. It runs them under the strictest rules
that a communication library may have: a batch ends only when every send and receive in it has met its
other end, and messages of one pair and direction carry no tag, so the k-th sent is the k-th received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

from shardsmith.errors import Fault
from shardsmith.schedule.ir import Action, needs
from shardsmith.schedule.lower import Exchange, Program, Transfer, transfer_of
from shardsmith.schedule.rules import DEADLOCK, DISAGREE, NOT_THERE

Channel = tuple[int, int, str]
"""(source, target, payload): one communicator, first in, first out."""


class End(NamedTuple):
    """One end of a message: a send or a receive that `rank` has posted."""

    rank: int
    transfer: Transfer


SHOWN = 6
"""How many ranks or transfers a message lists."""


def rendezvous(program: Program, *, source: str = "program") -> list[Fault]:
    """Everything that keeps `program` from running to its end with blocking batches; empty means proven.

    S021 names transfers that the two ends list in different order, S022 actions whose input has not
    arrived, S020 the ranks that wait for each other and what each of them waits for.
    """
    return _disagreements(program, source) + _unfed(program, source) + _deadlock(program, source)


def _channel(transfer: Transfer) -> Channel:
    return transfer.source, transfer.target, transfer.payload.value


def _per_channel(transfers: Iterable[Transfer]) -> dict[Channel, list[Transfer]]:
    channels: dict[Channel, list[Transfer]] = {}
    for transfer in transfers:
        channels.setdefault(_channel(transfer), []).append(transfer)
    return channels


def _disagreements(program: Program, source: str) -> list[Fault]:
    batches = [(rank, s) for rank, steps in enumerate(program.ranks) for s in steps if isinstance(s, Exchange)]
    faults = []
    for rank, batch in batches:
        for transfer, end in [(t, t.source) for t in batch.sends] + [(t, t.target) for t in batch.receives]:
            if end != rank:
                faults.append(DISAGREE.fault(f"rank {rank} lists what is not its own: {transfer}", (source, "batches")))
    sent = _per_channel(t for _, batch in batches for t in batch.sends)
    received = _per_channel(t for _, batch in batches for t in batch.receives)
    for channel in sorted(sent.keys() | received.keys()):
        ours, theirs = sent.get(channel, []), received.get(channel, [])
        if ours != theirs:
            pairs = list(zip_longest(ours, theirs))
            k = next(i for i, (a, b) in enumerate(pairs) if a != b)
            faults.append(
                DISAGREE.fault(
                    f"message {k} of the {channel[2]}s from rank {channel[0]} to rank {channel[1]} differs",
                    (f"{source}, rank {channel[0]} sends", str(pairs[k][0] or "nothing more")),
                    (f"{source}, rank {channel[1]} receives", str(pairs[k][1] or "nothing more")),
                )
            )
    return faults


def _unfed(program: Program, source: str) -> list[Fault]:
    order, faults = program.order, []
    for rank, steps in enumerate(program.ranks):
        there: set[Action | Transfer | None] = set()  # own results, and what has been received
        made: set[Transfer | None] = set()
        for at, step in enumerate(steps):
            where = f"{source}, rank {rank}, step {at}"
            if isinstance(step, Exchange):
                early = [t for t in step.sends if t not in made]
                faults += [
                    NOT_THERE.fault(f"rank {rank} sends what it has not made yet: {t}", (where, str(t))) for t in early
                ]
                there.update(step.receives)
            elif isinstance(step, Action):
                for one_of in needs(step, order.stages):
                    if not any(a in there or transfer_of(a, order.placement) in there for a in one_of):
                        inputs = " or ".join(map(str, one_of))
                        faults.append(
                            NOT_THERE.fault(f"rank {rank} runs {step} before its input", (where, f"needs {inputs}"))
                        )
                there.add(step)
                made.add(transfer_of(step, order.placement))
    return faults


def _deadlock(program: Program, source: str) -> list[Fault]:
    """Run all ranks; whoever is inside a batch when nothing moves any more is stuck."""
    at = [0] * len(program.ranks)
    open_ends = [0] * len(program.ranks)  # sends and receives of the rank's present batch that have not passed
    waiting: dict[Channel, tuple[deque[End], deque[End]]] = {}  # per channel, sends and receives without other end
    ready = deque(range(len(program.ranks)))
    while ready:
        rank = ready.popleft()
        steps = program.ranks[rank]
        while at[rank] < len(steps) and not open_ends[rank]:
            step = steps[at[rank]]
            at[rank] += 1
            if isinstance(step, Exchange):
                open_ends[rank] = len(step.sends) + len(step.receives)
                for met in _enter(step, rank, waiting):
                    open_ends[rank] -= 1
                    open_ends[met] -= 1
                    if not open_ends[met]:
                        ready.append(met)
    stuck = [rank for rank, still in enumerate(open_ends) if still]
    if not stuck:
        return []
    ends = [end for queues in waiting.values() for queue in queues for end in queue]
    values = []
    for rank in stuck[:SHOWN]:
        transfers = "; ".join(str(end.transfer) for end in ends if end.rank == rank)
        values.append((f"{source}, rank {rank}, step {at[rank] - 1}", transfers))
    return [DEADLOCK.fault(f"rank {', '.join(map(str, stuck))}: waiting for ever inside a batch", *values)]


def _enter(batch: Exchange, rank: int, waiting: dict[Channel, tuple[deque[End], deque[End]]]) -> list[int]:
    """Post a whole batch of `rank`: the ranks whose waiting ends it meets, one entry for each."""
    met = []
    for side, transfers in enumerate((batch.sends, batch.receives)):
        for transfer in transfers:
            queues = waiting.setdefault(_channel(transfer), (deque(), deque()))
            if queues[1 - side]:
                met.append(queues[1 - side].popleft().rank)
            else:
                queues[side].append(End(rank, transfer))
    return met
