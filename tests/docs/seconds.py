"""How long a command takes, on a machine that does other things as well."""

import os
import subprocess
from pathlib import Path

TRIES = 5


def seconds_of(words: list[str | Path], limit_s: float, **options) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a command; returns how it ended and what it computed, in seconds: its wait where it has a machine to itself.

    Other processes slow a computation down even so (caches, clock rate, hyperthreads): where `limit_s` is
    exceeded, the least of a few runs counts.
    """
    least = float("inf")
    for _ in range(TRIES):
        before = os.times()
        done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=60, **options)
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        least = min(least, used)
        if least < limit_s:
            break
    return done, least
