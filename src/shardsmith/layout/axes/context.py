"""The context axis: ranks hold parts of the same sequences, and attention brings the parts together.

Everything but attention works on single tokens, so cutting the sequence costs nothing there. A rank holds two
chunks of 2 x context, one from the head of the sequence and its mirror image from the tail, so that under a causal
mask all ranks have the same number of query-key pairs (zig-zag). Attention meets the other parts in two ways, which
combine: context = ring x ulysses. In a *ring* keys and values travel from rank to rank while queries stay, and partial
results are merged by their log-sum-exps (Liu et al. 2023). *Ulysses* exchanges heads for sequence, so that a
rank has fewer heads of longer parts (Jacobs et al. 2023). Ulysses ranks are neighbours: it moves more at a time and
cannot hide it. Weights are whole on every rank, each with the gradient of its tokens: ZeRO shards over data.shard x
context, and gradients are summed over data x context.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from shardsmith.errors import Code, Fault
from shardsmith.layout.facts import CollectiveCount, CommKind
from shardsmith.plan.batch import batching, divisors
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import Stage
from shardsmith.specs.model import ModelSpec
from shardsmith.units import DTYPE_BYTES, counted

if TYPE_CHECKING:
    from shardsmith.layout.key_blocks import Blocks

ULYSSES = Code(
    code="C201",
    title="ulysses does not divide context",
    because="the context axis is cut in two: context = ring x ulysses",
)
CHUNKS = Code(
    code="C202",
    title="the sequence cannot be cut into equal chunks",
    because="each context rank holds two of 2 x context equal chunks, from the head and the tail of the sequence",
)
ULYSSES_HEADS = Code(
    code="C203",
    title="ulysses does not divide the attention heads of a tensor rank",
    because="each of the ulysses ranks computes whole attention heads, and equally many of them",
)
ULYSSES_KV_HEADS = Code(
    code="C204",
    title="ulysses fits no key/value heads of a tensor rank",
    because="each of the ulysses ranks gets whole key/value heads, or each head goes to equally many of them",
)


def places(seq_len: int, context: int, index: int) -> tuple[range, range]:
    """The places in the sequence that context rank `index` holds, in order: a chunk of the head, one of the tail.

    >>> places(8, 2, 0)
    (range(0, 2), range(6, 8))
    """
    assert seq_len % (2 * context) == 0, f"{seq_len} tokens cannot be cut into 2 x {context} chunks"
    chunk = seq_len // (2 * context)
    mirrored = 2 * context - 1 - index
    return range(index * chunk, (index + 1) * chunk), range(mirrored * chunk, (mirrored + 1) * chunk)


def ring(plan: Plan) -> int:
    """Ranks around which keys and values travel: context / ulysses."""
    return plan.context // plan.ulysses


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Query and key/value heads of a tensor rank as attention on the context axis sees them.

    `sent` key/value heads enter the exchange of Ulysses: where there are fewer than ranks, each goes to several.
    """

    query: int
    key_value: int
    sent: int


