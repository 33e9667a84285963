"""Search over serving layouts: which hold the requests, which meet the targets, which of them serves most tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.serving.demand import Demand, Servings, servings
from shardsmith.design.serving.latency import BOUNDS, GRAPH_LATENCY, KERNEL_SECONDS, Latency, latency
from shardsmith.design.serving.memory import ServingMemory, block_tokens, held_tokens, serving_memory
from shardsmith.errors import Code, Fault, Refused
from shardsmith.layout.check import ROPE_CONTEXT
from shardsmith.plan.batch import TOO_SMALL
from shardsmith.plan.plan import Plan
from shardsmith.units import GIB, MIB, counted

NOTHING_FITS = Code(
    code="I201",
    title="no layout holds these requests",
    because="weights stand on every replica, and each request keeps its keys and values until it ends",
)
TOO_SLOW = Code(
    code="I202",
    title="no layout meets the latency targets",
    because="a first token needs the whole prompt's FLOPs, and every further one reads weights and cache once",
)

Mask = NDArray[np.bool_]
Verdict = Literal["followed", "beaten", "not followed"]


@dataclass(frozen=True, kw_only=True)
class ServingChoice:
    """One layout: seconds to the first token and between tokens, output tokens/s of the cluster, bytes a device.

    `kv` is what `concurrency` requests keep on the fullest device; `most` how many requests fit. `binds` names what
    most of the time between tokens goes to, `rule` says whether data > tensor > pipeline is followed.
    """

    plan: Plan
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    weights: float
    kv: float
    workspace: float
    most: int
    binds: str
    verdict: Verdict
    rule: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, sizes in GiB."""
        return {
            "plan": str(self.plan),
            "devices": self.plan.world,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "tokens_per_s": self.tokens_per_s,
            "weights_gib": self.weights / GIB,
            "kv_gib": self.kv / GIB,
            "workspace_gib": self.workspace / GIB,
            "max_concurrency": self.most,
            "binds": self.binds,
            "rule": self.rule,
        }


