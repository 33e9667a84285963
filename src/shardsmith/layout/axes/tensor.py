"""The tensor axis: every layer's matrices are cut between ranks that work on the same tokens.

Column-parallel projections (q, k, v, gate, up) cut dim 0, the outputs, by whole heads; row-parallel ones
(o, down) cut dim 1, the inputs, and their partial outputs are summed (Shoeybi et al. 2019). Embedding and
head cut the vocabulary. With sequence parallelism the parts between them, norms and residuals, keep
1/tensor of the sequence, and the sum becomes a reduce-scatter with an all-gather at the next projection
(Korthikanti et al. 2022).

Latent attention shares its two down-projections, which every rank computes, and cuts what follows them by heads:
latents and the rotated key enter together, in the place of the hidden states. Routed experts belong to the expert
axis; tensor ranks, which see the same tokens, route 1/tensor of them each, so that the router's gradient is
partial, and without sequence parallelism they gather the outputs.

Where key/value heads are fewer than ranks, `replicate_kv` splits the axis into kv_shard x kv_copy: rank t
holds head t // copies, and ranks with the same head sum its gradients, as each serves other query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardsmith.errors import Code, Fault
from shardsmith.layout.facts import CollectiveCount, CommKind, Shard
from shardsmith.layout.overlap import pieces
from shardsmith.plan.batch import batching, divisors
from shardsmith.plan.plan import Plan
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import Stage
from shardsmith.schedule import orders
from shardsmith.schedule.ir import Kind
from shardsmith.specs.model import ModelSpec, Role, Weight, weights
from shardsmith.units import DTYPE_BYTES, counted, format_bytes

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

NO_COPIES = Code(
    code="T208",
    title="replicate_kv has no effect",
    because="key/value heads are copied only where there are fewer of them than tensor ranks",
    severity="warning",
)

COLUMN: tuple[Role, ...] = ("q", "k", "v", "kv_up", "gate", "up")
KEY_VALUE: tuple[Role, ...] = ("k", "v")
ROW: tuple[Role, ...] = ("o", "down")
VOCABULARY: tuple[Role, ...] = ("embedding", "head")
ALWAYS_PARTIAL: tuple[Role, ...] = ("head_norm", "router")
"""Roles of tensors that every tensor rank holds and computes a part of the gradient of, whatever the plan."""


def tensor_dim(weight: Weight) -> int | None:
    """The dim of `weight` that the tensor axis cuts; None where every tensor rank holds all of it."""
    if weight.role in COLUMN or weight.role in VOCABULARY:
        return 0
    return 1 if weight.role in ROW and not weight.bias else None


def kv_copies(plan: Plan, model: ModelSpec) -> int:
    """How many tensor ranks hold the same key/value head: the size of the kv_copy groups, 1 without copies."""
    return plan.tensor // model.kv_heads if plan.replicate_kv and plan.tensor > model.kv_heads else 1


def tensor_shard(weight: Weight, tensor: int, coord: int, sequence_parallel: bool, kv_copies: int = 1) -> Shard:
    """The part of `weight` on tensor rank `coord` of `tensor`, of which `kv_copies` share each key/value head.

    Rows of the vocabulary go in contiguous chunks of ceil(V / tensor), so the last ranks have fewer, or
    none; every other dim that is cut divides evenly in a legal plan. The gain of a head norm is everywhere
    but serves each rank's own heads, so its gradient is always partial, as is that of a router, which sees
    other tokens on each rank; that of other tensors that are everywhere only where ranks see parts of the sequence.
    """
    dim = tensor_dim(weight)
    offsets, shape = [0] * len(weight.shape), list(weight.shape)
    copies = kv_copies if weight.role in KEY_VALUE else 1
    if dim is not None:
        offsets[dim], shape[dim] = chunk(weight.shape[dim], tensor // copies, coord // copies)
    return Shard(
        offsets=tuple(offsets),
        shape=tuple(shape),
        tensor_dim=dim if tensor > 1 else None,
        partial_over_tensor=tensor > 1 and dim is None and (sequence_parallel or weight.role in ALWAYS_PARTIAL),
        copy=coord % copies if copies > 1 else None,
    )


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, length) of chunk `index` where `size` is cut into `parts` chunks of ceil(size / parts)."""
    each = -(-size // parts)
    first = min(index * each, size)
    return first, min(first + each, size) - first


def activation_bytes(setup: Setup) -> int:
    """Bytes of one microbatch of hidden states [microbatch, seq_len / context, hidden], whole over tensor ranks."""
    work = setup.workload
    rows = batching(setup.plan, work).microbatch * work.seq_len // setup.plan.context
    return rows * setup.model.hidden * DTYPE_BYTES[work.dtype]


def tensor_collectives(setup: Setup, stage: Stage) -> list[CollectiveCount]:
    """The calls on the tensor axis for one stage and one step, without the sum of partial gradients.

    See `layer_calls` for those of a layer.
    """
    plan = setup.plan
    if plan.tensor == 1:
        return []
    batch = batching(plan, setup.workload)
    size, sp = activation_bytes(setup), plan.sequence_parallel

    def calls(kind: CommKind, purpose: str, per_microbatch: int, each: int = size) -> CollectiveCount:
        count = per_microbatch * batch.microbatches
        return CollectiveCount(axis="tensor", kind=kind, purpose=purpose, count=count, bytes=count * each)

    found = []
    if stage.embedding:
        found.append(calls("reduce_scatter" if sp else "all_reduce", "embedding_forward", 1))
        found.append(calls("all_gather", "embedding_backward", int(sp)))
    rows = size // setup.model.hidden
    for layer in stage.layers:
        for call in layer_calls(setup.model, layer, sequence_parallel=sp):
            cuts = pieces(setup, for_weights=call.for_weights)
            made = cuts + (_made_again(setup, call, cuts) if plan.recompute == "full" else 0)
            whole = calls(call.kind, f"layer_{call.phase}", made)
            found.append(replace(whole, bytes=whole.count * rows * call.width // cuts))
    if stage.head:
        found.append(calls("all_gather", "head_forward", int(sp)))
        found.append(calls("reduce_scatter" if sp else "all_reduce", "head_backward", 1))
        found.append(calls("all_gather", "head_backward", int(sp)))
        if sp and plan.loss_chunk is not None:
            # Logits are made again for the input gradient, and once more where the weight gradient waits.
            apart = split_backwards(setup, stage)
            found.append(replace(calls("all_gather", "head_backward", 0), count=apart, bytes=apart * size))
        # Logits are softmaxed in float32 or wider: the largest per token, then sum of exponentials and target logit.
        tokens = batch.microbatch * setup.workload.seq_len // plan.context
        wide = DTYPE_BYTES[precision(plan, setup.workload).grad]
        chunks = 1 if plan.loss_chunk is None else -(-tokens // plan.loss_chunk)
        # By chunks, target logit and sum of exponentials go one after the other.
        sums = 1 if plan.loss_chunk is None else 2 * chunks
        found.append(replace(calls("all_reduce", "loss_max", chunks), bytes=batch.microbatches * tokens * wide))
        found.append(replace(calls("all_reduce", "loss_sums", sums), bytes=batch.microbatches * 2 * tokens * wide))
    return found


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """One call in one layer and microbatch, whose payload is the whole sequence in `width` channels.

    `recomputed`: a layer that is recomputed in backward makes the call once more. It stops ahead of its closing
    sum, which no saved tensor depends on. `for_weights`: it gathers an input again for the weight gradient.
    """

    kind: CommKind
    phase: Literal["forward", "backward"]
    width: int
    recomputed: bool = False
    for_weights: bool = False


def _made_again(setup: Setup, call: LayerCall, cuts: int) -> int:
    """Pieces of a call, which is cut into `cuts`, that a recomputed layer makes once more.

    With chunks the closing sum is made inside the product that it closes, which is made again, and with dropout ahead
    of a mask that is. Of two halves the first one's closing sum lies ahead of the second one's last product.
    """
    if call.recomputed:
        return cuts
    closing = call.phase == "forward"
    if closing and ("chunks" in setup.plan.overlap or setup.model.dropout):
        return cuts
    return int(closing and "half_microbatches" in setup.plan.overlap)


def layer_calls(model: ModelSpec, layer: int, *, sequence_parallel: bool) -> list[LayerCall]:
    """The calls on the tensor axis of `layer`, forward and backward.

    Per block half one sum forward and one backward. Under sequence parallelism the forward has an all-gather
    and a reduce-scatter; the backward has a reduce-scatter and two all-gathers, as the sharded inputs are what is
    saved, and they are gathered again for the weight gradients. Latents are small: gathered once, they are kept.
    """
    sp, hidden = sequence_parallel, model.hidden
    found = _latent_enter(model, sp) if model.latent else _enter(hidden, sp)
    found += _leave(hidden, sp, recomputed=True)
    if not model.is_sparse(layer):
        return found + _enter(hidden, sp) + _leave(hidden, sp, recomputed=False)
    assert model.experts is not None, "a sparse layer has experts"
    if model.experts.shared_ffn:
        # The shared expert's sum lies ahead of the routed experts' outputs, which are saved.
        found += _enter(hidden, sp) + _leave(hidden, sp, recomputed=True)
    if not sp:
        found.append(LayerCall(kind="all_gather", phase="forward", width=hidden))
        found.append(LayerCall(kind="all_gather", phase="backward", width=hidden))
    return found


def _enter(width: int, sp: bool) -> list[LayerCall]:
    if not sp:
        return [LayerCall(kind="all_reduce", phase="backward", width=width)]
    return [
        LayerCall(kind="all_gather", phase="forward", width=width, recomputed=True),
        LayerCall(kind="reduce_scatter", phase="backward", width=width),
        LayerCall(kind="all_gather", phase="backward", width=width, for_weights=True),
    ]


def _leave(width: int, sp: bool, *, recomputed: bool) -> list[LayerCall]:
    if not sp:
        return [LayerCall(kind="all_reduce", phase="forward", width=width, recomputed=recomputed)]
    return [
        LayerCall(kind="reduce_scatter", phase="forward", width=width, recomputed=recomputed),
        LayerCall(kind="all_gather", phase="backward", width=width),
    ]


def _latent_enter(model: ModelSpec, sp: bool) -> list[LayerCall]:
    """Latents and the rotated key enter together; queries that have no latent by themselves."""
    latent = model.latent
    assert latent is not None, "only for latent attention"
    width = (latent.q_rank or 0) + latent.kv_rank + latent.rope
    if not sp:
        found = [LayerCall(kind="all_reduce", phase="backward", width=width)]
    else:
        found = [
            LayerCall(kind="all_gather", phase="forward", width=width, recomputed=True),
            LayerCall(kind="reduce_scatter", phase="backward", width=width),
        ]
    return found if latent.q_rank else found + _enter(model.hidden, sp)


def split_backwards(setup: Setup, stage: Stage) -> int:
    """How many microbatches' logits are made again for the head's gradient alone, which a split backward puts off.

    None where ZeRO shards weights: the head's gradient is then made while the head is whole.
    """
    if setup.plan.zero == 3:
        return 0
    order = orders.build(
        setup.plan.schedule,
        pipeline=setup.plan.pipeline,
        microbatches=batching(setup.plan, setup.workload).microbatches,
        stages_per_rank=setup.plan.stages_per_rank,
    )
    return sum(a.kind is Kind.I and a.stage == stage.index for a in order.ranks[stage.rank])


def partial_gradients(setup: Setup, shards: Sequence[Shard]) -> list[CollectiveCount]:
    """The calls of a step, one each, that sum what ranks hold in parts of all `shards` (rows) of a rank.

    Over the tensor axis go the gradients of tensors that are everywhere, over the kv_copy groups those of
    copied key/value heads.
    """
    width = DTYPE_BYTES[precision(setup.plan, setup.workload).grad]

    def sums(purpose: str, elements: int) -> CollectiveCount:
        count, size = int(elements > 0), elements * width
        return CollectiveCount(axis="tensor", kind="all_reduce", purpose=purpose, count=count, bytes=size)

    return [
        sums("partial_gradients", sum(s.numel for s in shards if s.partial_over_tensor)),
        sums("kv_copies", sum(s.numel for s in shards if s.copy is not None)),
    ]


def tensor_faults(setup: Setup) -> list[Fault]:
    """What the tensor degree breaks, each with the nearest legal degrees."""
    plan, model, faults = setup.plan, setup.model, []
    for size in sizes(model):
        if size.misfit(plan.tensor, plan.replicate_kv):
            message = f"tensor = {plan.tensor} does not divide {size}"
            copies = copies_hint(setup) if size.key == "kv_heads" else ""
            hint = ", or ".join(words for words in (_degree_hint(setup), copies) if words)
            owner = (setup.origin(f"model.{size.key.split('.')[0]}"), f"{size.key} = {size.value}")
            faults.append(size.code.fault(message, *setup.said("plan.tensor"), owner, hint=hint))
    each, seq_len = plan.tensor * plan.context, setup.workload.seq_len
    if plan.sequence_parallel and seq_len % each:
        near = " or ".join(str(s) for s in (seq_len - seq_len % each, seq_len - seq_len % each + each) if s)
        axes = f"tensor = {each}" if plan.context == 1 else f"tensor x context = {plan.tensor} x {plan.context}"
        message = f"{axes} does not divide seq_len = {seq_len}"
        said = setup.said("plan.tensor", "plan.sequence_parallel", "workload.seq_len")
        faults.append(SEQUENCE.fault(message, *said, hint=f"seq_len = {near}, or sequence_parallel = false"))
    if plan.sequence_parallel and plan.tensor == 1:
        said = setup.said("plan.sequence_parallel", "plan.tensor")
        faults.append(NO_EFFECT.fault("sequence_parallel = true, but tensor = 1", *said, hint="tensor = 2 or more"))
    if plan.replicate_kv and plan.tensor <= model.kv_heads:
        said = setup.said("plan.replicate_kv", "plan.tensor", "model.kv_heads")
        heads = counted(model.kv_heads, "key/value head")
        message = f"replicate_kv = true, but tensor = {plan.tensor} is no more than {heads}"
        faults.append(NO_COPIES.fault(message, *said, hint="replicate_kv = false"))
    return faults


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size of a model that the tensor degree must divide: where it stands, its value, and what it counts."""

    code: Code
    key: str
    value: int
    what: str
    of: str = ""

    def __str__(self) -> str:
        return counted(self.value, self.what) + self.of

    def misfit(self, degree: int, replicate_kv: bool) -> bool:
        """Whether it cannot be cut into `degree` parts, nor key/value heads be copied."""
        copied = self.key == "kv_heads" and replicate_kv and degree % self.value == 0
        return self.value % degree != 0 and not copied


def sizes(model: ModelSpec) -> list[Size]:
    """Everything that the tensor axis cuts evenly: heads, and the width of the MLPs that the model has."""
    found = [
        Size(code=HEADS, key="heads", value=model.heads, what="attention head"),
        Size(code=KV_HEADS, key="kv_heads", value=model.kv_heads, what="key/value head"),
    ]
    if not all(model.is_sparse(layer) for layer in range(model.layers)):
        found.append(Size(code=FFN, key="ffn", value=model.ffn, what="column", of=" of the MLP"))
    if model.experts is not None and model.experts.shared_ffn:
        width = model.experts.shared_ffn
        found.append(Size(code=FFN, key="experts.shared_ffn", value=width, what="column", of=" of the shared expert"))
    return found


def _degree_hint(setup: Setup) -> str:
    legal = model_degrees(setup.model, replicate_kv=setup.plan.replicate_kv)
    below = [d for d in legal if d < setup.plan.tensor]
    above = [d for d in legal if d > setup.plan.tensor]
    near = [str(d) for d in (*below[-1:], *above[:1])]
    return f"tensor = {' or '.join(near)} ({setup.model.name} allows {', '.join(map(str, legal))})"


def copies_hint(setup: Setup) -> str:
    """What copying key/value heads would cost, where that makes the degree legal."""
    plan, model = setup.plan, setup.model
    if _reasons(model, plan.tensor, replicate_kv=True):
        return ""
    layer = sum(w.numel for w in weights(model) if w.role in KEY_VALUE and w.layer == 0)
    more = layer / model.kv_heads - layer / plan.tensor
    size = int(more * -(-model.layers // plan.pipeline) * DTYPE_BYTES[precision(plan, setup.workload).param])
    return f"replicate_kv = true (+{format_bytes(size)} of weights a rank)"


def model_degrees(model: ModelSpec, *, replicate_kv: bool = False) -> tuple[int, ...]:
    """Every tensor degree that `model` can be cut into, ascending; there is always 1."""
    return tuple(d for d in divisors(model.heads) if not _reasons(model, d, replicate_kv=replicate_kv))


@dataclass(frozen=True, kw_only=True)
class TensorDegrees:
    """Tensor degrees on a number of devices: the `legal` ones, and why each other divisor is `rejected`."""

    legal: tuple[int, ...]
    rejected: dict[int, str]


def legal_tensor_degrees(model: ModelSpec, devices: int, *, replicate_kv: bool = False) -> TensorDegrees:
    """Which of the degrees that divide `devices` satisfy all rules of `model` at once, and why the others do not."""
    reasons = {degree: _reasons(model, degree, replicate_kv=replicate_kv) for degree in divisors(devices)}
    return TensorDegrees(
        legal=tuple(d for d, why in reasons.items() if not why),
        rejected={d: "; ".join(why) for d, why in reasons.items() if why},
    )


def _reasons(model: ModelSpec, degree: int, *, replicate_kv: bool = False) -> list[str]:
    misfits = [size for size in sizes(model) if size.misfit(degree, replicate_kv)]
    return [f"{degree} does not divide {size}" for size in misfits]
