"""The tensor axis: every layer's matrices are cut between ranks that work on the same tokens.

Column-parallel projections (q, k, v, gate, up) cut dim 0, the outputs, by whole heads; row-parallel ones
(o, down) cut dim 1, the inputs, and their partial outputs are summed (Shoeybi et al. 2019). Embedding and
head cut the vocabulary. With sequence parallelism the parts between them, norms and residuals, keep
1/tensor of the sequence, and the sum becomes a reduce-scatter with an all-gather at the next projection
(Korthikanti et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardsmith.errors import Code, Fault
from shardsmith.layout.facts import CollectiveCount, CommKind, Shard
from shardsmith.plan.batch import batching, divisors
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import Stage
from shardsmith.specs.model import ModelSpec, Role, Weight
from shardsmith.units import DTYPE_BYTES

HEADS = Code(
    code="T203",
    title="tensor does not divide the attention heads",
    because="each tensor rank computes whole attention heads",
)
KV_HEADS = Code(
    code="T204",
    title="tensor does not divide the key/value heads",
    because="each tensor rank owns whole key/value heads",
)
FFN = Code(
    code="T205",
    title="tensor does not divide the MLP width",
    because="each tensor rank computes an equal share of the MLP's inner width",
)
SEQUENCE = Code(
    code="T206",
    title="tensor does not divide the sequence under sequence parallelism",
    because="with sequence_parallel each tensor rank keeps an equal share of the sequence between the projections",
)
NO_EFFECT = Code(
    code="T207",
    title="sequence_parallel has no effect",
    because="it cuts the sequence over the tensor axis, and that axis has one rank",
    severity="warning",
)

COLUMN: tuple[Role, ...] = ("q", "k", "v", "gate", "up")
ROW: tuple[Role, ...] = ("o", "down")
VOCABULARY: tuple[Role, ...] = ("embedding", "head")


def tensor_dim(weight: Weight) -> int | None:
    """The dim of `weight` that the tensor axis cuts; None where every tensor rank holds all of it."""
    if weight.role in COLUMN or weight.role in VOCABULARY:
        return 0
    return 1 if weight.role in ROW and not weight.bias else None


def tensor_shard(weight: Weight, tensor: int, coord: int, sequence_parallel: bool) -> Shard:
    """The part of `weight` on tensor rank `coord` of `tensor`.

    Rows of the vocabulary go in contiguous chunks of ceil(V / tensor), so the last ranks have fewer, or
    none; every other dim that is cut divides evenly in a legal plan.
    """
    dim = tensor_dim(weight)
    offsets, shape = [0] * len(weight.shape), list(weight.shape)
    if dim is not None:
        offsets[dim], shape[dim] = chunk(weight.shape[dim], tensor, coord)
    return Shard(
        offsets=tuple(offsets),
        shape=tuple(shape),
        tensor_dim=dim if tensor > 1 else None,
        partial_over_tensor=sequence_parallel and tensor > 1 and dim is None,
    )


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, length) of chunk `index` where `size` is cut into `parts` chunks of ceil(size / parts)."""
    each = -(-size // parts)
    first = min(index * each, size)
    return first, min(first + each, size) - first


def activation_bytes(setup: Setup) -> int:
    """Bytes of one microbatch of hidden states [microbatch, seq_len, hidden], all of the sequence."""
    work = setup.workload
    rows = batching(setup.plan, work).microbatch * work.seq_len
    return rows * setup.model.hidden * DTYPE_BYTES[work.dtype]


def tensor_collectives(setup: Setup, stage: Stage) -> list[CollectiveCount]:
    """The calls on the tensor axis for one stage and one step, without the sum of partial gradients.

    Per layer two sums forward and two backward. Under sequence parallelism the forward has two
    all-gathers and two reduce-scatters; the backward has two reduce-scatters and four all-gathers, as the
    sharded inputs are what is saved, and they are gathered again for the weight gradients.
    """
    plan = setup.plan
    if plan.tensor == 1:
        return []
    batch = batching(plan, setup.workload)
    size, sp = activation_bytes(setup), plan.sequence_parallel

    def calls(kind: CommKind, purpose: str, per_microbatch: int, each: int = size) -> CollectiveCount:
        count = per_microbatch * batch.microbatches
        return CollectiveCount(axis="tensor", kind=kind, purpose=purpose, count=count, bytes=count * each)

    found, layers = [], len(stage.layers)
    if stage.embedding:
        found.append(calls("reduce_scatter" if sp else "all_reduce", "embedding_forward", 1))
        found.append(calls("all_gather", "embedding_backward", int(sp)))
    if sp:
        found += [
            calls("all_gather", "layer_forward", 2 * layers),
            calls("reduce_scatter", "layer_forward", 2 * layers),
        ]
        found += [
            calls("all_gather", "layer_backward", 4 * layers),
            calls("reduce_scatter", "layer_backward", 2 * layers),
        ]
    else:
        found += [calls("all_reduce", "layer_forward", 2 * layers), calls("all_reduce", "layer_backward", 2 * layers)]
    if stage.head:
        found.append(calls("all_gather", "head_forward", int(sp)))
        found.append(calls("reduce_scatter" if sp else "all_reduce", "head_backward", 1))
        found.append(calls("all_gather", "head_backward", int(sp)))
        # Logits are softmaxed in float32 or wider: the largest per token, then sum of exponentials and target logit.
        tokens = batch.microbatch * setup.workload.seq_len
        wide = DTYPE_BYTES[precision(plan, setup.workload).grad]
        found.append(calls("all_reduce", "loss_max", 1, tokens * wide))
        found.append(calls("all_reduce", "loss_sums", 1, 2 * tokens * wide))
    return found


def partial_gradients(setup: Setup, elements: int) -> list[CollectiveCount]:
    """The one call a step that sums a rank's `elements` of partial gradients over the tensor axis."""
    size = elements * DTYPE_BYTES[precision(setup.plan, setup.workload).grad]
    count = int(elements > 0)
    return [CollectiveCount(axis="tensor", kind="all_reduce", purpose="partial_gradients", count=count, bytes=size)]


def tensor_faults(setup: Setup) -> list[Fault]:
    """What the tensor degree breaks, each with the nearest legal degrees."""
    plan, model, faults = setup.plan, setup.model, []
    for code, key, what in _DIVIDES:
        size = getattr(model, key)
        copies = key == "kv_heads" and plan.replicate_kv and plan.tensor % size == 0
        if size % plan.tensor and not copies:
            message = f"tensor = {plan.tensor} does not divide {size} {what}"
            faults.append(code.fault(message, *setup.said("plan.tensor", f"model.{key}"), hint=_degree_hint(setup)))
    if plan.sequence_parallel and setup.workload.seq_len % plan.tensor:
        each, seq_len = plan.tensor, setup.workload.seq_len
        near = " or ".join(str(s) for s in (seq_len - seq_len % each, seq_len - seq_len % each + each) if s)
        message = f"tensor = {each} does not divide seq_len = {seq_len}"
        said = setup.said("plan.tensor", "plan.sequence_parallel", "workload.seq_len")
        faults.append(SEQUENCE.fault(message, *said, hint=f"seq_len = {near}, or sequence_parallel = false"))
    if plan.sequence_parallel and plan.tensor == 1:
        said = setup.said("plan.sequence_parallel", "plan.tensor")
        faults.append(NO_EFFECT.fault("sequence_parallel = true, but tensor = 1", *said, hint="tensor = 2 or more"))
    return faults


_DIVIDES = (
    (HEADS, "heads", "attention heads"),
    (KV_HEADS, "kv_heads", "key/value heads"),
    (FFN, "ffn", "columns of the MLP"),
)


def _degree_hint(setup: Setup) -> str:
    legal = model_degrees(setup.model)
    below = [d for d in legal if d < setup.plan.tensor]
    above = [d for d in legal if d > setup.plan.tensor]
    near = [str(d) for d in (*below[-1:], *above[:1])]
    return f"tensor = {' or '.join(near)} ({setup.model.name} allows {', '.join(map(str, legal))})"


def model_degrees(model: ModelSpec) -> tuple[int, ...]:
    """Every tensor degree that `model` can be cut into, ascending; there is always 1."""
    return tuple(d for d in divisors(model.heads) if not _reasons(model, d))


@dataclass(frozen=True, kw_only=True)
class TensorDegrees:
    """Tensor degrees on a number of devices: the `legal` ones, and why each other divisor is `rejected`."""

    legal: tuple[int, ...]
    rejected: dict[int, str]


def legal_tensor_degrees(model: ModelSpec, devices: int) -> TensorDegrees:
    """Which of the degrees that divide `devices` satisfy all rules of `model` at once, and why the others do not."""
    reasons = {degree: _reasons(model, degree) for degree in divisors(devices)}
    return TensorDegrees(
        legal=tuple(d for d, why in reasons.items() if not why),
        rejected={d: "; ".join(why) for d, why in reasons.items() if why},
    )


def _reasons(model: ModelSpec, degree: int) -> list[str]:
    sizes = [(getattr(model, key), what) for _, key, what in _DIVIDES]
    return [f"{degree} does not divide {size} {what}" for size, what in sizes if size % degree]
