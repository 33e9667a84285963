"""A stated routing: which experts every token chooses where there are no tokens, as in a dry run.

All sequences are alike, and so are all layers. The experts of one expert rank, the *fullest*, receive `imbalance` times
the mean; within them, and within all others, loads are even. The object is read by the dry run, whose routers choose
what it says, and by the closed forms, which count what that brings; capacity drops what it drops in a run. Groups of
experts (`Experts.groups`) do not limit it: they say which experts may be chosen together, not how many rows travel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from shardsmith.errors import Code, Fault
from shardsmith.layout.axes.context import places
from shardsmith.layout.axes.expert import capacity
from shardsmith.plan.batch import batching
from shardsmith.plan.mesh import Coord, ExpertCoord, expert_coord, mesh_of
from shardsmith.plan.setup import Setup
from shardsmith.specs.model import Experts, ModelSpec

IMBALANCE = Code(
    code="E107",
    title="no routing is so uneven",
    because="the fullest expert rank receives imbalance times the mean: at least the mean, and no expert is chosen "
    "twice by a token, so that neither an expert nor a rank receives more than all tokens",
)


@dataclass(frozen=True)
class StatedRouting:
    """The routing of a plan with experts whose fullest expert rank is that of global `rank`.

    Legal for an `imbalance` without `imbalance_faults`.
    """

    setup: Setup
    rank: int
    imbalance: float = 1.0

    @cached_property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        """The experts, all different, that the token at each place of a sequence chooses."""
        experts = self._experts
        local = experts.count // self.setup.plan.expert
        first = self._place(self.rank).expert * local
        full = range(first, first + local)
        rest = [e for e in range(experts.count) if e not in full]
        share = Fraction(str(self.imbalance)) * experts.top_k * local / experts.count
        found = []
        for place in range(self.setup.workload.seq_len):
            # Of all choices so far, these went to the fullest rank.
            begin, end = place * share // 1, (place + 1) * share // 1
            others = range(place * experts.top_k - begin, (place + 1) * experts.top_k - end)
            here = [full[at % local] for at in range(begin, end)]
            found.append((*here, *(rest[at % len(rest)] for at in others)))
        return tuple(found)

    def places(self, coord: Coord) -> Sequence[int]:
        """The places in each sequence of the tokens that the rank at `coord` routes."""
        plan, length = self.setup.plan, self.setup.workload.seq_len
        held = range(length)
        if plan.context > 1:
            held = [p for part in places(length, plan.context, coord.context) for p in part]  # type: ignore[assignment]
        rows = len(held) // plan.tensor
        return held[coord.tensor * rows : (coord.tensor + 1) * rows]

    def rows(self, coord: Coord) -> tuple[int, ...]:
        """How many rows of a microbatch the rank at `coord` has for each expert, dropped ones left out."""
        counts = Counter(e for place in self.places(coord) for e in self._kept[place])
        sequences = batching(self.setup.plan, self.setup.workload).microbatch
        return tuple(counts[e] * sequences for e in range(self._experts.count))

    def kept(self, coord: Coord) -> int:
        """How many choices of a microbatch find room, of the tokens that the rank at `coord` routes."""
        return sum(self.rows(coord))

    def sent(self, rank: int) -> int:
        """Rows that global `rank` sends in one dispatch: one to each part of each expert."""
        return self.kept(mesh_of(self.setup.plan).coord(rank)) * self.setup.plan.expert_tensor

    def received(self, rank: int) -> int:
        """Rows that arrive at global `rank` in one dispatch."""
        return sum(sum(row) for row in self.arrivals(rank))

    def arrivals(self, rank: int) -> list[tuple[int, ...]]:
        """Rows for each expert of global `rank`, by the rank of its dispatch group that sends them."""
        local = self._experts.count // self.setup.plan.expert
        first = self._place(rank).expert * local
        by_part = {part: self.rows(part)[first : first + local] for part in {_part(c) for c in self.sources(rank)}}
        return [by_part[_part(coord)] for coord in self.sources(rank)]

    def sources(self, rank: int) -> list[Coord]:
        """The ranks that send rows to global `rank`, itself among them, in the order of their dispatch group."""
        mesh = mesh_of(self.setup.plan)
        own = mesh.coord(rank)
        share = expert_coord(self.setup.plan, own).shard
        found = [(expert_coord(self.setup.plan, coord), coord) for coord in _plane(own, mesh.sizes)]
        return [coord for place, coord in sorted(found) if place.shard == share]

    @property
    def _experts(self) -> Experts:
        assert self.setup.model.experts is not None, "only for models with experts"
        return self.setup.model.experts

    def _place(self, rank: int) -> ExpertCoord:
        return expert_coord(self.setup.plan, mesh_of(self.setup.plan).coord(rank))

    @cached_property
    def _kept(self) -> tuple[tuple[int, ...], ...]:
        """Of `choices` those that find room: the first ones of each expert."""
        room = capacity(self._experts, self.setup.plan.capacity_factor, self.setup.workload.seq_len)
        if room is None:
            return self.choices
        taken: Counter[int] = Counter()
        found = []
        for chosen in self.choices:
            found.append(tuple(e for e in chosen if taken[e] < room))
            taken.update(chosen)
        return tuple(found)


def _part(coord: Coord) -> Coord:
    """Where a rank's tokens stand in their sequences: ranks of different data have the same places."""
    return coord._replace(pipeline=0, replicate=0, shard=0)


def _plane(own: Coord, sizes: Coord) -> Iterator[Coord]:
    """All ranks that the expert mesh of the replica at `own` cuts."""
    for shard in range(sizes.shard):
        for context in range(sizes.context):
            for tensor in range(sizes.tensor):
                yield own._replace(shard=shard, context=context, tensor=tensor)


def most_uneven(experts: Experts | None, ranks: float) -> float:
    """The largest imbalance that `ranks` expert ranks can have."""
    return 1.0 if experts is None else min(ranks, experts.count / experts.top_k)


def imbalance_faults(setup: Setup, imbalance: float) -> list[Fault]:
    """What forbids a stated routing of this `imbalance`."""
    return uneven_faults(setup.model, imbalance, float(setup.plan.expert), *setup.said("plan.expert"))


def uneven_faults(model: ModelSpec, imbalance: float, ranks: float = math.inf, *said: tuple[str, str]) -> list[Fault]:
    """What forbids this `imbalance` over `ranks` expert ranks, or over as many as a plan may have."""
    experts, most = model.experts, most_uneven(model.experts, ranks)
    if 1.0 <= imbalance <= most:
        return []
    has = "no experts" if experts is None else f"experts.count / top_k = {experts.count} / {experts.top_k}"
    dense = experts is None and imbalance > 1.0
    message = "this model has no experts" if dense else f"not between 1 and {most:g}"
    message = f"imbalance = {imbalance:g}, but {message}" if dense else f"imbalance = {imbalance:g} is {message}"
    values = (("--imbalance", f"imbalance = {imbalance:g}"), *said, (model.name, has))
    return [IMBALANCE.fault(message, *values, hint="imbalance = 1" if most == 1 else f"imbalance = 1 to {most:g}")]
