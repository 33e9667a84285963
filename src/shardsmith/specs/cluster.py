"""ClusterSpec: devices, nodes and the links between them, every figure with its origin.

All bandwidths are per device and in ONE direction: vendors often print both directions together (NVLink 3
"600 GB/s" is 300 each way).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from shardsmith.errors import Code, Fault
from shardsmith.specs.parse import origin_of

PathKind = Literal["nvlink", "pcie", "rdma_gdr", "rdma", "host", "tcp", "shm"]
"""How data travels: `rdma_gdr` straight from device memory, `rdma` and `host` staged in host memory."""

PeakDtype = Literal["float64", "float32", "bfloat16", "float16", "float8"]

POSITIVE_FIGURE = Code(
    code="H102",
    title="a figure of a cluster must be positive",
    because="a device or link without any capacity cannot take part, nor is there a cluster without devices",
)
LEVELS = Code(
    code="H103",
    title="link levels must widen",
    because="levels are listed from the fastest, smallest domain outwards; only the outermost spans the whole cluster",
)
ABSURD = Code(
    code="H105",
    title="a figure that no machine has",
    because="a slip of the unit or of the decimal point would be priced like any other figure, and every answer wrong",
)
WHOLE_NODES = Code(
    code="H106",
    title="link domains that do not nest",
    because="ranks are counted through nodes and domains: a domain holds whole smaller ones, a whole number of nodes, "
    "or an equal part of one, or else it would end in the middle of another",
)
SLOWER_INSIDE = Code(
    code="H107",
    title="an inner link that is slower than the one around it",
    because="groups of few ranks are put inside the smallest domain as the fastest; with the figures exchanged, every "
    "placement is priced the wrong way round",
    severity="warning",
)
RANGES = {
    "nodes": (1, 10**15),
    "devices_per_node": (1, 10**15),
    "size": (1, 10**9),
    "memory_gib": (1e-3, 1e6),
    "memory_bandwidth_gbs": (1e-3, 1e6),
    "peak_tflops": (1e-6, 1e6),
    "bandwidth_gbs": (1e-6, 1e6),
    "latency_us": (1e-3, 1e7),
}
"""Least and most of each figure, in its own unit: from a slow embedded board or a modem to what nobody has built."""

NODE_SIZE = Code(
    code="H104",
    title="several nodes of unknown size",
    because="where one node ends and the next begins decides which links a group of ranks uses",
)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator (or CPU): what a program can use of it.

    `memory_gib` is what the runtime reports as usable, None where it is read from the machine at run
    time. `peak_tflops` is the dense peak (no sparsity) by dtype; a dtype that is not listed is unknown.
    """

    name: str
    memory_gib: float | None = None
    peak_tflops: Mapping[PeakDtype, float] = field(default_factory=dict, hash=False)
    memory_bandwidth_gbs: float | None = None
    origin: str

    def peak(self, dtype: str) -> float | None:
        """Dense peak in FLOP/s for `dtype`; None where it is unknown, never the figure of another device or dtype."""
        tflops = {str(name): peak for name, peak in self.peak_tflops.items()}.get(dtype)
        return None if tflops is None else tflops * 1e12


@dataclass(frozen=True, kw_only=True)
class Link:
    """One level of the network: up to `size` devices reach one another at this speed.

    `size` None spans the whole cluster. `bandwidth_gbs` is GB/s (1e9 bytes) per device in one direction,
    `latency_us` microseconds a hop.
    """

    name: str
    size: int | None = None
    bandwidth_gbs: float
    latency_us: float
    path: PathKind
    origin: str


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """`nodes` nodes of `devices_per_node` equal devices (None: any number on one node), joined by `levels`.

    `levels` go from the innermost link outwards; an empty tuple says that no link has been measured.
    """

    name: str
    nodes: int = 1
    devices_per_node: int | None = None
    device: Device
    levels: tuple[Link, ...] = ()

    @property
    def devices(self) -> int | None:
        """Devices of the whole cluster; None where a node takes any number."""
        return None if self.devices_per_node is None else self.nodes * self.devices_per_node

    def with_nodes(self, nodes: int) -> ClusterSpec:
        """The same kind of cluster with `nodes` nodes."""
        return replace(self, nodes=nodes)


