"""Bytes, seconds and FLOP/s, written the same way everywhere."""

from __future__ import annotations

GB = 10**9
GIB = 2**30
MIB = 2**20

DTYPE_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
"""Bytes of one element by dtype name, as plans and job files spell them."""


def format_bytes(count: float) -> str:
    """Binary units with three significant digits: `1536 -> '1.50 KiB'`."""
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}" if abs(count) >= 100 * size else f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds in the unit that reads best: `0.0042 -> '4.20 ms'`."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size * (2 if unit in ("h", "min") else 1):
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-9:.0f} ns"


def counted(count: int, noun: str) -> str:
    """How many of something, in words that agree: `1 rank`, `2 ranks`, `2 batches`."""
    return f"{count} {noun if count == 1 else noun + ('es' if noun.endswith(('ch', 's', 'x')) else 's')}"


def format_count(count: float) -> str:
    """Large counts in decimal units: `1.24e9 -> '1.24 B'` (billions)."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f}"
