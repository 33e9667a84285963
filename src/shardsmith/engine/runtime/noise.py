"""Dropout masks that are a pure function of what they cover, so that every layout draws the same ones.

An element of a mask is a hash of (seed, step, sample, layer, site, row, column), with rows and columns counted in
the full tensor of one sample; a rank computes the part that it holds. From this follow all rules of the field at
once: replicated activations have equal masks on the ranks of a tensor group, shards of the sequence or of the heads
have different ones, data ranks differ because their samples do, recomputation sees the same mask again, and a
resumed run goes on with the masks it would have had. There is no generator whose state could diverge, and nothing
but integer arithmetic on tensors, so masks are made on the device that needs them and a compiler can fuse them.

Legend: B sequences of the microbatch, H heads, S rows (sequence), D columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shardsmith.layout.dropout import mask_rows

Site = Literal["embedding", "attention", "mlp", "probabilities"]
SITES: dict[Site, int] = {"embedding": 0, "attention": 1, "mlp": 2, "probabilities": 3}
WORD = 2**32
LOW = WORD - 1
STRIDE = 0x9E3779B9
"""2^32 over the golden ratio: multiples of it lie far apart, so neighbours get unlike inputs of the hash."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The masks of one microbatch in one step, or in one layer of it; `keys_B` name its sequences' masks.

    `places_S` are the places in the sequence of this rank's rows (None: all, from 0 on).
    """

    keys_B: Tensor
    places_S: Tensor | None = None

    def of(self, layer: int) -> Noise:
        """The masks of one layer; -1 stands for what comes before the first."""
        return Noise(keys_B=_below(self.keys_B, layer + 1), places_S=self.places_S)

    def drop(self, x_SBD: Tensor, rate: float, site: Site, first: int = 0) -> Tensor:
        """`x` [S, B, D] with elements dropped at `rate` and the rest scaled; row 0 is row `first` of this rank."""
        last = first + x_SBD.shape[0]
        rows_S = torch.arange(first, last, device=x_SBD.device) if self.places_S is None else self.places_S[first:last]
        return _dropped(x_SBD, _below(_below(self.keys_B, SITES[site]), rows_S[:, None]), rate)

    def drop_probabilities(
        self,
        shares_BHSS: Tensor,
        rate: float,
        first_head: int = 0,
        rows_S: Tensor | None = None,
        keys_S: Tensor | None = None,
    ) -> Tensor:
        """Attention probabilities [B, H, S, S] dropped like that; `first_head` is the global index of head 0.

        `rows_S` and `keys_S` are the places of the queries and keys (None: all, from 0 on).
        """
        heads, rows = shares_BHSS.shape[1:3]
        heads_H = torch.arange(first_head, first_head + heads, device=shares_BHSS.device)
        rows_S = torch.arange(rows, device=shares_BHSS.device) if rows_S is None else rows_S
        keys_BH = _below(_below(self.keys_B, SITES["probabilities"])[:, None], heads_H)
        return _dropped(shares_BHSS, _below(keys_BH[..., None], rows_S), rate, keys_S)


def noise_of(seed: int, step: int, samples: Sequence[int], device: torch.device) -> Noise:
    """The masks of a microbatch whose sequences are `samples` of the data, in one step of a run."""
    names = (f"{seed}/{step}/{sample}" for sample in samples)
    keys = [int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") for name in names]
    return Noise(keys_B=torch.tensor(keys, dtype=torch.int64, device=device))


def _dropped(x: Tensor, keys: Tensor, rate: float, columns_D: Tensor | None = None) -> Tensor:
    """`x` [..., D], each of whose rows has a key; `columns_D` number its columns (None: from 0 on)."""
    if rate == 0.0:
        return x
    columns_D = torch.arange(x.shape[-1], device=x.device) if columns_D is None else columns_D
    kept = _at_least(round(rate * WORD), keys, columns_D)
    return torch.where(kept, x / (1.0 - rate), 0.0)


def _at_least(word: int, keys: Tensor, columns_D: Tensor) -> Tensor:
    """Whether the word of each of the columns under each of `keys` [...] is no less than `word`: bool [..., D]."""
    if torch.compiler.is_compiling():
        return _below(keys[..., None], columns_D) >= word
    # A word has 8 bytes and a mask one: all words at once would be most of what a step holds.
    found = torch.empty(*keys.shape, len(columns_D), dtype=torch.bool, device=keys.device)
    rows = mask_rows(len(columns_D))
    for part, some in zip(found.flatten(0, -2).split(rows), keys.flatten().split(rows), strict=True):
        torch.ge(_below(some[:, None], columns_D), word, out=part)
    return found


def _below(keys: Tensor, number: Tensor | int) -> Tensor:
    """New keys, one for each `number` under each of `keys`; all are 32-bit words held in int64."""
    mixed = keys ^ ((number + 1) * STRIDE & LOW)
    # Two rounds of xor-shift and multiplication, in which every bit of the input reaches every bit of the output.
    # The factor has 27 bits, so that no product leaves int64: overflow would be undefined in compiled code.
    # In place, as these words are wider than what they drop.
    for _ in range(2):
        mixed = mixed.bitwise_xor_(mixed >> 16).mul_(0x45D9F3B).bitwise_and_(LOW)
    return mixed.bitwise_xor_(mixed >> 16)
