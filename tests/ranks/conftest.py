"""Ranks for tests: forked from this process, which has imported torch but never trains anything itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardsmith.engine.runtime.forked import run_forked

# comparisons in the parent must not start a pool of threads: it would not survive the next fork
torch.set_num_threads(1)


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`run_ranks(world, function, *args, timeout=60)`: the results of `function(*args)` on `world` gloo ranks."""

    def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        return run_forked(function, world, *args, timeout_s=timeout)

    return run
