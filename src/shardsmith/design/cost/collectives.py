"""Collectives as latency plus bytes over the links that a group crosses, for any number of link levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardsmith.design.cost.batch import Array
from shardsmith.design.cost.kernels import Constants


class Links(Protocol):
    """Link levels, innermost first, in a leading dim: what a Batch has, and any other set of layouts."""

    @property
    def level_size(self) -> Array:
        """Devices inside one domain."""

    @property
    def level_bandwidth(self) -> Array:
        """Nominal bytes/s of a device, one way."""

    @property
    def level_latency(self) -> Array:
        """Seconds a hop."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What a group of ranks gets from the links: bytes/s of each rank one way, seconds of a small message."""

    bandwidth: Array
    latency: Array


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that differ along one axis or two: `members`, `stride` ranks apart; and `more`, `more_stride` apart."""

    members: Array
    stride: Array
    more: Array | float = 1.0
    more_stride: Array | float = 1.0

    @property
    def size(self) -> Array:
        """Ranks of the group."""
        return self.members * self.more

    def inside(self, domain: Array) -> Array:
        """How many of them stand in one domain of `domain` neighbouring ranks."""
        return np.clip(domain / self.stride, 1.0, self.members) * np.clip(domain / self.more_stride, 1.0, self.more)


def reach(b: Links, c: Constants, group: Group) -> Reach:
    """The slowest level that a ring of the group's ranks crosses.

    On a level above the first, every member inside one domain of the level below brings its own share of
    the links outwards: a ring that enters a node with four members leaves it over four network cards.
    """
    share, size = c["link_share"], group.size
    bandwidth = b.level_bandwidth[0] * share
    latency = c["latency"] * b.level_latency[0]
    for level in range(1, len(b.level_size)):
        inside = group.inside(b.level_size[level - 1])
        crosses = inside < size
        outward = np.minimum(b.level_bandwidth[level] * c["net_share"] * inside, bandwidth)
        bandwidth = np.where(crosses, outward, bandwidth)
        latency = np.where(crosses, c["latency"] * b.level_latency[level], latency)
    return Reach(bandwidth=bandwidth, latency=latency * np.log2(np.maximum(size, 2.0)))


def one_way(b: Links, c: Constants, group: Group, size: Array, calls: Array | float = 1.0) -> Array:
    """Seconds to gather or reduce-scatter `size` bytes (the whole) among the group's ranks; 0 for one rank."""
    r, members = reach(b, c, group), group.size
    return np.where(members > 1, (members - 1.0) / members * size / r.bandwidth + calls * r.latency, 0.0)


def all_reduce(b: Links, c: Constants, group: Group, size: Array, calls: Array | float = 1.0) -> Array:
    """Seconds to all-reduce `size` bytes: a reduce-scatter and a gather in one call."""
    r, members = reach(b, c, group), group.size
    return np.where(members > 1, 2.0 * (members - 1.0) / members * size / r.bandwidth + calls * r.latency, 0.0)


def exposed(c: Constants, duration: Array, overlap: Array, hidden_under: Array) -> Array:
    """What is left of `duration` when the share `overlap` of it may run under `hidden_under` seconds of compute."""
    return duration - np.minimum(overlap * duration, hidden_under)
