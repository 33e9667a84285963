"""The Plan: how a model is split over devices, in one frozen object."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

PLAIN = re.compile(r"[^\s,\"\\\x00-\x1f\x7f-\x9f]*")
"""Text that the one-line form writes as it is; any other text stands in quotes, as JSON writes it."""

Schedule = str
StorageDtype = Literal["float64", "float32", "bfloat16", "float16"]
Overlap = Literal["half_microbatches", "weight_gradient", "chunks"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Degrees of every axis, and how each axis works.

    Identities: world = pipeline x data x context x tensor; data = replicate x shard;
    global_batch = data x microbatch x microbatches (state two of the last three: the third follows).
    `microbatch` counts sequences, `bucket_mb` is in MiB, `layers` lists the transformer layers of
    each global stage (None: even; "weighed": embedding and head count, see `plan.stages`). A dtype of
    None follows the workload (parameters) or accumulates in float32.
    """

    data: int = 1
    replicate: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    ulysses: int = 1
    expert: int = 1
    expert_tensor: int = 1
    order: str = "tensor-context-data-pipeline"
    zero: Literal[0, 1, 2, 3] = 0
    zero_gather: Literal["per_pass", "per_step"] = "per_pass"
    bucket_mb: float = 25.0
    param_dtype: StorageDtype | None = None
    grad_dtype: StorageDtype | None = None
    reduce_dtype: StorageDtype | None = None
    optimizer_dtype: StorageDtype | None = None
    schedule: Schedule = "one_f_one_b"
    stages_per_rank: int | None = None
    layers: tuple[int, ...] | Literal["weighed"] | None = None
    microbatch: int | None = None
    microbatches: int | None = None
    sequence_parallel: bool = False
    replicate_kv: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    overlap: tuple[Overlap, ...] = ()
    capacity_factor: float | None = None
    compile: bool = False
    loss_chunk: int | None = None

    @property
    def world(self) -> int:
        """Number of ranks: pipeline x data x context x tensor."""
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def shard(self) -> int:
        """Data ranks over which ZeRO shards: data / replicate."""
        return self.data // self.replicate

    def with_(self, **changes: Any) -> Plan:
        """A copy with `changes` applied."""
        return replace(self, **changes)

    def stated(self) -> dict[str, Any]:
        """The fields that differ from their defaults, by name: what the one-line form prints."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def __str__(self) -> str:
        return ",".join(f"{k}={_text(v)}" for k, v in self.stated().items())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "+".join(str(v) for v in value)
    if isinstance(value, str) and not PLAIN.fullmatch(value):
        return json.dumps(value)
    return str(value)
