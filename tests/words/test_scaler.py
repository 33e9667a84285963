"""The dynamic loss scale: halves on overflow, doubles after a while, never leaves its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardsmith.engine.train.scaler import LossScaler


def test_overflow_halves_and_patience_doubles() -> None:
    scaler = LossScaler(scale=2.0**16, dynamic=True, patience=3)
    scaler.update(finite=False)
    assert scaler.scale == 2.0**15
    scales = []
    for finite in (True, True, False, True, True, True, True):
        scaler.update(finite=finite)
        scales.append(scaler.scale)
    assert scales == [2.0**15, 2.0**15, 2.0**14, 2.0**14, 2.0**14, 2.0**15, 2.0**15]


def test_a_wider_dtype_has_scale_1_for_good() -> None:
    scaler = LossScaler(patience=1)
    for finite in (True, False, True):
        scaler.update(finite=finite)
    assert scaler.scale == 1.0


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 5))
def test_scale_stays_a_power_of_two_within_bounds(outcomes: list[bool], patience: int) -> None:
    scaler = LossScaler(scale=2.0**16, dynamic=True, patience=patience)
    for finite in outcomes:
        before = scaler.scale
        scaler.update(finite=finite)
        assert scaler.scale / before in (0.5, 1.0, 2.0)
        assert finite or scaler.scale in (before / 2, scaler.smallest)
        assert scaler.smallest <= scaler.scale <= scaler.largest
        assert float(scaler.scale).hex().startswith("0x1.0000")
