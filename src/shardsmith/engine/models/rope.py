"""Rotary position embedding (Su et al. 2021), two-halves convention of the Hugging Face checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardsmith.specs.model import ModelSpec, RopeScaling


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Angle per position of each pair of channels, float64 [head_dim / 2]."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float64, device="cpu") / spec.head_dim
    inverse = spec.rope_theta**-exponents
    return inverse if spec.rope_scaling is None else _llama3(inverse, spec.rope_scaling)


def rotations(positions_SB: Tensor, inverse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, B or 1, 1, head_dim] of global positions [S, B or 1]."""
    angles = positions_SB[..., None].to(inverse.dtype) * inverse
    angles = torch.cat((angles, angles), -1)[:, :, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_SBHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + head_dim/2) of every head by the angle of its position."""
    low, high = x_SBHE.chunk(2, -1)
    return x_SBHE * cos + torch.cat((-high, low), -1) * sin


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended linearly."""
    wavelength = 2 * math.pi / inverse
    turns = scaling.original_context / wavelength
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return inverse * (keep + (1.0 - keep) / scaling.factor)