@dataclass(frozen=True, kw_only=True)
class ServingResult:
    """Layouts that hold the requests and meet the targets, best first, and how many were looked at."""

    demand: Demand
    plans: tuple[ServingChoice, ...]
    searched: int
    fitting: int
    seconds: float
    assumptions: tuple[str, ...]

    @property
    def warnings(self) -> tuple[Fault, ...]:
        """A context beyond the one that the model was made for (B205)."""
        model, context = self.demand.model, self.demand.context
        if context <= model.context:
            return ()
        said = (("--context", f"context = {context}"), (model.name, f"context = {model.context}"))
        message = f"context = {context} is longer than the context of {model.name}, {model.context}"
        return (ROPE_CONTEXT.fault(message, *said, hint=f"--context {model.context}"),)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values with the keys that the verb promises."""
        return {
            "model": self.demand.model.name,
            "cluster": self.demand.cluster.name,
            "target": self.demand.server.name,
            "context": self.demand.context,
            "concurrency": self.demand.concurrency,
            "plans": [choice.as_json() for choice in self.plans],
            "searched": self.searched,
            "fitting": self.fitting,
            "seconds": self.seconds,
            "assumptions": list(self.assumptions),
            "warnings": [fault.as_json() for fault in self.warnings],
        }


def search_serving(demand: Demand, *, top: int = 5) -> ServingResult:
    """The `top` layouts for a demand: most tokens a second among those that fit and meet the targets.

    Ties go to fewer devices, then to the shorter time to the first token. Raises `Refused`: I101 to I103 for a demand
    that is none, I201 where nothing fits and I202 where nothing is fast enough, each with what comes nearest.
    """
    began = time.perf_counter()
    if top < 1:
        raise TOO_SMALL.refuse(f"top = {top} is below 1", ("--top", f"top = {top}"), hint="1")
    s = servings(demand)
    memory, times = serving_memory(demand, s), latency(demand, s)
    fits = memory.requests >= demand.concurrency
    if not fits.any():
        raise _nothing_fits(demand, s, memory)
    good = fits & _meets(demand, times)
    if not good.any():
        raise _too_slow(demand, s, times, fits)
    rate = demand.concurrency / times.tpot
    at = np.flatnonzero(good)
    ranked = at[np.lexsort((times.ttft[at], s.world[at], -rate[at]))]
    rule = _rule(s, fits)
    plans = tuple(_choice(demand, s, memory, times, rule, int(i)) for i in ranked[:top])
    return ServingResult(
        demand=demand,
        plans=plans,
        searched=len(s),
        fitting=int(fits.sum()),
        seconds=time.perf_counter() - began,
        assumptions=assumptions(demand),
    )


def assumptions(demand: Demand) -> tuple[str, ...]:
    """What the figures rest on."""
    c, server = demand.cluster, demand.server
    chunk, block = server.chunk(c.device), block_tokens(demand)
    return (
        f"the engine behaves as {server.name} has it: cache in blocks of {block} tokens, captured graphs up to "
        f"{server.graph_requests} requests, sums up to {server.own_reduce_bytes / MIB:g} MiB in one kernel inside a "
        "fast domain",
        f"weights in {demand.dtype}, cache in {demand.cache_dtype}; every request holds "
        f"{counted(demand.context, 'token')}, no prefix is shared",
        f"{server.memory_share:.0%} of the {c.device.memory_gib:g} GiB of a {c.device.name} are used, "
        f"{server.reserve_gib:g} GiB of that for the runtime",
        f"the first token: one request alone, its whole context as prompt, in chunks of {chunk} tokens; no queue",
        "between tokens: all requests decode at once; tokens/s counts their output only",
        f"decoding runs captured graphs: {KERNEL_SECONDS * 1e6:g} us a kernel, {GRAPH_LATENCY:g} link latency a hop",
        "a pipeline decodes one group of requests a stage; experts are chosen evenly",
    )


def _meets(demand: Demand, times: Latency) -> Mask:
    ttft = np.inf if demand.ttft_s is None else demand.ttft_s
    tpot = np.inf if demand.tpot_s is None else demand.tpot_s
    return np.asarray((times.ttft <= ttft) & (times.tpot <= tpot), dtype=np.bool_)


def _rule(s: Servings, fits: Mask) -> int:
    """The layout that data > tensor > pipeline picks: fewest stages, then fewest tensor ranks, the rest replicas."""
    at = np.flatnonzero(fits)
    return int(at[np.lexsort((s.expert[at], s.tensor[at], s.pipeline[at]))][0])


def _choice(demand: Demand, s: Servings, memory: ServingMemory, times: Latency, rule: int, at: int) -> ServingChoice:
    requests = np.ceil(demand.concurrency / s.data[at])
    verdict, words = _verdict(demand, s, memory, times, rule, at)
    return ServingChoice(
        plan=s.plan(at),
        ttft_s=float(times.ttft[at]),
        tpot_s=float(times.tpot[at]),
        tokens_per_s=demand.concurrency / float(times.tpot[at]),
        weights=float(memory.weights[at]),
        kv=float(requests * memory.request[at]),
        workspace=float(memory.workspace[at]),
        most=int(memory.requests[at]),
        binds=BOUNDS[int(times.binds[at])],
        verdict=verdict,
        rule=words,
    )


def _verdict(
    demand: Demand, s: Servings, memory: ServingMemory, times: Latency, rule: int, at: int
) -> tuple[Verdict, str]:
    """Whether a layout is the one that the rule picks, or by how much it beats that one (or does not)."""
    name = "data > tensor > pipeline"
    size = f"{(memory.weights[rule] + memory.request[rule]) / GIB:.1f} GiB of weights and one request"
    why = "on one device" if s.tensor[rule] * s.pipeline[rule] == 1 else "on the fewest devices that hold a replica"
    picked = s.plan(rule)
    if at == rule:
        return "followed", f"{name}: followed ({size} a device fit {why}, the rest are replicas)"
    ratio = float(times.tpot[rule] / times.tpot[at])
    missed = bool(not _meets(demand, times)[rule])
    beaten = ratio > 1.0 or missed
    words = f"it picks {picked}, whose time between tokens is {ratio:.2f} of this one's"
    if missed:
        words += " and which misses the targets"
    return ("beaten", f"{name}: beaten; {words}") if beaten else ("not followed", f"{name}: not followed; {words}")


def _nothing_fits(demand: Demand, s: Servings, memory: ServingMemory) -> Exception:
    """What is short where nothing fits: the layout that holds most requests, and what would help."""
    # Where none holds a request, the one that holds the largest part of one.
    part = np.where(
        memory.room > 0, memory.requests + np.minimum(memory.room / memory.request, 1.0), memory.room / 1e15
    )
    best = int(np.argmax(part))
    most, said = int(memory.requests[best]), ("--concurrency", str(demand.concurrency))
    cluster = demand.cluster
    device = (cluster.name, f"{cluster.devices} x {cluster.device.memory_gib:g} GiB")
    more = _enough(demand)
    if memory.room[best] <= 0:
        message = (
            f"no layout holds even the weights of {demand.model.name}: at best {memory.weights[best] / GIB:.1f} GiB "
            f"and {memory.workspace[best] / GIB:.1f} GiB of workspace on a device"
        )
        hints = [f"--nodes {more}"] if more else []
        hints += ["--weights-dtype float8"] if _narrower(demand) else []
    else:
        message = f"at most {counted(most, 'request')} of {counted(demand.context, 'token')} fit, with {s.plan(best)}"
        hints = [f"--concurrency {most}"] if most else []
        block, each = block_tokens(demand), np.ceil(demand.concurrency / s.data[best])
        blocks = memory.room[best] / (memory.request[best] / held_tokens(demand)) / each // block
        context = int(blocks) * block
        hints += [f"--context {context}"] if demand.model.window is None and context else []
        hints += [f"--nodes {more}"] if more else []
    hint = ", or ".join(hints) or "devices with more memory"
    return NOTHING_FITS.refuse(message, said, ("--context", str(demand.context)), device, hint=hint)


LARGEST_FACTOR = 1024
"""Times the nodes asked for, beyond which nobody looks for a number that holds the requests."""
EACH_TRIED = 16
"""Numbers of nodes that are tried one by one; more are halved first."""


def _enough(demand: Demand) -> int | None:
    """The fewest nodes, of those tried, that hold the requests: doublings, then halves, at last one by one."""
    asked = demand.cluster.nodes
    low, high = asked, 2 * asked
    while not _holds(demand, high):
        low, high = high, 2 * high
        if high > LARGEST_FACTOR * asked:
            return None
    while high - low > EACH_TRIED + 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _holds(demand, middle) else (middle, high)
    return next((nodes for nodes in range(low + 1, high) if _holds(demand, nodes)), high)


def _holds(demand: Demand, nodes: int) -> bool:
    """Whether some layout on so many nodes holds the requests."""
    wider = replace(demand, cluster=demand.cluster.with_nodes(nodes))
    try:
        return bool((serving_memory(wider, servings(wider)).requests >= demand.concurrency).any())
    except Refused:  # no layout of so many has the degrees that are held
        return False


def _narrower(demand: Demand) -> bool:
    """Whether weights could be held in float8 and are not."""
    return demand.dtype != "float8" and bool(demand.cluster.device.peak("float8"))


def _too_slow(demand: Demand, s: Servings, times: Latency, fits: Mask) -> Exception:
    """The layouts that come nearest to each target."""
    at = np.flatnonzero(fits)
    hints, said, parts = [], [], []
    for option, target, seconds, what in (
        ("--ttft-ms", demand.ttft_s, times.ttft, "to the first token"),
        ("--tpot-ms", demand.tpot_s, times.tpot, "between tokens"),
    ):
        if target is None:
            continue
        best = at[int(np.argmin(seconds[at]))]
        parts.append(f"{seconds[best] * 1e3:.1f} ms {what} with {s.plan(int(best))}")
        said.append((option, f"{target * 1e3:g}"))
        hints += [f"{option} {np.ceil(seconds[best] * 1e3):g}"] if seconds[best] > target else []
    message = "at best " + " and ".join(parts) + ("" if hints else ", never both at once")
    hint = " ".join(hints) or "relax one of the two"
    narrower = ", --weights-dtype float8" if _narrower(demand) else ""
    return TOO_SLOW.refuse(message, *said, hint=hint + "; or fewer requests, more nodes" + narrower)
