"""The mesh: ranks <-> coordinates, the groups along any axes, and where ranks sit on nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from shardsmith.plan.plan import Plan

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Axes of the dense mesh; the plan's `data` is replicate x shard, with shard varying faster."""


class Coord(NamedTuple):
    """Position of a rank on the dense mesh."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of all axes and `order`, the axes from the fastest varying (neighbouring ranks) to the slowest."""

    sizes: Coord
    order: tuple[str, ...]

    @property
    def world(self) -> int:
        """Number of ranks."""
        count = 1
        for size in self.sizes:
            count *= size
        return count

    @cached_property
    def strides(self) -> Coord:
        """Distance in ranks between neighbours on each axis."""
        stride, by_axis = 1, dict.fromkeys(AXES, 0)
        for axis in self.order:
            by_axis[axis] = stride
            stride *= getattr(self.sizes, axis)
        return Coord(**by_axis)

    def coord(self, rank: int) -> Coord:
        """Coordinates of global `rank`."""
        assert 0 <= rank < self.world, f"rank {rank} is outside a world of {self.world}"
        return Coord(*((rank // stride) % size for stride, size in zip(self.strides, self.sizes, strict=True)))

    def rank(self, coord: Coord) -> int:
        """Global rank at `coord`."""
        return sum(c * stride for c, stride in zip(coord, self.strides, strict=True))

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Ranks that differ from `rank` only along `axes` (itself included), ascending, as torch numbers a group.

        So the axes nest as `order` nests them, however they are given; `place` is the position in the group.
        """
        at = self.coord(rank)
        ranges = [range(getattr(self.sizes, axis)) for axis in axes]
        ranks = (self.rank(at._replace(**dict(zip(axes, place, strict=True)))) for place in product(*ranges))
        return tuple(sorted(ranks))

    def place(self, coord: Coord, *axes: str) -> int:
        """Position of the rank at `coord` in its `group` along `axes`: the coordinate, when that is one axis."""
        number, stride = 0, 1
        for axis in self.order:
            if axis in axes:
                number += getattr(coord, axis) * stride
                stride *= getattr(self.sizes, axis)
        return number

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups along `axes`, each once, by their first rank."""
        return tuple(sorted({self.group(rank, *axes) for rank in range(self.world)}))

    def nodes_spanned(self, rank: int, devices_per_node: int, *axes: str) -> int:
        """Number of nodes that the group of `rank` along `axes` touches, ranks filling nodes in turn."""
        return len({r // devices_per_node for r in self.group(rank, *axes)})


DATA = ("replicate", "shard")
"""The axes that together are the plan's `data` axis."""


def mesh_of(plan: Plan) -> Mesh:
    """The dense mesh of a checked plan."""
    order: list[str] = []
    for axis in plan.order.replace(",", "-").split("-"):
        order.extend(("shard", "replicate") if axis.strip() == "data" else (axis.strip(),))
    assert sorted(order) == sorted(AXES), f"order {plan.order!r} must name tensor, context, data, pipeline once"
    sizes = Coord(
        pipeline=plan.pipeline, replicate=plan.replicate, shard=plan.shard, context=plan.context, tensor=plan.tensor
    )
    return Mesh(sizes=sizes, order=tuple(order))


def data_index(coord: Coord, sizes: Coord) -> int:
    """Which of the `data` replicas a coordinate is: 0 .. data-1, shard varying fastest."""
    return coord.replicate * sizes.shard + coord.shard


class ExpertCoord(NamedTuple):
    """Position of a rank on the expert mesh: which `replicate`, which replica in it, which experts, which part of them.

    `shard` counts the ranks inside one of the plan's replicas that hold the same part of the same experts.
    """

    replicate: int
    shard: int
    expert: int
    tensor: int


def expert_sizes(plan: Plan) -> ExpertCoord:
    """Degrees of the expert mesh, a second cut of the same ranks.

    replicate x shard x expert x tensor = data x context x tensor; its `shard` is what is left of
    data.shard x context x tensor when `expert` and `expert_tensor` are taken out of it.
    """
    plane = plan.shard * plan.context * plan.tensor
    inner = plan.expert * plan.expert_tensor
    assert plane % inner == 0, f"expert x expert_tensor = {inner} does not divide {plane} ranks"
    return ExpertCoord(replicate=plan.replicate, shard=plane // inner, expert=plan.expert, tensor=plan.expert_tensor)


def expert_coord(plan: Plan, coord: Coord) -> ExpertCoord:
    """Where the rank at `coord` of the dense mesh stands on the expert mesh.

    The ranks of one replica are numbered as the plan's order nests their axes, neighbours first; of these numbers
    expert_tensor takes the fastest digit, expert the next, and replicas of the same experts the slowest.
    """
    sizes = expert_sizes(plan)
    number, tensor = divmod(mesh_of(plan).place(coord, "shard", "context", "tensor"), sizes.tensor)
    shard, expert = divmod(number, sizes.expert)
    return ExpertCoord(replicate=coord.replicate, shard=shard, expert=expert, tensor=tensor)


def expert_groups(plan: Plan, *axes: str) -> tuple[tuple[int, ...], ...]:
    """All groups of ranks that differ along `axes` of the expert mesh only, each sorted by those coordinates."""
    mesh = mesh_of(plan)
    found: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for rank in range(mesh.world):
        coord = mesh.coord(rank)
        place = expert_coord(plan, coord)
        fixed = tuple(value for axis, value in zip(ExpertCoord._fields, place, strict=True) if axis not in axes)
        found.setdefault((coord.pipeline, *fixed), []).append((tuple(getattr(place, a) for a in axes), rank))
    return tuple(tuple(rank for _, rank in sorted(members)) for members in found.values())


def positions(plan: Plan) -> tuple[int, ...]:
    """One global rank of every position of the pipeline: coordinate 0 on all other axes."""
    mesh = mesh_of(plan)
    origin = Coord(pipeline=0, replicate=0, shard=0, context=0, tensor=0)
    return tuple(mesh.rank(origin._replace(pipeline=at)) for at in range(plan.pipeline))
