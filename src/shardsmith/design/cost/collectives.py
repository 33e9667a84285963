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
    """What a group of ranks gets from the links: bytes/s of each rank one way, seconds of one pass over all hops.

    `tree` is that pass where small messages go up a tree of ranks on every level, one hop a doubling.
    """

    bandwidth: Array
    hops: Array
    tree: Array


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
    """The slowest level that a ring of the group's ranks crosses, and its hops on every level.

    On a level above the first, every member inside one domain of the level below brings its own share of
    the links outwards: a ring that enters a node with four members leaves it over four network cards.
    A message goes round the members inside the innermost domain and up a tree of domains, as in the tuning
    model of NCCL (src/graph/tuning.cc at 01afd20).
    """
    share, size = c["link_share"], group.size
    bandwidth = b.level_bandwidth[0] * share
    inside = group.inside(b.level_size[0])
    hops, tree = b.level_latency[0] * (inside - 1.0), b.level_latency[0] * np.log2(inside)
    for level in range(1, len(b.level_size)):
        outward = np.minimum(b.level_bandwidth[level] * c["net_share"] * inside, bandwidth)
        bandwidth = np.where(inside < size, outward, bandwidth)
        wider = group.inside(b.level_size[level])
        upwards = b.level_latency[level] * np.log2(np.maximum(wider / inside, 1.0))
        hops, tree, inside = hops + upwards, tree + upwards, wider
    return Reach(bandwidth=bandwidth, hops=c["latency"] * hops, tree=c["latency"] * tree)


def one_way(b: Links, c: Constants, group: Group, size: Array, calls: Array | float = 1.0) -> Array:
    """Seconds to gather or reduce-scatter `size` bytes (the whole) among the group's ranks; 0 for one rank."""
    r, members = reach(b, c, group), group.size
    moved = (members - 1.0) / members * size / r.bandwidth
    return np.where(members > 1, moved + calls * (c["call"] + r.hops), 0.0)


def all_reduce(b: Links, c: Constants, group: Group, size: Array, calls: Array | float = 1.0) -> Array:
    """Seconds to all-reduce `size` bytes: a reduce-scatter and a gather in one call."""
    r, members = reach(b, c, group), group.size
    moved = 2.0 * (members - 1.0) / members * size / (c["all_reduce"] * r.bandwidth)
    return np.where(members > 1, moved + calls * (c["call"] + 2.0 * r.hops), 0.0)


def small_all_reduce(b: Links, c: Constants, group: Group, size: Array) -> Array:
    """Seconds to all-reduce a message so small that one kernel of a captured graph does it: a tree, no call."""
    r, members = reach(b, c, group), group.size
    moved = 2.0 * (members - 1.0) / members * size / (c["all_reduce"] * r.bandwidth)
    return np.where(members > 1, moved + r.tree, 0.0)


def exposed(c: Constants, duration: Array, overlap: Array, hidden_under: Array) -> Array:
    """What is left of `duration` when the share `overlap` of it may run under `hidden_under` seconds of compute."""
    return duration - np.minimum(overlap * duration, hidden_under)
