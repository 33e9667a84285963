"""What dropout takes beside the tensors that it drops from. Its masks do not depend on the layout."""

from __future__ import annotations

WORDS = 2**22
"""Words of 8 bytes, one for each element of a mask, that are made at a time."""


def mask_rows(width: int) -> int:
    """Rows of `width` elements of a mask that are made at a time."""
    return max(1, WORDS // width)
