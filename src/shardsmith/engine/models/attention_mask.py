"""Which keys a query attends to: causal, within its document, within a window.

Legend: B sequences, S positions; a mask broadcasts over heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention_mask(
    length: int, *, device: torch.device, documents_BS: Tensor | None = None, window: int | None = None
) -> Tensor | None:
    """True where a query (third dim) may attend to a key (fourth dim): bool [B or 1, 1, S, S], S = `length`.

    A query sees keys up to its own place, of its own document where `documents_BS` numbers them (any int64
    numbers: equal means the same document), and only the last `window` of them, itself included. Every query
    sees itself, so no row is empty. None where that is plain causal attention, which kernels know by a flag.
    """
    if window is not None and window >= length:
        window = None
    if documents_BS is None and window is None:
        return None
    query, key = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)[None, :]
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    mask = seen[None, None]
    if documents_BS is not None:
        assert documents_BS.shape[1] == length, f"documents {tuple(documents_BS.shape)} of {length} positions"
        mask = mask & (documents_BS[:, None, :, None] == documents_BS[:, None, None, :])
    return mask


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`mask` as what is added to scores: 0 where it is True, else -inf; made once for all layers that use it."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
