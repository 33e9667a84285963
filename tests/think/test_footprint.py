"""The memory of a rank in closed form: states are the layout's, and the rest grows with what it should."""

from __future__ import annotations

import pytest

from shardsmith.design.footprint.step import footprint
from shardsmith.design.footprint.tape import Tape
from shardsmith.layout.shards import rank_states
from shardsmith.plan.file import make_setup
from shardsmith.plan.setup import Setup


def setup_of(line: str, microbatches: int = 8) -> Setup:
    plan = make_setup(plan=line).plan
    return make_setup(plan=line, seq_len=64, global_batch=plan.data * microbatches, dtype="bfloat16")


def activations(line: str, microbatches: int = 8, rank: int = 0) -> int:
    return footprint(setup_of(line, microbatches), rank)["activations"]


@pytest.mark.parametrize("line", [f"data=4,zero={zero},tensor=2" for zero in range(4)])
def test_states_are_the_layouts(line: str) -> None:
    setup = setup_of(line)
    found, states = footprint(setup, 3), rank_states(setup, 3)
    assert (found["weights"], found["gradients"], found["optimizer"]) == (
        states.weights,
        states.gradients,
        states.optimizer,
    )


def test_b16_one_f_one_b_does_not_grow_with_microbatches_and_gpipe_does() -> None:
    base = "pipeline=4,microbatch=1"
    assert activations(base, 8) == activations(base, 32)
    few, many = (activations(f"{base},schedule=gpipe", m) for m in (8, 32))
    assert many - few == 24 * (few // 8)


def test_a_stage_keeps_as_many_microbatches_as_the_order_lets_live() -> None:
    """On rank r of 1F1B, P - r microbatches; whole layers of activations."""
    peaks = [activations("pipeline=4,microbatch=1,recompute=full", 16, rank) for rank in range(3)]
    # Full recomputation keeps one input a layer, and a stage that looks tokens up nothing else.
    message = 64 * 128 * 2
    assert peaks[1] - peaks[2] >= message
    assert peaks[1] > peaks[2]


def test_recomputation_keeps_less() -> None:
    none, selective, full = (activations(f"pipeline=2,recompute={r}") for r in ("none", "selective", "full"))
    assert full < selective < none


def test_a_tape_counts_holders_and_remembers_the_largest_moment() -> None:
    tape = Tape()
    first = tape.new(10, "weights")
    with tape.surviving("activations"):
        kept, passing = tape.new(5), tape.new(7)
        tape.free(passing)
    tape.hold(kept)
    tape.free(kept)
    assert (tape.peak, tape.at_peak) == (22, {"weights": 10, "temporary": 12})
    assert dict(tape.live) == {"weights": 10, "temporary": 0, "activations": 5}
    tape.free(kept, first)
    assert tape.total == 0
    with pytest.raises(AssertionError, match="once too often"):
        tape.free(first)