def heads_of(plan: Plan, model: ModelSpec) -> Heads:
    """The heads of one tensor rank of a legal plan; key/value heads fewer than ranks are copied, one a rank."""
    key_value = max(1, model.kv_heads // plan.tensor)
    return Heads(query=model.heads // plan.tensor, key_value=key_value, sent=max(key_value, plan.ulysses))


def local_rows(setup: Setup) -> int:
    """Tokens of one microbatch on one context rank: microbatch x seq_len / context."""
    work = setup.workload
    return batching(setup.plan, work).microbatch * work.seq_len // setup.plan.context


def key_value_bytes(setup: Setup) -> int:
    """Bytes of one message of the ring: the keys and values of one rank's tokens, all heads that it has."""
    plan, model, work = setup.plan, setup.model, setup.workload
    return 2 * local_rows(setup) * heads_of(plan, model).sent * model.head_dim * DTYPE_BYTES[work.dtype]


def ring_buffer_bytes(setup: Setup) -> int:
    """Bytes that the ring keeps beside a layer's activations in backward, at most.

    Two parts of keys and values (one in use, one arriving), and four of their gradients in float32 or wider (this
    rank's own, one being made, one leaving, one arriving). What a kernel makes for one block is not counted.
    """
    if ring(setup.plan) == 1:
        return 0
    size, work = key_value_bytes(setup), setup.workload
    return 2 * size + 4 * size * _wide(setup) // DTYPE_BYTES[work.dtype]


def ring_blocks(setup: Setup, index: int) -> list[Blocks]:
    """What context rank `index` computes against the keys of each rank of the ring, where nothing is packed.

    Rows are those that it holds once heads are exchanged for sequence.
    """
    from shardsmith.layout.key_blocks import key_blocks  # brings numpy, which a refusal need not wait for

    ranks, length, window = ring(setup.plan), setup.workload.seq_len, setup.model.window
    held = [places(length, ranks, at) for at in range(ranks)]
    return key_blocks(held, index // setup.plan.ulysses, None, None if window is None or window >= length else window)


def context_collectives(setup: Setup, stage: Stage) -> list[CollectiveCount]:
    """The calls on the context axis for one stage and one step.

    Per layer and microbatch Ulysses exchanges queries, keys and values together, then the output; backward the
    output's gradient, then those of all three. The ring passes keys and values on ring - 1 times forward and
    as often again backward, and with them their gradients in float32 or wider, as these are sums. A layer
    recomputed in backward communicates forward once more. Halves of microbatches communicate each for itself.
    """
    plan, model, work = setup.plan, setup.model, setup.workload
    halves = 2 if "half_microbatches" in plan.overlap else 1
    per_step = len(stage.layers) * batching(plan, work).microbatches * halves
    heads, hops = heads_of(plan, model), ring(plan) - 1
    head = local_rows(setup) * model.head_dim * DTYPE_BYTES[work.dtype]
    passes = 1 + int(plan.recompute == "full")
    found: list[CollectiveCount] = []

    def calls(kind: CommKind, purpose: str, times: int, size: int) -> None:
        count = times * per_step
        bytes_ = count * size // halves
        found.append(CollectiveCount(axis="context", kind=kind, purpose=purpose, count=count, bytes=bytes_))

    if plan.ulysses > 1:
        joined, out = (heads.query + 2 * heads.sent) * head, heads.query * head
        for purpose, times in (("heads_forward", passes), ("heads_backward", 1)):
            calls("all_to_all", purpose, times, joined)
            calls("all_to_all", purpose, times, out)
    for kind in ("send", "receive"):
        size = key_value_bytes(setup)
        calls(kind, "keys_values_forward", passes * hops, size)
        calls(kind, "keys_values_backward", hops, size)
        calls(kind, "keys_values_gradients", hops, size * _wide(setup) // DTYPE_BYTES[work.dtype])
    return found


def _wide(setup: Setup) -> int:
    """Bytes of a number in the dtype in which gradients of keys and values are summed: float32 or wider."""
    return max(DTYPE_BYTES[setup.workload.dtype], DTYPE_BYTES["float32"])


def context_faults(setup: Setup) -> list[Fault]:
    """What the degrees of the context axis break; sequence parallelism over tensor ranks cuts what is left."""
    plan, faults = setup.plan, []
    if plan.context % plan.ulysses:
        message = f"ulysses = {plan.ulysses} does not divide context = {plan.context}"
        hint = "ulysses = one of " + ", ".join(map(str, divisors(plan.context)))
        faults.append(ULYSSES.fault(message, *setup.said("plan.ulysses", "plan.context"), hint=hint))
    if plan.context > 1 and setup.workload.seq_len % (2 * plan.context):
        faults.append(_chunks_fault(setup))
    return faults if plan.context % plan.ulysses else [*faults, *_head_faults(setup)]


def _chunks_fault(setup: Setup) -> Fault:
    plan, seq_len = setup.plan, setup.workload.seq_len
    each = plan.context * (lcm(2, plan.tensor) if plan.sequence_parallel else 2)
    near = [s for s in (seq_len - seq_len % each, seq_len - seq_len % each + each) if s]
    legal = [d for d in range(1, plan.context) if seq_len % (2 * d) == 0 and d % plan.ulysses == 0]
    hints = [f"seq_len = {' or '.join(map(str, near))} (shorter documents pack into it)"]
    hints += [f"context = {legal[-1]}"] if legal else []
    message = f"2 x context = {2 * plan.context} does not divide seq_len = {seq_len}"
    return CHUNKS.fault(message, *setup.said("plan.context", "workload.seq_len"), hint=", or ".join(hints))


def _head_faults(setup: Setup) -> list[Fault]:
    plan, model = setup.plan, setup.model
    uneven = model.kv_heads % plan.tensor and plan.tensor % model.kv_heads
    if plan.ulysses == 1 or model.heads % plan.tensor or uneven:
        return []  # heads that tensor does not divide are the tensor axis' own fault
    heads = heads_of(plan, model)
    legal = [d for d in divisors(plan.context) if not _misfits(d, heads)]
    hint = f"ulysses = one of {', '.join(map(str, legal))}"
    said = setup.said("plan.ulysses", "plan.tensor")
    faults = []
    if heads.query % plan.ulysses:
        message = f"ulysses = {plan.ulysses} does not divide {counted(heads.query, 'attention head')} of a tensor rank"
        faults.append(ULYSSES_HEADS.fault(message, *said, *setup.said("model.heads"), hint=hint))
    elif _misfits(plan.ulysses, heads):
        here = counted(heads.key_value, "key/value head")
        message = f"ulysses = {plan.ulysses} is no divisor and no multiple of {here}"
        faults.append(ULYSSES_KV_HEADS.fault(message, *said, *setup.said("model.kv_heads"), hint=hint))
    return faults


def _misfits(ulysses: int, heads: Heads) -> bool:
    """Whether the heads of a tensor rank cannot be dealt out to so many ranks."""
    return bool(heads.query % ulysses or (heads.key_value % ulysses and ulysses % heads.key_value))
