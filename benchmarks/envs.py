"""Environments of the other frameworks, each a venv of its own under benchmarks/.envs, built when first asked for.

    python benchmarks/envs.py deepspeed megatron

Both frameworks install without their GPU dependencies: torch and the small packages that importing them needs come
first, then the framework alone. DeepSpeed compiles nothing here; it builds one small operation at its first start.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ENVS = Path(__file__).parent / ".envs"
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
BASE = ("torch", "numpy", "setuptools", "wheel")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A framework to compare with: what is installed, and the environment variables of its ranks."""

    package: str
    version: str
    needs: tuple[str, ...]
    install: Mapping[str, str] = field(default_factory=dict)
    run: Mapping[str, str] = field(default_factory=dict)


PEERS = {
    "deepspeed": Peer(
        package="deepspeed",
        version="0.19.8",
        needs=("einops", "hjson", "msgpack", "ninja", "packaging", "psutil", "py-cpuinfo", "pydantic", "tqdm"),
        install={"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
        run={"DS_ACCELERATOR": "cpu"},
    ),
    "megatron": Peer(package="megatron-core", version="0.16.1", needs=("packaging",)),
}


def python_of(name: str) -> Path:
    """The interpreter of a peer's environment."""
    return ENVS / name / "bin" / "python"


def build(name: str) -> Path:
    """Make the environment of a peer unless it is there already; returns its interpreter."""
    peer, python = PEERS[name], python_of(name)
    ready = ENVS / name / ".ready"
    if ready.exists() and ready.read_text() == peer.version:
        return python
    print(f"installing {peer.package} {peer.version} into {ENVS.name}/{name} (minutes)", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVS / name)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq", "install"]
    subprocess.run([*pip, "-c", str(CONSTRAINTS), *BASE, *peer.needs], check=True)
    alone = [*pip, "--no-deps", "--no-build-isolation", f"{peer.package}=={peer.version}"]
    subprocess.run(alone, check=True, env={**os.environ, **peer.install})
    ready.write_text(peer.version)
    return python


if __name__ == "__main__":
    for chosen in sys.argv[1:] or PEERS:
        print(build(chosen))
