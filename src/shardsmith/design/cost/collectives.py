"""Collectives as latency plus bytes over the links that a group crosses, for any number of link levels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.kernels import Constants


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What a group of ranks gets from the links: bytes/s of each rank one way, seconds of one pass over all hops."""

    bandwidth: Array
    hops: Array


def reach(b: Batch, c: Constants, members: Array, stride: Array) -> Reach:
    """The slowest level that a ring of `members` ranks, `stride` apart, crosses, and its hops on every level.

    On a level above the first, every member inside one domain of the level below brings its own share of
    the links outwards: a ring that enters a node with four members leaves it over four network cards.
    A message goes round the members inside the innermost domain and up a tree of domains, as in the tuning
    model of NCCL (src/graph/tuning.cc at 01afd20).
    """
    span, share = members * stride, c["link_share"]
    bandwidth = b.level_bandwidth[0] * share
    inside = np.clip(b.level_size[0] / stride, 1.0, members)
    hops = b.level_latency[0] * (inside - 1.0)
    for level in range(1, len(b.level_size)):
        outward = np.minimum(b.level_bandwidth[level] * c["net_share"] * inside, bandwidth)
        bandwidth = np.where(span > b.level_size[level - 1], outward, bandwidth)
        wider = np.clip(b.level_size[level] / stride, 1.0, members)
        hops = hops + b.level_latency[level] * np.log2(np.maximum(wider / inside, 1.0))
        inside = wider
    return Reach(bandwidth=bandwidth, hops=c["latency"] * hops)


def one_way(b: Batch, c: Constants, members: Array, stride: Array, size: Array, calls: Array | float = 1.0) -> Array:
    """Seconds to gather or reduce-scatter `size` bytes (the whole) among `members` ranks; 0 for one rank."""
    r = reach(b, c, members, stride)
    moved = (members - 1.0) / members * size / r.bandwidth
    return np.where(members > 1, moved + calls * (c["call"] + r.hops), 0.0)


def all_reduce(b: Batch, c: Constants, members: Array, stride: Array, size: Array, calls: Array | float = 1.0) -> Array:
    """Seconds to all-reduce `size` bytes: a reduce-scatter and a gather in one call."""
    r = reach(b, c, members, stride)
    moved = 2.0 * (members - 1.0) / members * size / (c["all_reduce"] * r.bandwidth)
    return np.where(members > 1, moved + calls * (c["call"] + 2.0 * r.hops), 0.0)


def exposed(c: Constants, duration: Array, overlap: Array, hidden_under: Array) -> Array:
    """What is left of `duration` when the share `overlap` of it may run under `hidden_under` seconds of compute."""
    return duration - np.minimum(overlap * duration, hidden_under)
