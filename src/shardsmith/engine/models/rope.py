"""Rotary position embedding (Su et al. 2021), two-halves convention of the Hugging Face checkpoints."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardsmith.specs.model import ModelSpec, RopeScaling, YarnScaling


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Angle per position of each pair of channels, float64 [rotated channels of a head / 2]."""
    width = spec.latent.rope if spec.latent else spec.head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    inverse = spec.rope_theta**-exponents
    if isinstance(spec.rope_scaling, YarnScaling):
        return _yarn(inverse, spec.rope_scaling, spec.rope_theta)
    return inverse if spec.rope_scaling is None else _llama3(inverse, spec.rope_scaling)


def magnitude(spec: ModelSpec) -> float:
    """What rotated queries and keys are multiplied by: 1 but for YaRN's attention factor."""
    return spec.rope_scaling.magnitude if isinstance(spec.rope_scaling, YarnScaling) else 1.0


def score_factor(spec: ModelSpec) -> float:
    """What attention scores are multiplied by beside 1 / sqrt(head_dim): 1 but for DeepSeek's YaRN."""
    return spec.rope_scaling.score_factor if isinstance(spec.rope_scaling, YarnScaling) else 1.0


def rotations(
    positions_SB: Tensor, inverse: Tensor, dtype: torch.dtype, magnitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, B or 1, 1, head_dim] of global positions [S, B or 1], times `magnitude`."""
    angles = positions_SB[..., None].to(inverse.dtype) * inverse
    angles = torch.cat((angles, angles), -1)[:, :, None, :]
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def rotate(x_SBHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + head_dim/2) of every head by the angle of its position."""
    if torch.compiler.is_compiling():
        low, high = x_SBHE.chunk(2, -1)
        return x_SBHE * cos + torch.cat((-high, low), -1) * sin
    out: Tensor = _Rotate.apply(x_SBHE, cos, sin)
    return out


class _Rotate(torch.autograd.Function):
    """Two passes over memory either way; a rotation's gradient is rotated back, and nothing of x is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1.0), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """`x` rotated forwards or backwards, contiguous; both halves of `cos` and `sin` are alike."""
    half = x.shape[-1] // 2
    out = torch.mul(x, cos, out=x.new_empty(x.shape))
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended linearly."""
    wavelength = 2 * math.pi / inverse
    turns = scaling.original_context / wavelength
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return inverse * (keep + (1.0 - keep) / scaling.factor)


def _yarn(inverse: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    """Channels that turn often are kept, those that turn rarely divided by `factor`, those between blended."""

    def channel(turns: float) -> float:
        """The channel pair (not a whole number) that turns so many times over the original context."""
        pairs = len(inverse) / math.log(theta)
        return pairs * math.log(scaling.original_context / (turns * 2 * math.pi))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The upper bound is that of the published code: channels, not pairs of them.
    first, last = max(first, 0), min(last, 2 * len(inverse) - 1)
    # A band without width is a step, not a division by zero.
    width = last - first or 0.001
    keep = 1.0 - ((torch.arange(len(inverse), dtype=torch.float64, device="cpu") - first) / width).clamp(0.0, 1.0)
    return inverse * (keep + (1.0 - keep) / scaling.factor)
