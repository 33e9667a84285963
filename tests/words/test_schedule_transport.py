"""The checkers against the interpreter: on random orders and programs, right and broken, both say the same.

The checkers reason about orders; the interpreter's own core performs them, on threads, over wires in memory.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from wires import Mailboxes, meets, naive, runs

from random_orders import random_order
from shardsmith.schedule.check import check
from shardsmith.schedule.ir import Action, Kind, Order
from shardsmith.schedule.lower import Exchange, Program, Step, lower
from shardsmith.schedule.rendezvous import rendezvous

LEGAL, MUTATED, PARTS = 10_000, 1_000, 5


@pytest.mark.parametrize("seed", range(PARTS))
def test_every_legal_order_lowers_to_programs_that_meet_and_run(seed: int) -> None:
    random = Random(f"legal {seed}")
    for _ in range(LEGAL // PARTS):
        order = random_order(random)
        assert check(order) == []
        program = lower(order, gather=random.choice(("never", "per_pass", "per_step")))
        assert rendezvous(program) == []
        assert meets(program), order


def test_checker_and_interpreter_agree_on_every_mutated_order() -> None:
    random, verdicts = Random(1), []
    for _ in range(MUTATED):
        order = mutated_order(random_order(random), random)
        legal = check(order) == []
        assert runs(naive(order), order, Mailboxes) == legal, order
        if legal:
            assert meets(lower(order)), order
        verdicts.append(legal)
    assert 50 < sum(verdicts) < MUTATED - 300, "both kinds must occur"


def test_rendezvous_checker_and_interpreter_agree_on_every_mutated_program() -> None:
    random, verdicts = Random(2), []
    while len(verdicts) < MUTATED:
        program = mutated_program(lower(random_order(random)), random)
        if program is None:
            continue
        proven = rendezvous(program) == []
        assert meets(program) == proven, program
        verdicts.append(proven)
    assert 50 < sum(verdicts) < MUTATED - 300, "both kinds must occur"


def mutated_order(order: Order, random: Random) -> Order:
    """`order` with one thing changed: two actions swapped, one moved, lost, repeated, or done on another rank."""
    ranks = [list(actions) for actions in order.ranks]
    rank = random.choice([r for r, actions in enumerate(ranks) if actions])
    actions = ranks[rank]
    at, to = random.randrange(len(actions)), random.randrange(len(actions))
    match random.choice(("swap", "swap", "move", "move", "lose", "repeat", "elsewhere", "other form")):
        case "swap":
            actions[at], actions[to] = actions[to], actions[at]
        case "move":
            actions.insert(to, actions.pop(at))
        case "lose":
            del actions[at]
        case "repeat":
            actions.insert(to, actions[at])
        case "elsewhere":
            random.choice(ranks).append(actions.pop(at))
        case "other form":
            other = {Kind.B: Kind.I, Kind.I: Kind.B, Kind.W: Kind.B, Kind.F: Kind.W}
            actions[at] = Action(other[actions[at].kind], *actions[at][1:])
    return replace(order, ranks=tuple(map(tuple, ranks)))


def mutated_program(program: Program, random: Random) -> Program | None:
    """`program` with one batch moved, swapped or cut in two, or its messages reordered; None: nothing to change."""
    ranks = [list(steps) for steps in program.ranks]
    found = [(r, i) for r, steps in enumerate(ranks) for i, s in enumerate(steps) if isinstance(s, Exchange)]
    if not found:
        return None
    rank, at = random.choice(found)
    steps: list[Step] = ranks[rank]
    batch = steps[at]
    assert isinstance(batch, Exchange)
    others = [i for r, i in found if r == rank]
    match random.choice(("swap", "move", "cut", "cut", "shuffle")):
        case "swap":
            to = random.choice(others)
            steps[at], steps[to] = steps[to], steps[at]
        case "move":
            steps.insert(random.randrange(len(steps)), steps.pop(at))
        case "cut":
            halves = [replace(batch, receives=()), replace(batch, sends=())]
            random.shuffle(halves)
            steps[at : at + 1] = [half for half in halves if half.sends or half.receives]
        case "shuffle":
            sends, receives = list(batch.sends), list(batch.receives)
            random.shuffle(sends)
            random.shuffle(receives)
            steps[at] = Exchange(sends=tuple(sends), receives=tuple(receives))
    return replace(program, ranks=tuple(map(tuple, ranks)))
