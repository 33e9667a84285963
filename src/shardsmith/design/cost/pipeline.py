"""Stages: how many layers each holds, the slowest one, the bubble, and the hops between stages."""

from __future__ import annotations

import numpy as np

from shardsmith.design.cost.batch import Array, Batch
from shardsmith.design.cost.collectives import Group, reach
from shardsmith.design.cost.kernels import Constants


def stage_layers(layers: Array, pipeline: Array, stages: Array, padded: Array | bool) -> tuple[Array, Array]:
    """Layers of the fullest rank, and of the rank that holds the head, where software spreads them evenly.

    Where layers + 2 divides evenly and `padded` is set, embedding and head each take the place of a layer.
    """
    chunks = pipeline * stages
    even = np.mod(layers, chunks) == 0
    slots = padded & ~even & (np.mod(layers + 2.0, chunks) == 0)
    fullest = np.maximum(np.ceil(layers / chunks - 1e-9) * stages, layers / pipeline)
    fullest = np.where(slots, (layers + 2.0) / pipeline, fullest)
    last = np.where(slots, fullest - 1.0, np.where(even, layers / pipeline, np.floor(layers / pipeline)))
    return fullest, last


def hop(b: Batch, c: Constants) -> Array:
    """Seconds to hand one microbatch's activations to the next stage; 0 without a pipeline."""
    members = np.where(b.pipeline > 1, 2.0, 1.0)
    r = reach(b, c, Group(members=members, stride=b.pipeline_stride))
    split = np.where((b.sequence_parallel > 0) | (b.scatter_gather > 0), b.tensor, 1.0)
    size = b.microbatch * b.seq_len / b.context * b.hidden * 2.0 / split
    return np.where(b.pipeline > 1, size / r.bandwidth + r.hops + c["hop_latency"], 0.0)
