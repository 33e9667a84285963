"""What a block needs beside its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from shardsmith.engine.runtime.noise import Noise
from shardsmith.engine.runtime.overlapped import Turns
from shardsmith.engine.runtime.recompute import plain
from shardsmith.engine.runtime.routing import Routing
from shardsmith.engine.runtime.sequence_parts import View


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a block needs beside its input.

    `rotation`: cosines and sines of the positions where they are rotary. `mask`: what is added to scores so that
    only those count that should (see `attention_mask`), None for plain causal attention. `view`: who attends to whom
    where the sequence is cut over the context axis, None where it is whole. `noise`: dropout masks of the layer, None
    where nothing is dropped. `routing`: where routers note what they did, None where nothing is trained. `places`:
    places in the sequence of this rank's rows, all of it in order where None. `cheap` calls a function whose output
    may be made again in backward (see `runtime/recompute.py`).
    """

    rotation: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None
    view: View | None = None
    noise: Noise | None = None
    routing: Routing | None = None
    places: Tensor | None = None
    cheap: Callable[..., Tensor] = plain
    turns: Turns | None = None

    def half(self, at: slice, turns: Turns) -> Surroundings:
        """The same for the sequences `at` of the microbatch, which take `turns` with the others."""
        rotation, mask, noise = self.rotation, self.mask, self.noise
        if rotation is not None and rotation[0].shape[1] > 1:
            rotation = rotation[0][:, at], rotation[1][:, at]
        if mask is not None and mask.shape[0] > 1:
            mask = mask[at]
        if noise is not None:
            noise = replace(noise, keys_B=noise.keys_B[at])
        view = None if self.view is None else self.view.of(at)
        return replace(self, rotation=rotation, mask=mask, view=view, noise=noise, turns=turns)