def _figures(spec: ClusterSpec) -> Iterator[tuple[str, str, float | None]]:
    """Every figure of `spec`: its key (`levels.0.latency_us`), the field that it is of, and its value."""
    for name in ("nodes", "devices_per_node"):
        yield name, name, getattr(spec, name)
    for name in ("memory_gib", "memory_bandwidth_gbs"):
        yield f"device.{name}", name, getattr(spec.device, name)
    for dtype, peak in spec.device.peak_tflops.items():
        yield f"device.peak_tflops.{dtype}", "peak_tflops", peak
    for at, link in enumerate(spec.levels):
        for name in ("size", "bandwidth_gbs", "latency_us"):
            yield f"levels.{at}.{name}", name, getattr(link, name)


def cluster_faults(spec: ClusterSpec, source: str, sources: Mapping[str, str] | None = None) -> list[Fault]:
    """Every rule that `spec`, read from `source`, breaks by itself (H102 to H106); empty for a sound cluster.

    `sources` names another origin for single keys (`levels.0.latency_us`).
    """
    faults: list[Fault] = []
    for key, name, value in _figures(spec):
        if value is None:
            continue
        least, most = RANGES[name]
        shown = str(value) if isinstance(value, int) else f"{value:g}"  # a huge int has no float
        said = (origin_of(key.split("."), source, sources or {}), f"{key} = {shown}")
        if value <= 0:
            message, hint = f"{key} must be greater than zero", f"{key} from {least:g} to {most:g}"
            faults.append(POSITIVE_FIGURE.fault(message, said, hint=hint))
        elif not least <= value <= most:
            message = f"{key} = {shown} is outside {least:g} to {most:g}"
            faults.append(ABSURD.fault(message, said, hint=f"{key} from {least:g} to {most:g}"))
    for inner, outer in zip(spec.levels, spec.levels[1:], strict=False):
        if inner.size is None or (outer.size is not None and outer.size <= inner.size):
            faults.append(
                LEVELS.fault(
                    f"level {outer.name} spans no more devices than {inner.name} inside it",
                    (source, f"{inner.name}: size = {inner.size or 'whole cluster'}"),
                    (source, f"{outer.name}: size = {outer.size or 'whole cluster'}"),
                    hint="list the smallest domain first, and leave size out for the outermost only",
                )
            )
    faults += _nesting_faults(spec, source)
    if spec.nodes > 1 and spec.devices_per_node is None:
        faults.append(
            NODE_SIZE.fault(
                f"{spec.nodes} nodes, but no number of devices a node",
                (source, f"nodes = {spec.nodes}"),
                (source, f"cluster {spec.name}: devices_per_node is not stated"),
                hint="nodes = 1, or state devices_per_node in a cluster file",
            )
        )
    return faults


def _nesting_faults(spec: ClusterSpec, source: str) -> list[Fault]:
    """Domains (H106) that end inside a node or inside a smaller domain."""
    faults = []
    parts = [(link.name, link.size, f"{link.name}: size = {link.size}") for link in spec.levels if link.size]
    each = spec.devices_per_node
    for at, (name, size, said) in enumerate(parts):
        if size < 1:
            continue
        if each is not None and each > 0 and size % each and each % size:
            message = f"a domain of {name} holds {size} devices, a node {each}"
            faults.append(
                WHOLE_NODES.fault(
                    message, (source, said), (source, f"devices_per_node = {each}"), hint=f"size = {each}"
                )
            )
        elif at and 0 < parts[at - 1][1] < size and size % parts[at - 1][1]:
            inner, least, also = parts[at - 1]
            message = f"a domain of {name} holds {size} devices, one of {inner} inside it {least}"
            faults.append(
                WHOLE_NODES.fault(message, (source, also), (source, said), hint=f"size = {size // least * least}")
            )
    return faults


def link_warnings(spec: ClusterSpec, source: str) -> list[Fault]:
    """Levels whose devices reach one another more slowly than those of the level around them (H107)."""
    return [
        SLOWER_INSIDE.fault(
            f"{inner.name} has {inner.bandwidth_gbs:g} GB/s a device, {outer.name} around it {outer.bandwidth_gbs:g}",
            (source, f"{inner.name}: bandwidth_gbs = {inner.bandwidth_gbs:g}"),
            (source, f"{outer.name}: bandwidth_gbs = {outer.bandwidth_gbs:g}"),
            hint="bandwidths of one device in one direction, the fastest level first; measured ones may stay",
        )
        for inner, outer in zip(spec.levels, spec.levels[1:], strict=False)
        if inner.bandwidth_gbs < outer.bandwidth_gbs
    ]
