"""Dropout masks that are a pure function of what they cover, so that every layout draws the same ones.

A mask is named by (seed, step, sample, layer, site) and defined on the full tensor of one sample; a rank draws the
part that it holds. From this follow all rules of the field at once: replicated activations have equal masks
on the ranks of a tensor group, shards of the sequence or of the heads have different ones, data ranks differ
because their samples do, recomputation sees the same mask again, and a resumed run goes on with the masks it would
have had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_PER_BLOCK = 64
"""Rows of a mask that share a generator: a rank that holds part of a sequence draws only the blocks it touches."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The masks of one microbatch in one step; `samples` name its sequences in the data.

    `held` are the places of the sequence that this rank's rows stand for, in order (None: all, from 0 on).
    """

    seed: int
    step: int
    samples: tuple[int, ...]
    held: tuple[range, ...] | None = None

    def drop(self, x_SBD: Tensor, rate: float, layer: int, site: str, first: int = 0) -> Tensor:
        """`x` [S, B, D] with elements dropped at `rate` and the rest scaled; row 0 is row `first` of this rank."""
        if rate == 0.0:
            return x_SBD
        rows, width = x_SBD.shape[0], x_SBD.shape[2]
        at = [range(first, first + rows)] if self.held is None else cut(self.held, slice(first, first + rows))
        keep = torch.stack([self._places(sample, layer, site, at, width, rate) for sample in self.samples], 1)
        return x_SBD * keep.to(device=x_SBD.device, dtype=x_SBD.dtype)

    def attention(
        self, heads: range, rows: Sequence[range], keys: Sequence[range], length: int, rate: float, layer: int
    ) -> Tensor:
        """Factors [B, H, R, K] for the attention of the places `rows` to `keys`, of `length`, in global query heads."""
        columns = torch.cat([torch.arange(r.start, r.stop) for r in keys])
        return torch.stack(
            [
                torch.stack([self._places(s, layer, f"head {h}", rows, length, rate)[:, columns] for h in heads])
                for s in self.samples
            ]
        )

    def _places(self, sample: int, layer: int, site: str, at: Sequence[range], width: int, rate: float) -> Tensor:
        """Factors [places, width] of the places `at` of one sample."""
        found = [self._rows(sample, layer, site, r.start, len(r), width, rate) for r in at]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _rows(self, sample: int, layer: int, site: str, first: int, rows: int, width: int, rate: float) -> Tensor:
        """Factors [rows, width] of rows [first, first + rows) of one sample: 0, or 1 / (1 - rate)."""
        blocks = range(first // ROWS_PER_BLOCK, -(-(first + rows) // ROWS_PER_BLOCK))
        drawn = torch.cat([self._block(sample, layer, site, b, width, 1.0 - rate) for b in blocks])
        start = first - blocks.start * ROWS_PER_BLOCK
        return drawn[start : start + rows] / (1.0 - rate)

    def _block(self, sample: int, layer: int, site: str, block: int, width: int, kept: float) -> Tensor:
        name = f"{self.seed}/{self.step}/{sample}/{layer}/{site}/{block}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.empty(ROWS_PER_BLOCK, width).bernoulli_(kept, generator=generator)


def cut(held: Sequence[range], rows: slice) -> list[range]:
    """The places of the rows `rows` among all that are `held`, in order."""
    found, start = [], 0
    for part in held:
        found.append(part[max(0, rows.start - start) : max(0, rows.stop - start)])
        start += len(part)
    return [part for part in found if part]
