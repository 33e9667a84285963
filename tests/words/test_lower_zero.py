"""Where gathers, reshards and reductions stand in lowered programs: properties of random legal orders."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule_lower import legal_orders

from shardsmith.engine.runtime.interpreter import Interpreter
from shardsmith.schedule.ir import Action, Kind, Order
from shardsmith.schedule.lower import Gather, Reduce, Reshard, Step, Unshard, lower
from shardsmith.schedule.orders import build, names
from shardsmith.schedule.rendezvous import rendezvous

GATHERS: tuple[Gather, ...] = ("never", "per_step", "per_pass")
NEEDS_WEIGHTS = (Kind.F, Kind.B, Kind.I)
MAKES_GRADIENTS = (Kind.B, Kind.W)


def of_stage(steps: tuple[Step, ...], stage: int) -> list[Step]:
    """What concerns `stage`, in order; exchanges have no stage of their own."""
    return [s for s in steps if getattr(s, "stage", None) == stage]


@given(legal_orders(), st.sampled_from(GATHERS), st.booleans())
@settings(max_examples=100, deadline=None)
def test_programs_that_gather_meet_and_exchange_as_before(order: Order, gather: Gather, each: bool) -> None:
    program = lower(order, gather=gather, reduce_each=each)
    assert rendezvous(program) == []
    for steps, plain in zip(program.ranks, lower(order).ranks, strict=True):
        added = (Unshard, Reshard, Reduce)
        assert [s for s in steps if not isinstance(s, added)] == [s for s in plain if not isinstance(s, Reduce)]


@given(legal_orders(), st.sampled_from(("per_step", "per_pass")))
@settings(max_examples=100, deadline=None)
def test_weights_are_whole_wherever_they_are_used(order: Order, gather: Gather) -> None:
    program = lower(order, gather=gather)
    for rank, steps in enumerate(program.ranks):
        for stage in order.stages_of(rank):
            whole, gathered = False, 0
            for step in of_stage(steps, stage):
                if isinstance(step, Unshard):
                    assert not whole, "gathered twice"
                    whole, gathered = True, gathered + 1
                elif isinstance(step, Reshard):
                    assert whole, "freed twice"
                    whole = False
                elif isinstance(step, Action) and step.kind in NEEDS_WEIGHTS:
                    assert whole, f"{step} without weights"
            assert not whole, "weights are never freed"
            passes = sum(a.stage == stage and a.kind in NEEDS_WEIGHTS for a in order.ranks[rank])
            assert gathered == (1 if gather == "per_step" else passes)


@given(legal_orders(), st.sampled_from(("per_step", "per_pass")))
@settings(max_examples=100, deadline=None)
def test_nothing_is_gathered_for_w_and_nothing_kept_longer_than_used(order: Order, gather: Gather) -> None:
    program = lower(order, gather=gather)
    for rank, steps in enumerate(program.ranks):
        for i, step in enumerate(steps):
            neighbour = {Unshard: i + 1, Reshard: i - 1}.get(type(step))
            if neighbour is not None:
                user = steps[neighbour]
                assert isinstance(user, Action)
                assert user.kind in NEEDS_WEIGHTS
                assert user.stage == step.stage  # type: ignore[union-attr]
        for stage in order.stages_of(rank):
            own = of_stage(steps, stage)
            last = max(i for i, s in enumerate(own) if isinstance(s, Reshard))
            assert all(not isinstance(s, Action) or s.kind is Kind.W for s in own[last:])
            if gather == "per_pass":
                for i, s in enumerate(own):
                    if isinstance(s, Action) and s.kind is Kind.W:
                        assert not isinstance(own[i - 1], Unshard), "W holds no weights"


@given(legal_orders(), st.sampled_from(GATHERS))
@settings(max_examples=100, deadline=None)
def test_each_gradient_is_reduced_once_or_all_together(order: Order, gather: Gather) -> None:
    each = lower(order, gather=gather, reduce_each=True)
    together = lower(order, gather=gather, reduce_each=False)
    for rank, actions in enumerate(order.ranks):
        made = Counter(a.stage for a in actions if a.kind in MAKES_GRADIENTS)
        assert Counter(s.stage for s in each.ranks[rank] if isinstance(s, Reduce)) == made
        assert Counter(s.stage for s in together.ranks[rank] if isinstance(s, Reduce)) == Counter(
            dict.fromkeys(made, 1)
        )
        for stage in order.stages_of(rank):
            own = [s for s in of_stage(each.ranks[rank], stage) if isinstance(s, Action | Reduce)]
            for i, step in enumerate(own):
                if isinstance(step, Action):
                    follows = i + 1 < len(own) and isinstance(own[i + 1], Reduce)
                    assert follows == (step.kind in MAKES_GRADIENTS)
            late = [s for s in of_stage(together.ranks[rank], stage) if isinstance(s, Action | Reduce)]
            at = next(i for i, s in enumerate(late) if isinstance(s, Reduce))
            assert all(isinstance(s, Action) and s.kind is Kind.F for s in late[at + 1 :])


@given(legal_orders(), st.booleans(), st.sampled_from(GATHERS))
@settings(max_examples=60, deadline=None)
def test_the_interpreter_launches_reductions_from_the_action_ahead_of_them(
    order: Order, each: bool, gather: Gather
) -> None:
    """Gathers between an action and its reduction do not hide which action it belongs to."""
    program = lower(order, gather=gather, reduce_each=each)
    for rank, steps in enumerate(program.ranks):
        armed: list[Action] = []

        class Work:
            def before(self, action: Action, *, reduced: bool) -> None:
                if reduced:
                    armed.append(action)

            def perform(self, action: Action, incoming: object) -> object:
                return action

            def unshard(self, stage: int) -> None: ...
            def reshard(self, stage: int) -> None: ...
            def reduce(self, stage: int) -> None: ...

        class Wire:
            def exchange(self, sends: object, receives: object) -> None: ...
            def take(self, key: object) -> object:
                return key

            def finish(self) -> None: ...

        Interpreter(steps, order.stages).run(Work(), Wire())  # type: ignore[arg-type]
        made = [a for a in order.ranks[rank] if a.kind in MAKES_GRADIENTS]
        last = {a.stage: a for a in made}
        assert armed == (made if each else [a for a in made if a is last[a.stage]])


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("each", [False, True])
def test_built_in_schedules_meet_with_every_way_to_gather(name: str, gather: Gather, each: bool) -> None:
    for pipeline, microbatches in ((1, 2), (2, 1), (2, 4), (4, 8), (3, 5)):
        microbatches += 2 * pipeline if name == "dualpipe_v" else 0  # it is refused with fewer than 2P
        order = build(name, pipeline=pipeline, microbatches=microbatches)
        assert rendezvous(lower(order, gather=gather, reduce_each=each)) == []


def test_a_split_backward_gathers_for_f_and_i_and_reduces_after_w() -> None:
    actions = tuple(Action(kind, 0, 0) for kind in (Kind.F, Kind.I, Kind.W))
    order = Order(name="one", microbatches=1, placement=(0,), ranks=(actions,))
    f, i, w = actions
    gather, free, reduce = Unshard(stage=0), Reshard(stage=0), Reduce(stage=0)
    assert lower(order, gather="per_pass").ranks == ((gather, f, free, gather, i, free, w, reduce),)
    assert lower(order, gather="per_step").ranks == ((gather, f, i, free, w, reduce),)
    assert lower(order).ranks == ((f, i, w, reduce),)
