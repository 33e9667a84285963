"""Command line of a rank: degrees, ZeRO level, and how many steps on which inputs."""

from __future__ import annotations

import argparse
from pathlib import Path


def rank_options() -> argparse.Namespace:
    """`data`, `tensor`, `pipeline`, `zero`, `inputs` (folder), `steps`, of which the first `warmup` do not count."""
    parser = argparse.ArgumentParser()
    for axis in ("data", "tensor", "pipeline"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--zero", type=int, default=0, choices=(0, 1, 2, 3))
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    return parser.parse_args()
