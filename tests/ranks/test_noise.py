"""Dropout masks: what a rank makes is its part of the whole, and masks look random in every direction."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from shardsmith.engine.runtime.noise import Noise, noise_of
from shardsmith.layout import dropout

CPU = torch.device("cpu")
NOISE = noise_of(1, 0, (4, 9), CPU)


def kept(noise: Noise, rate: float, rows: int = 256, width: int = 64) -> Tensor:
    """[S, B, D], true where an element is kept."""
    return noise.drop(torch.ones(rows, len(noise.keys_B), width), rate, "mlp") > 0


def test_a29_a_part_of_the_sequence_or_of_the_heads_has_its_part_of_the_mask() -> None:
    whole = NOISE.drop(torch.ones(130, 2, 6), 0.25, "mlp")
    assert torch.equal(NOISE.drop(torch.ones(40, 2, 6), 0.25, "mlp", first=50), whole[50:90])
    shares = NOISE.drop_probabilities(torch.ones(2, 4, 9, 9), 0.25)
    assert torch.equal(NOISE.drop_probabilities(torch.ones(2, 2, 9, 9), 0.25, first_head=2), shares[:, 2:])
    assert set(whole.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}


def test_a29_a_sample_has_its_masks_in_whatever_company() -> None:
    assert torch.equal(kept(noise_of(1, 0, (9,), CPU), 0.5)[:, 0], kept(NOISE, 0.5)[:, 1])


def test_masks_of_seeds_steps_samples_layers_and_sites_agree_no_more_than_by_chance() -> None:
    """2 x 256 x 64 elements at rate 0.5: two masks agree in half of them, give or take 5 sigma (1.4 %)."""
    ones = torch.ones(256, 2, 64)
    masks = [
        kept(noise_of(*name, CPU), 0.5) for name in ((1, 0, (4, 9)), (2, 0, (4, 9)), (1, 1, (4, 9)), (1, 0, (5, 8)))
    ]
    masks += [kept(NOISE.of(layer), 0.5) for layer in (-1, 0, 1, 2)]
    masks += [NOISE.drop(ones, 0.5, site) > 0 for site in ("embedding", "attention")]
    for one, other in itertools.combinations(masks, 2):
        assert abs((one == other).float().mean().item() - 0.5) < 0.014


def test_neighbours_in_every_direction_agree_no_more_than_by_chance() -> None:
    """Rows, sequences, columns and heads; and as many elements are dropped as the rate says."""
    for rate in (0.1, 0.5, 0.9):
        mask = NOISE.drop_probabilities(torch.ones(2, 8, 96, 96), rate) > 0
        count = mask.numel()
        assert abs(mask.float().mean().item() - (1 - rate)) < 5 * (rate * (1 - rate) / count) ** 0.5
        chance = rate**2 + (1 - rate) ** 2
        for dim in range(4):
            size = mask.shape[dim] - 1
            same = mask.narrow(dim, 0, size) == mask.narrow(dim, 1, size)
            assert abs(same.float().mean().item() - chance) < 5 * (chance * (1 - chance) / same.numel()) ** 0.5


def test_masks_made_by_parts_are_those_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = NOISE.drop_probabilities(torch.ones(2, 3, 8, 10), 0.5), kept(NOISE, 0.5)
    monkeypatch.setattr(dropout, "WORDS", 64)
    assert torch.equal(NOISE.drop_probabilities(torch.ones(2, 3, 8, 10), 0.5), whole[0])
    assert torch.equal(kept(NOISE, 0.5), whole[1])
