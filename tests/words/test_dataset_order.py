"""The order of samples: a permutation per epoch, from (seed, step) alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardsmith.engine.dataset.order import of_replica, samples_of_step, shuffled, window_count
from shardsmith.errors import Refused


def epoch_order(seed: int, epoch: int, samples: int) -> list[int]:
    return shuffled(np.arange(samples), seed=seed, epoch=epoch, samples=samples).tolist()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**70), st.integers(0, 10**6), st.integers(1, 700))
def test_every_epoch_is_a_permutation(seed: int, epoch: int, samples: int) -> None:
    assert sorted(epoch_order(seed, epoch, samples)) == list(range(samples))


def test_order_is_fixed_across_machines_and_releases() -> None:
    # recorded once: a change here would change every run that is resumed
    assert epoch_order(1234, 0, 8) == [1, 7, 5, 0, 2, 3, 6, 4]
    assert epoch_order(1234, 1, 8) == [4, 7, 6, 0, 3, 5, 2, 1]


def test_f10_epochs_differ_and_each_is_covered_by_disjoint_replicas() -> None:
    seen = []
    for step in range(4):  # 8 samples, 4 a step: two epochs
        batch = samples_of_step(seed=1, step=step, global_batch=4, samples=8)
        parts = [of_replica(batch, data_index=d, data=2, microbatch=1, microbatches=2) for d in range(2)]
        assert not set(parts[0].ravel()) & set(parts[1].ravel())
        seen.append(batch.tolist())
    first, second = seen[0] + seen[1], seen[2] + seen[3]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second


def test_seeds_give_different_orders() -> None:
    assert epoch_order(0, 0, 100) != epoch_order(1, 0, 100)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 50), st.integers(1, 40), st.integers(1, 30))
def test_steps_join_into_epochs_without_gap(seed: int, global_batch: int, samples: int) -> None:
    steps = -(-3 * samples // global_batch)
    run = np.concatenate(
        [samples_of_step(seed=seed, step=s, global_batch=global_batch, samples=samples) for s in range(steps)]
    )
    for epoch in range(3):
        assert run[epoch * samples : (epoch + 1) * samples].tolist() == epoch_order(seed, epoch, samples)


def test_batch_size_does_not_change_the_order() -> None:
    one = np.concatenate([samples_of_step(seed=3, step=s, global_batch=2, samples=11) for s in range(15)])
    other = np.concatenate([samples_of_step(seed=3, step=s, global_batch=5, samples=11) for s in range(6)])
    assert one.tolist() == other.tolist()


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_replicas_partition_the_batch_whatever_the_factors(data: int, microbatch: int, microbatches: int) -> None:
    batch = samples_of_step(seed=5, step=2, global_batch=data * microbatch * microbatches, samples=1000)
    parts = [
        of_replica(batch, data_index=d, data=data, microbatch=microbatch, microbatches=microbatches)
        for d in range(data)
    ]
    assert all(part.shape == (microbatches, microbatch) for part in parts)
    assert sorted(np.concatenate(parts, axis=None).tolist()) == sorted(batch.tolist())
    # microbatch i of all replicas is the i-th run of the batch, for every factorisation
    for i, run in enumerate(batch.reshape(microbatches, -1)):
        assert np.concatenate([part[i] for part in parts]).tolist() == run.tolist()


def test_places_are_spread_evenly() -> None:
    counts = np.zeros((16, 16))
    for epoch in range(1600):
        counts[np.arange(16), epoch_order(7, epoch, 16)] += 1
    chi2 = ((counts - 100) ** 2 / 100).sum()
    assert 150 < chi2 < 320  # 225 degrees of freedom: mean 225, standard deviation 21


def test_neighbours_do_not_stay_neighbours() -> None:
    order = np.array(epoch_order(0, 0, 10_000))
    assert (np.diff(order) == 1).sum() < 10  # one is expected of a random order
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


def test_huge_data_costs_nothing() -> None:
    batch = samples_of_step(seed=0, step=10**9, global_batch=512, samples=10**12)
    assert len(set(batch.tolist())) == 512
    assert 0 <= batch.min() <= batch.max() < 10**12


def test_windows_share_only_their_border_token() -> None:
    assert window_count(9, 4) == 2
    assert window_count(8, 4) == 1
    assert window_count(5, 4) == 1


@pytest.mark.parametrize("tokens", [1, 4])
def test_e03_less_than_one_window_refused(tokens: int) -> None:
    with pytest.raises(Refused, match="G301") as refused:
        window_count(tokens, 4, source="tiny")
    assert ("tiny", f"tokens = {tokens}") in refused.value.faults[0].values
