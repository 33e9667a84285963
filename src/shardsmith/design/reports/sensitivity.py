"""What a step would take if one thing were different: links, memory, microbatches, sequence length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardsmith.design.cost.estimate import estimate
from shardsmith.errors import Refused
from shardsmith.layout.check import MEMORY, examine
from shardsmith.plan.setup import Setup
from shardsmith.specs.cluster import ClusterSpec


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change and what becomes of a plan: seconds of a step, tokens/s of a device, both as ratios to before.

    `reason` says why the changed plan cannot be (then the ratios are None).
    """

    name: str
    step: float | None = None
    tokens: float | None = None
    reason: str = ""


def sensitivity(setup: Setup, target: str, imbalance: float = 1.0) -> tuple[Change, ...]:
    """Each change by itself: twice the bandwidth of every link level and of memory, twice the devices' peak, half and
    twice the microbatches (with the batch), half and twice the sequence (the batch in tokens kept where it divides).
    """
    before = estimate(setup, target, imbalance=imbalance)
    found = []
    for name, changed in _changes(setup):
        try:
            faults = [f for f in examine(changed, cured=False).errors if f.code != MEMORY.code]
            if faults:
                raise Refused(faults)
            after = estimate(changed, target, imbalance=imbalance)
        except Refused as refused:
            found.append(Change(name=name, reason=refused.faults[0].message))
            continue
        found.append(
            Change(
                name=name,
                step=after.step_time_s / before.step_time_s,
                tokens=after.tokens_per_s_per_gpu / before.tokens_per_s_per_gpu,
            )
        )
    return tuple(found)


def _changes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    cluster, work = setup.cluster, setup.workload
    for at, link in enumerate(cluster.levels):
        yield f"2 x bandwidth of {link.name}", replace(setup, cluster=_faster_link(cluster, at))
    device = cluster.device
    if device.memory_bandwidth_gbs:
        quick = replace(device, memory_bandwidth_gbs=2 * device.memory_bandwidth_gbs)
        yield "2 x memory bandwidth", replace(setup, cluster=replace(cluster, device=quick))
    peaks = {dtype: 2 * peak for dtype, peak in device.peak_tflops.items()}
    yield "2 x peak FLOP/s", replace(setup, cluster=replace(cluster, device=replace(device, peak_tflops=peaks)))
    fixed = setup.plan.with_(microbatches=None, microbatch=_microbatch(setup))
    for factor, words in ((0.5, "half"), (2.0, "2 x")):
        batch = int(work.global_batch * factor)
        yield f"{words} the microbatches", replace(setup, plan=fixed, workload=replace(work, global_batch=batch))
    for factor, words in ((0.5, "half"), (2.0, "2 x")):
        seq_len, batch = int(work.seq_len * factor), int(work.global_batch / factor)
        longer = replace(work, seq_len=seq_len, global_batch=batch)
        yield f"{words} the sequence, same tokens", replace(setup, plan=fixed, workload=longer)


def _faster_link(cluster: ClusterSpec, at: int) -> ClusterSpec:
    levels = [
        replace(link, bandwidth_gbs=link.bandwidth_gbs * (2 if i == at else 1)) for i, link in enumerate(cluster.levels)
    ]
    return replace(cluster, levels=tuple(levels))


def _microbatch(setup: Setup) -> int:
    from shardsmith.plan.batch import batching

    return batching(setup.plan, setup.workload).microbatch
