"""What a mixture of experts keeps for its backward pass, in closed form: the layout's numbers, in bytes."""

from __future__ import annotations

import pytest

from shardsmith.design.footprint.experts import Mixture, Rows
from shardsmith.design.footprint.reductions import Gradients
from shardsmith.design.footprint.sizes import Sizes
from shardsmith.design.footprint.tape import Tape
from shardsmith.layout.axes.data import Spread
from shardsmith.layout.axes.expert import dispatched_rows, local_tokens, routed_activations
from shardsmith.plan.file import make_setup


@pytest.mark.parametrize("line", ["data=2,expert=2", "tensor=2,expert=2", "data=2,expert=2,expert_tensor=2,tensor=2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_mixture_keeps_its_rows_and_scores(line: str, dtype: str) -> None:
    setup = make_setup(plan=line, model="tiny-moe", seq_len=64, dtype=dtype)
    sizes, tape, rows = Sizes(setup), Tape(), dispatched_rows(setup)
    nothing = Gradients(tape, setup, {}, Spread(ranks=1, index=0, replicas=1), streams=True)
    mixture = Mixture(tape, sizes, nothing, nothing, Rows(sent=rows, received=rows, sorted=True), 1)
    entering = tape.new(sizes.hidden)
    kept = mixture.send(entering)
    out = mixture.compute(kept)
    tape.free(entering, out)
    keeps, router = routed_activations(setup), local_tokens(setup) * setup.model.hidden
    elements = (keeps.total - keeps.scores + router) * sizes.narrow + keeps.scores * sizes.wide
    indices = tape.total - elements
    # Choices, where their rows go and come from; weights of choices.
    assert 0 < indices <= 8 * 8 * rows
    assert tape.total < 1.2 * elements
