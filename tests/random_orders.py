"""Random legal orders."""

from __future__ import annotations

from random import Random

from shardsmith.schedule.ir import Action, Kind, Order, needs


def random_order(random: Random, *, pipeline: int | None = None, every_rank: bool = False) -> Order:
    """Stages on random ranks (also several, also none), whole or split backwards, in any order that can run."""
    ranks_wanted = pipeline or random.randint(1, 4)
    microbatches, stages = random.randint(1, 4), random.randint(1, 6)
    placement = [random.randrange(ranks_wanted) for _ in range(stages)]
    if every_rank:
        placement = [*range(ranks_wanted), *placement]
        random.shuffle(placement)
    left: list[set[Action]] = [set() for _ in range(microbatches)]
    for m, actions in enumerate(left):
        for stage in range(len(placement)):
            actions |= {Action(Kind(kind), stage, m) for kind in random.choice(["FB", "FIW"])}
    done: set[Action] = set()
    ranks: list[list[Action]] = [[] for _ in range(ranks_wanted)]
    ready = [Action(Kind.F, 0, m) for m in range(microbatches)]
    while ready:
        at = random.randrange(len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        action = ready.pop()
        left[action.microbatch].remove(action)
        done.add(action)
        ranks[placement[action.stage]].append(action)
        waiting = left[action.microbatch].difference(ready)
        near = sorted(a for a in waiting if abs(a.stage - action.stage) <= 1)
        ready += [a for a in near if all(not done.isdisjoint(o) for o in needs(a, len(placement)))]
    assert not any(left), "everything can run in some order"
    return Order(name="random", microbatches=microbatches, placement=tuple(placement), ranks=tuple(map(tuple, ranks)))
