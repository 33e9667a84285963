"""Learning rates step by step, and what settings of a job forbid."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardsmith.errors import Refused
from shardsmith.plan.file import loads
from shardsmith.specs.job import Data, Optimisation, Run
from shardsmith.specs.job_rules import job_faults
from shardsmith.specs.learning_rate import learning_rate


def rates(steps: int, **settings: object) -> list[float]:
    return [learning_rate(Optimisation(lr=1.0, **settings), done, steps) for done in range(steps)]  # type: ignore[arg-type]


def test_a35_linear_decay_over_100_steps_has_fallen_to_0_90_after_10() -> None:
    assert rates(1000, schedule="linear", decay_steps=100)[10] == pytest.approx(0.90, abs=1e-12)


def test_warm_up_rises_to_the_full_rate() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(8, warmup_steps=4, schedule="linear") == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_cosine_by_hand() -> None:
    found = rates(10, warmup_steps=2, schedule="cosine", min_lr=0.1)
    assert found[2] == 1.0
    assert found[6] == pytest.approx(0.55)
    assert found[9] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 7 / 8)))


def test_wsd_is_flat_and_falls_at_the_end() -> None:
    found = rates(20, warmup_steps=2, schedule="wsd", decay_steps=4)
    assert found[:3] == [0.5, 1.0, 1.0]
    assert found[3:17] == [1.0] * 14
    assert found[17:] == [0.75, 0.5, 0.25]
    assert rates(20, schedule="wsd")[17:] == [1.0, 1.0, 0.5]


@given(
    st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    st.integers(1, 60),
    st.integers(0, 20),
    st.none() | st.integers(1, 80),
    st.floats(0, 1),
)
def test_rates_stay_between_their_ends_and_never_rise_after_the_warm_up(
    schedule: str, steps: int, warmup: int, decay: int | None, floor: float
) -> None:
    found = rates(steps, schedule=schedule, warmup_steps=min(warmup, steps), decay_steps=decay, min_lr=floor)
    rest = found[min(warmup, steps) :]
    assert all(0 < rate <= 1 for rate in found) or floor == 0
    assert all(floor <= rate <= 1 for rate in rest)
    assert all(a >= b for a, b in pairwise(rest))


def codes(*, data: Data | None = None, optimisation: Optimisation | None = None, run: Run | None = None) -> list[str]:
    return [f.code for f in job_faults(data or Data(), optimisation or Optimisation(), run or Run())]


def test_sound_settings_pass() -> None:
    assert codes() == []
    data = Data(path=("a", "b"), weights=(1.0, 2.0), packing="whole", eval_path="c")
    assert codes(data=data, run=Run(eval_every=5)) == []
    assert codes(data=Data(eval_fraction=0.1)) == []
    assert codes(optimisation=Optimisation(schedule="wsd", warmup_steps=10, decay_steps=90)) == []
    assert codes(optimisation=Optimisation(optimizer="sgd", momentum=0.9, lr=1.0)) == []


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"data": Data(path=("a", "b"), weights=(1.0,))}, "G401"),
        ({"data": Data(path=("a", "b"), weights=(1.0, 0.0))}, "G401"),
        ({"data": Data(path="a", weights=(1.0,))}, "F207"),
        ({"data": Data(path=())}, "F206"),
        ({"data": Data(path=("synthetic", "a"))}, "F206"),
        ({"data": Data(path="a", eval_fraction=1.0)}, "F206"),
        ({"data": Data(path="a", eval_path="b", eval_fraction=0.1), "run": Run(eval_every=1)}, "G402"),
        ({"data": Data(path="a", eval_path="b")}, "F207"),
        ({"data": Data(eval_path="b"), "run": Run(eval_every=1)}, "F207"),
        ({"run": Run(eval_every=1)}, "G403"),
        ({"run": Run(steps=0)}, "F206"),
        ({"run": Run(eval_every=-1)}, "F206"),
        ({"run": Run(steps=5, timeline_step=5)}, "F206"),
        ({"optimisation": Optimisation(lr=0.0)}, "F206"),
        ({"optimisation": Optimisation(warmup_steps=101)}, "F206"),
        ({"optimisation": Optimisation(min_lr=1e-5)}, "F207"),
        ({"optimisation": Optimisation(schedule="linear", min_lr=1.0)}, "F206"),
        ({"optimisation": Optimisation(decay_steps=5)}, "F207"),
        ({"optimisation": Optimisation(schedule="wsd", warmup_steps=50, decay_steps=51)}, "F206"),
        ({"optimisation": Optimisation(momentum=0.9)}, "F207"),
        ({"optimisation": Optimisation(optimizer="sgd", betas=(0.9, 0.99))}, "F207"),
        ({"optimisation": Optimisation(optimizer="sgd", eps=1e-6)}, "F207"),
    ],
)
def test_each_rule_alone(settings: dict[str, object], code: str) -> None:
    assert codes(**settings) == [code]  # type: ignore[arg-type]


def test_all_faults_of_a_file_at_once_and_where_each_was_written() -> None:
    text = """
[model]
preset = "tiny-llama"
[workload]
seq_len = 32
global_batch = 8
[data]
path = ["a", "b"]
weights = [1.0]
[optimisation]
min_lr = 1e-5
[run]
eval_every = 10
"""
    with pytest.raises(Refused) as refused:
        loads(text, "job.toml")
    assert sorted(f.code for f in refused.value.faults) == ["F207", "G401", "G403"]
    ignored = next(f for f in refused.value.faults if f.code == "F207")
    assert ignored.values == (("job.toml", "min_lr = 1e-05"), ("default", 'schedule = "constant"'))


@pytest.mark.parametrize("timeout", [0.0, -1.0, math.nan, math.inf, 1e308])
def test_a_wait_without_end_is_refused(timeout: float) -> None:
    assert [fault.code for fault in job_faults(Data(), Optimisation(), Run(timeout_s=timeout))] == ["F206"]
