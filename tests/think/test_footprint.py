"""The memory of a rank in closed form: states are the layout's, and the rest grows with what it should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardsmith.design.cost.held import kept_layer
from shardsmith.design.cost.layouts import batch_of, layouts_of
from shardsmith.design.cost.subject import subject_of
from shardsmith.design.footprint.step import footprint
from shardsmith.design.footprint.tape import Tape
from shardsmith.layout.shards import rank_states
from shardsmith.plan.file import make_setup
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Dtype


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("line", ["pipeline=4", "pipeline=2,tensor=2,sequence_parallel=true"])
def test_g04_dropout_keeps_a_byte_an_element_of_each_mask(line: str, dtype: Dtype) -> None:
    """What each further microbatch keeps on the first rank, in the closed form of the engine and in the cost model."""

    def each(dropout: float) -> tuple[float, float]:
        few, many = (_with(line, n, dtype, dropout) for n in (8, 16))
        kept = (footprint(many, 0)["activations"] - footprint(few, 0)["activations"]) / 8
        subject = subject_of(few)
        layouts, kinds = layouts_of([few.plan], few.model, few.workload), precision(few.plan, few.workload)
        return kept, float(kept_layer(subject, layouts, batch_of(subject, layouts, kinds))[0][0])

    (kept, layer), (plain, plain_layer) = each(0.1), each(0.0)
    setup = _with(line, 8, dtype, 0.1)
    mask = 64 * setup.model.hidden / setup.plan.tensor
    layers = setup.model.layers // setup.plan.pipeline
    assert layer - plain_layer == 2 * mask
    assert kept - plain == (2 * layers + 1) * mask  # the embedding's, too


def _with(line: str, microbatches: int, dtype: Dtype, dropout: float) -> Setup:
    plan = f"{line},schedule=gpipe,microbatch=1"
    setup = make_setup(plan=plan, cluster="h100", nodes=1, seq_len=64, global_batch=microbatches, dtype=dtype)
    device = replace(setup.cluster.device, peak_tflops={**setup.cluster.device.peak_tflops, "float32": 67.0})
    cluster = replace(setup.cluster, device=device)
    return replace(setup, model=setup.model.with_(dropout=dropout), cluster=cluster)
