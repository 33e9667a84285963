"""Stages: how many layers each holds, the slowest one, the bubble, and the hops between stages."""

from __future__ import annotations

import numpy as np

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.collectives import Group, reach
from shardsmith.design.cost.kernels import Constants


def stage_layers(b: Batch) -> tuple[Array, Array]:
    """Layers of the fullest rank, and of the rank that holds the head.

    Where layers + 2 divides evenly (`padded_stages`), embedding and head each take the place of a layer.
    """
    chunks = b.pipeline * b.stages_per_rank
    even = np.mod(b.layers, chunks) == 0
    padded = (b.padded_stages > 0) & ~even & (np.mod(b.layers + 2.0, chunks) == 0)
    fullest = np.maximum(np.ceil(b.layers / chunks - 1e-9) * b.stages_per_rank, b.layers / b.pipeline)
    fullest = np.where(padded, (b.layers + 2.0) / b.pipeline, fullest)
    last = np.where(padded, fullest - 1.0, np.where(even, b.layers / b.pipeline, np.floor(b.layers / b.pipeline)))
    return fullest, last


def hop(b: Batch, c: Constants) -> Array:
    """Seconds to hand one microbatch's activations to the next stage; 0 without a pipeline."""
    members = np.where(b.pipeline > 1, 2.0, 1.0)
    r = reach(b, c, Group(members=members, stride=b.pipeline_stride))
    split = np.where((b.sequence_parallel > 0) | (b.scatter_gather > 0), b.tensor, 1.0)
    size = b.microbatch * b.seq_len / b.context * b.hidden * 2.0 / split
    return np.where(b.pipeline > 1, size / r.bandwidth + r.hops + c["hop_latency"], 0.0)
