"""Space: every legal plan of a subject on a number of devices, as tables that multiply out only where they are needed.

Legality is the layout's own: each combination of degrees is put before the rules of the axes once, schedules are
asked for each number of ranks and microbatches, and nothing is only tried in powers of two. Plans that differ in a
field without effect (sequence parallelism on one tensor rank, ZeRO over one rank, a placement of axes of size 1)
stand in the space once, and so do placements that put every group on the same links.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.layouts import ORDER_AXES, ORDERS, OVERLAPS, RECOMPUTE
from shardsmith.design.cost.schedules import SCHEDULES, as_fast
from shardsmith.design.cost.subject import Subject
from shardsmith.layout.check import axis_faults
from shardsmith.layout.overlap import overlap_faults
from shardsmith.plan.batch import divisors
from shardsmith.plan.fixed import held_values
from shardsmith.plan.plan import Overlap, Plan
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import even_layers, weighed_layers
from shardsmith.schedule import orders

Index = NDArray[np.intp]
SHAPE = ("tensor", "replicate_kv", "context", "ulysses", "pipeline", "data", "expert", "expert_tensor")
DEGREES = ("tensor", "context", "pipeline", "data", "expert", "expert_tensor")
"""Degrees that tell one entry of the ranking from another."""
HALVING = 2 ** OVERLAPS.index("half_microbatches")
"""The overlap that needs an even number of sequences."""
PLENTY = 4
"""Microbatches a rank that every schedule can run with."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """All legal plans on `world` devices; `base` has the fields that do not vary.

    `fixed` holds fields to one value each, or to some of them (`OneOf`).
    """

    subject: Subject
    world: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    base: Plan = field(default_factory=Plan)

    @cached_property
    def shapes(self) -> NDArray[np.float64]:
        """Legal combinations of degrees: a row each, columns as SHAPE."""
        rows = [row for degrees in self._dense() for row in self._with_experts(degrees)]
        return np.array(rows, dtype=float).reshape(len(rows), len(SHAPE))

    def thin(self) -> Thin:
        """The same space with a few plans of each shape only."""
        return Thin(subject=self.subject, world=self.world, fixed=self.fixed, base=self.base)

    def allows(self, key: str, value: Any) -> bool:
        """Whether `key` may have `value`."""
        return key not in self.fixed or value in held_values(self.fixed, key)

    def _setup(self, **degrees: Any) -> Setup:
        s = self.subject
        return Setup(model=s.model, workload=s.workload, cluster=s.cluster, plan=self.base.with_(**degrees))

    def _sound(self, **degrees: Any) -> bool:
        return not any(fault.severity == "error" for fault in axis_faults(self._setup(**degrees)))

    def _dense(self) -> Iterator[tuple[int, ...]]:
        """Degrees of the dense mesh whose product is `world`, with data ranks that divide the batch."""
        model, batch = self.subject.model, self.subject.workload.global_batch
        most = model.layers + 2
        for tensor in divisors(self.world):
            for copied in (False, True):
                if not (self.allows("tensor", tensor) and self.allows("replicate_kv", copied)):
                    continue
                if (copied and tensor <= model.kv_heads) or not self._sound(tensor=tensor, replicate_kv=copied):
                    continue
                for context, ulysses in self._contexts(tensor, copied):
                    rest = self.world // (tensor * context)
                    for pipeline in divisors(rest):
                        data = rest // pipeline
                        if pipeline > most or batch % data or not self._agrees(pipeline, data):
                            continue
                        yield tensor, int(copied), context, ulysses, pipeline, data

    def _agrees(self, pipeline: int, data: int) -> bool:
        return self.allows("pipeline", pipeline) and self.allows("data", data)

    def _contexts(self, tensor: int, copied: bool) -> Iterator[tuple[int, int]]:
        for context in divisors(self.world // tensor):
            if context > self.subject.workload.seq_len or not self.allows("context", context):
                continue
            for ulysses in divisors(context):
                degrees = {"tensor": tensor, "replicate_kv": copied, "context": context, "ulysses": ulysses}
                if self.allows("ulysses", ulysses) and self._sound(**degrees):
                    yield context, ulysses

    def _with_experts(self, degrees: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        tensor, _, context, _, _, data = degrees
        for expert, part in self._expert_degrees(data * context * tensor):
            yield (*degrees, expert, part)

    def _expert_degrees(self, ranks: int) -> list[tuple[int, int]]:
        """Pairs of expert and expert_tensor that divide `ranks`, the experts and their width."""
        cached = self._expert_pairs
        if ranks not in cached:
            experts = self.subject.model.experts
            pairs = (
                [(1, 1)]
                if experts is None
                else [
                    (e, t)
                    for t in divisors(ranks)
                    if experts.ffn % t == 0
                    for e in divisors(ranks // t)
                    if experts.count % e == 0
                ]
            )
            cached[ranks] = [(e, t) for e, t in pairs if self.allows("expert", e) and self.allows("expert_tensor", t)]
        return cached[ranks]

    @cached_property
    def _expert_pairs(self) -> dict[int, list[tuple[int, int]]]:
        return {}

    def cuts(self, data: int) -> list[tuple[int, int]]:
        """(microbatch, microbatches) of each data rank."""
        each = self.subject.workload.global_batch // data
        found = [(size, each // size) for size in divisors(each)]
        return [(a, b) for a, b in found if self.allows("microbatch", a) and self.allows("microbatches", b)]

    def inner(self, tensor: int, context: int, microbatch: int) -> list[tuple[int, int, int]]:
        """(sequence_parallel, recompute, overlap) options of layers with these degrees and sequences."""
        key = (tensor, context, microbatch % 2)
        if key not in self._inner:
            self._inner[key] = self._layers(*key)
        return self._inner[key]

    @cached_property
    def _inner(self) -> dict[tuple[int, int, int], list[tuple[int, int, int]]]:
        return {}

    def _layers(self, tensor: int, context: int, odd: int) -> list[tuple[int, int, int]]:
        split = [False, True] if self._splits(tensor, context) else [False]
        policies = self.policies if tensor > 1 else [0]
        if odd:
            policies = [bits for bits in policies if not bits & HALVING]
        found = []
        for flag in split:
            for again, name in enumerate(RECOMPUTE):
                for bits in policies:
                    named = policies_of(bits)
                    wanted = {"sequence_parallel": flag, "recompute": name, "overlap": named}
                    if all(self.allows(key, value) for key, value in wanted.items()):
                        found.append((int(flag), again, bits))
        return found

    @cached_property
    def policies(self) -> list[int]:
        """Overlaps that the model can have, of none, those that the target offers and what is fixed."""
        offered = [(), *((name,) for name in self.subject.target.overlaps)]
        wanted = [tuple(names) for names in held_values(self.fixed, "overlap")] if "overlap" in self.fixed else offered
        return [sum(2 ** OVERLAPS.index(name) for name in names) for names in wanted if self._overlaps(names)]

    def _overlaps(self, names: tuple[Overlap, ...], schedule: str = "one_f_one_b") -> bool:
        """Whether layers can overlap so, with microbatches that can be halved."""
        batch = replace(self.subject.workload, global_batch=2)
        setup = replace(self._setup(tensor=2, microbatch=2, schedule=schedule, overlap=names), workload=batch)
        return not any(fault.severity == "error" for fault in overlap_faults(setup))

    def _splits(self, tensor: int, context: int) -> bool:
        """Whether the sequence can be cut over the tensor ranks."""
        if tensor == 1:
            return False
        copied = tensor > self.subject.model.kv_heads
        return self._sound(tensor=tensor, context=context, replicate_kv=copied, sequence_parallel=True)

    def pipelines(self, pipeline: int, microbatches: int, overlap: int = 0) -> list[tuple[int, int, int]]:
        """(schedule, stages_per_rank, weighed) options for so many ranks and microbatches, and bits of overlap."""
        key = (pipeline, microbatches, overlap)
        if key not in self._pipelines:
            self._pipelines[key] = [
                option
                for index, options in self._stages(pipeline)
                if self._hides(index, overlap) and self._runs(index, pipeline, microbatches)
                for option in options
            ]
        return self._pipelines[key]

    @cached_property
    def _pipelines(self) -> dict[tuple[int, int, int], list[tuple[int, int, int]]]:
        return {}

    def contenders(self, pipeline: int, microbatches: int, overlap: int) -> list[tuple[int, int, int]]:
        """Those of `pipelines` that no other one equals in time and beats in memory."""
        every = self.pipelines(pipeline, microbatches, overlap)
        there = set[tuple[int | None, int, int]](every)
        return [(i, n, w) for i, n, w in every if (as_fast(i, pipeline, microbatches), n, w) not in there]

    def _stages(self, pipeline: int) -> list[tuple[int, list[tuple[int, int, int]]]]:
        """Of each schedule for so many ranks: its index, and its options for any number of microbatches."""
        if pipeline not in self._staged:
            self._staged[pipeline] = [
                (index, [(index, n, w) for n in self._each(name, pipeline) for w in self._splittings(pipeline * n)])
                for index, name in enumerate(SCHEDULES)
                if self.allows("schedule", name) and (pipeline > 1 or name == "one_f_one_b")
            ]
        return self._staged[pipeline]

    @cached_property
    def _staged(self) -> dict[int, list[tuple[int, list[tuple[int, int, int]]]]]:
        return {}

    def _each(self, schedule: str, pipeline: int) -> list[int]:
        """Stages a rank that `schedule` may have."""
        order, many = orders.load(schedule), PLENTY * pipeline
        most = (self.subject.model.layers + 2) // pipeline
        every: Iterable[int] = range(1, most + 1)
        if "stages_per_rank" in self.fixed:
            held = held_values(self.fixed, "stages_per_rank")
            wanted = {each or order.DEFAULT_STAGES_PER_RANK for each in held}
            every = [each for each in every if each in wanted]
        return [
            each
            for each in every
            if not order.faults(pipeline=pipeline, microbatches=many, stages_per_rank=each, source="plan")
        ]

    def _splittings(self, stages: int) -> tuple[int, ...]:
        """Whether layers can be spread evenly (0) over so many stages, and weighed (1)."""
        even = stages <= self.subject.model.layers and self.allows("layers", None)
        weighed = self.allows("layers", "weighed") and self.differs(stages)
        return (*((0,) if even else ()), *((1,) if weighed else ()))

    def _runs(self, index: int, pipeline: int, microbatches: int) -> bool:
        """Whether a schedule takes so few microbatches, whatever its stages."""
        key = (index, pipeline, microbatches)
        if key not in self._ran:
            order = self._schedules[index]
            each = order.DEFAULT_STAGES_PER_RANK
            faults = order.faults(pipeline=pipeline, microbatches=microbatches, stages_per_rank=each, source="plan")
            self._ran[key] = not faults
        return self._ran[key]

    @cached_property
    def _schedules(self) -> list[orders.Schedule]:
        return [orders.load(name) for name in SCHEDULES]

    @cached_property
    def _ran(self) -> dict[tuple[int, int, int], bool]:
        return {}

    def _hides(self, index: int, overlap: int) -> bool:
        """Whether these bits of overlap go with a schedule."""
        key = (index, overlap)
        if key not in self._hidden:
            named = policies_of(overlap)
            self._hidden[key] = not named or self._overlaps(named, SCHEDULES[index])
        return self._hidden[key]

    @cached_property
    def _hidden(self) -> dict[tuple[int, int], bool]:
        return {}

    def differs(self, stages: int) -> bool:
        """Whether weighing the layers of so many stages moves any; only the ends may be left without a layer."""
        if stages not in self._weighed:
            model, seq_len = self.subject.model, self.subject.workload.seq_len
            weighed = weighed_layers(model, stages, seq_len)
            inner = weighed[1:-1] or (1,)
            moved = stages > model.layers or weighed != even_layers(model.layers, stages)
            self._weighed[stages] = moved and min(inner) > 0
        return self._weighed[stages]

    @cached_property
    def _weighed(self) -> dict[int, bool]:
        return {}

    def placements(self, degrees: Sequence[int]) -> list[int]:
        """Indices of orders that put the groups of these degrees (as ORDER_AXES) on other links than those before.

        What counts is how many members of a group a domain holds: an axis whose neighbours already stand in
        different domains may go further apart without crossing another kind of link.
        """
        key = tuple(degrees)
        if key not in self._placements:
            seen: dict[tuple[int, ...], int] = {}
            for index, axes in self._orders_of(tuple(axis for axis, degree in enumerate(key) if degree > 1)):
                stride, strides = 1, [0] * len(key)
                for axis in axes:
                    strides[axis] = min(stride, self._widest)
                    stride *= key[axis]
                seen.setdefault(tuple(strides), index)
            self._placements[key] = list(seen.values())
        return self._placements[key]

    @cached_property
    def _widest(self) -> int:
        """Ranks of the widest domain beyond which all links are alike."""
        return max((link.size for link in self.subject.cluster.levels if link.size), default=1)

    def _orders_of(self, axes: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """Index of the first allowed order for each way to order these `axes` (places in ORDER_AXES), and that way."""
        if axes not in self._ordered:
            seen: dict[tuple[int, ...], int] = {}
            for index, order in enumerate(ORDERS):
                if self.allows("order", order):
                    places = (ORDER_AXES.index(axis) for axis in order.split("-"))
                    seen.setdefault(tuple(axis for axis in places if axis in axes), index)
            self._ordered[axes] = [(index, order) for order, index in seen.items()]
        return self._ordered[axes]

    @cached_property
    def _ordered(self) -> dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]:
        return {}

    @cached_property
    def _placements(self) -> dict[tuple[int, ...], list[int]]:
        return {}

    def sharding(self, tensor: int, context: int, data: int, experts: int) -> list[tuple[int, int, int]]:
        """(zero, per_step, replicate) options; each replica must hold all `experts` = expert x expert_tensor ranks."""
        key = (tensor, context, data, experts)
        if key not in self._shardings:
            found = [(0, 0, 1)]
            for copies in divisors(data):
                ranks = data // copies * context
                if ranks > 1 and (ranks * tensor) % experts == 0:
                    found += [(1, 0, copies), (2, 0, copies), (2, 1, copies), (3, 0, copies), (3, 1, copies)]
            self._shardings[key] = [
                (zero, step, copies)
                for zero, step, copies in found
                if self.allows("zero", zero)
                and self.allows("replicate", copies)
                and self.allows("zero_gather", "per_step" if step else "per_pass")
            ]
        return self._shardings[key]

    @cached_property
    def _shardings(self) -> dict[tuple[int, int, int, int], list[tuple[int, int, int]]]:
        return {}


def policies_of(bits: int) -> tuple[Overlap, ...]:
    """The overlap policies that bits stand for."""
    return tuple(name for i, name in enumerate(OVERLAPS) if bits >> i & 1)


@dataclass(frozen=True, kw_only=True)
class Thin(Space):
    """A few plans of every shape and cut, those that usually win: they set the mark for a search of the whole space."""

    def inner(self, tensor: int, context: int, microbatch: int) -> list[tuple[int, int, int]]:
        """The options with most overlap, the sequence cut over tensor ranks where it may be."""
        every = super().inner(tensor, context, microbatch)
        split, bits = max(((a, c) for a, _, c in every), default=(0, 0))
        return [option for option in every if option[0] == split and option[2] == bits]

    def pipelines(self, pipeline: int, microbatches: int, overlap: int = 0) -> list[tuple[int, int, int]]:
        """1F1B, and loops of the fewest and the most stages."""
        every = super().pipelines(pipeline, microbatches, overlap)
        loops = sorted((option for option in every if SCHEDULES[option[0]] == "interleaved"), key=lambda o: o[1:])
        usual = ("one_f_one_b", "dualpipe_v") if self.subject.model.experts else ("one_f_one_b",)
        return [*(o for o in every if SCHEDULES[o[0]] in usual), *loops[:1], *loops[1:][-1:]] or every[:1]

    def placements(self, degrees: Sequence[int]) -> list[int]:
        """The first placement: tensor ranks innermost, pipeline ranks outermost, where nothing else is fixed."""
        return super().placements(degrees)[:1]

    def sharding(self, tensor: int, context: int, data: int, experts: int) -> list[tuple[int, int, int]]:
        """States whole, and sharded over all ranks."""
        every = super().sharding(tensor, context, data, experts)
        return [o for o in every if o[:2] in ((0, 0), (1, 0), (3, 0)) and o[2] == 1] or every[:1]
