"""The data axis: gradients are reduced while backward goes on, and ZeRO keeps one part of the states per rank.

All levels are one path (Rajbhandari et al. 2020). Every parameter is cut by rows over the *shard* group, which
is this rank alone at level 0; a reduction is a reduce-scatter over the shard group, then an all-reduce over the
*replicate* group, which at level 0 is the whole data axis. From level 1 the optimiser works on this rank's
rows; from level 2 gradients exist whole only inside a bucket; at level 3 weights are whole only around their use
(`runtime/units.py`). The loss is already divided by the tokens of the whole step: reductions are plain sums.

Buckets only group communication. They fill in reverse order of the parameters, as backward reaches them, and
flush in that fixed order, never in order of arrival, so all ranks issue the same collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardsmith.engine.runtime.group import Group
from shardsmith.engine.runtime.packing import Packing, flat_views, rows_first, rows_of, shape_rows_first
from shardsmith.engine.runtime.units import Unit, gather
from shardsmith.layout.axes.data import IN_FLIGHT, buckets, data_rows
from shardsmith.units import MIB


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """How the data axis of a run works: groups, level, bucket size and dtypes.

    `stream` reduces every microbatch as soon as it is done (levels 2 and 3 unless weights are gathered once
    per step); otherwise whole gradients are kept until the step's last.
    """

    shard: Group
    replicate: Group
    level: int
    stream: bool
    bucket_mb: float
    grad_dtype: torch.dtype
    reduce_dtype: torch.dtype
    optimizer_dtype: torch.dtype


class Bucket:
    """Parameters whose gradients are reduced by one collective.

    `kept` are whole gradients in one flat buffer, unless the bucket streams; `shards` are this rank's rows,
    complete once the reduction has been waited for. Rows are along `dims[i]` of `parameters[i]`; in buffers and
    shards that dim stands in front.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], settings: DataSettings, dims: Sequence[int]) -> None:
        self.parameters, self.settings, self.dims = list(parameters), settings, list(dims)
        ranks, index = settings.shard.size, settings.shard.index
        device = self.parameters[0].device
        shapes = [shape_rows_first(tuple(p.shape), dim) for p, dim in zip(parameters, dims, strict=True)]
        self.packing = Packing(shapes=tuple(shapes), ranks=ranks)
        self.waiting: dict[int, int] = {}
        """How often gradients have yet to come, by position, until the bucket is complete."""
        self.flushed = False
        self._pending: Tensor | None = None
        self._work: tuple[dist.Work | None, Tensor] | None = None
        if settings.stream:
            self.kept: list[Tensor] = []
            self.rows: list[Tensor] = []
            shapes = [(data_rows(shape[0], ranks, index)[1], *shape[1:]) for shape in shapes]
            self.flat, self.shards = flat_views(shapes, settings.grad_dtype, device)
        else:
            self.flat, self.rows = flat_views(shapes, settings.grad_dtype, device)
            self.kept = [rows_first(g, dim) for g, dim in zip(self.rows, dims, strict=True)]
            self.shards = [rows_of(g, ranks, index) for g in self.rows]

    def zero(self) -> None:
        """Start a step."""
        self.flat.zero_()
        self.flushed = False

    def flush(self) -> None:
        """Start the reduction of everything accumulated since the last flush."""
        self.flushed = True
        if self.settings.stream:
            self.settle()
            pending, self._pending = self._pending, None
            if pending is None:
                pending = self._buffer().zero_()
            self._work = self.settings.shard.reduce_scatter_async(pending, "gradients")
        elif self.settings.shard.size > 1:
            packed = self._buffer()
            self.packing.pack(self.rows, packed)
            self._work = self.settings.shard.reduce_scatter_async(packed, "gradients")
        else:
            self._start_all_reduce()

    def take(self, position: int, gradient: Tensor) -> None:
        """Add one parameter's whole gradient to what is pending (streaming buckets only)."""
        if self._pending is None:
            self._pending = self._buffer().zero_()
        self.packing.add(position, rows_first(gradient, self.dims[position]), self._pending)

    @property
    def copies(self) -> bool:
        """Whether a reduction works on a copy of the gradients, which lives until `settle`."""
        kinds = self.settings
        return kinds.stream or kinds.shard.size > 1 or kinds.reduce_dtype != kinds.grad_dtype

    def wait(self) -> None:
        """Return with this rank's rows summed over all data ranks."""
        self.settle()
        if self.settings.shard.size > 1 or self.settings.stream:
            self._start_all_reduce()
            self._settle_all_reduce()

    def settle(self) -> None:
        """Wait for the reduction in flight, if any, take what it brought and let its buffers go."""
        if self._work is None:
            return
        if self.settings.shard.size == 1 and not self.settings.stream:
            self._settle_all_reduce()
            return
        (work, out), self._work = self._work, None
        if work is not None:
            work.wait()
        if self.settings.stream:
            self.packing.add_shards(out, self.shards)
        else:
            self.packing.write_shards(out, self.shards)

    def _start_all_reduce(self) -> None:
        """Sum this rank's rows over the replicas; in place where they lie together in the reduction's dtype."""
        group = self.settings.replicate
        if group.size == 1:
            return
        together = self.settings.stream or self.settings.shard.size == 1
        if together and self.flat.dtype == self.settings.reduce_dtype:
            payload = self.flat
        else:
            payload = torch.cat([s.reshape(-1) for s in self.shards]).to(self.settings.reduce_dtype)
        self._work = (group.all_reduce_async(payload, "gradients"), payload)

    def _settle_all_reduce(self) -> None:
        if self._work is None:
            return
        (work, payload), self._work = self._work, None
        if work is not None:
            work.wait()
        if payload is not self.flat:
            for shard, part in zip(self.shards, payload.split([s.numel() for s in self.shards]), strict=True):
                shard.copy_(part.view(shard.shape))

    def _buffer(self) -> Tensor:
        size = self.settings.shard.size * self.packing.chunk
        return torch.empty(size, dtype=self.settings.reduce_dtype, device=self.flat.device)


class DataParallel:
    """Gradients, shards and optimiser parameters of one stage.

    `owned` maps names to what the optimiser updates: this rank's rows in the optimiser's dtype, which are the
    parameters themselves (or views of their rows) wherever dtypes agree. `offsets` are the first rows of those.
    `dims` names parameters whose rows are not those of dim 0; owned rows have that dim in front.
    `uses` names those whose gradients come more than once in a backward pass: a bucket is complete with the last.
    At level 3 the parameters come without storage, and `drawn` are this rank's rows of them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        places: Mapping[str, Sequence[str]],
        settings: DataSettings,
        drawn: Mapping[str, Tensor],
        dims: Mapping[str, int] | None = None,
        uses: Mapping[str, int] | None = None,
    ) -> None:
        self.parameters, self.settings = dict(parameters), settings
        self.dims = {name: (dims or {}).get(name, 0) for name in parameters}
        self.uses = {id(p): (uses or {}).get(name, 1) for name, p in parameters.items()}
        ranks, index = settings.shard.size, settings.shard.index
        if settings.level == 3:
            rows = {name: drawn[name] for name in self.parameters}
        else:
            turned = {name: rows_first(p.data, self.dims[name]) for name, p in self.parameters.items()}
            rows = {name: rows_of(t, ranks, index) for name, t in turned.items()}
        self.offsets = {
            name: data_rows(p.shape[self.dims[name]], ranks, index)[0] for name, p in self.parameters.items()
        }
        self.stored = rows
        self.owned = {name: nn.Parameter(_in_dtype(shard, settings.optimizer_dtype)) for name, shard in rows.items()}
        self.buckets = self._make_buckets()
        self.shard_gradients = {
            self._names[id(p)]: shard
            for bucket in self.buckets
            for p, shard in zip(bucket.parameters, bucket.shards, strict=True)
        }
        self.units = {
            place: Unit(
                [self.parameters[n] for n in names],
                [rows[n] for n in names],
                settings.shard,
                [self.dims[n] for n in names],
            )
            for place, names in places.items()
            if names
        }
        self._armed = False
        self._in_flight: deque[Bucket] = deque()
        if settings.level == 3:
            self.free_weights()

    def begin(self) -> None:
        """Start a step: all gradients 0."""
        for bucket in self.buckets:
            bucket.zero()
            for parameter, gradient in zip(bucket.parameters, bucket.kept, strict=False):
                parameter.grad = gradient if gradient.dtype == parameter.dtype else None
        self._armed = False

    def arm(self) -> None:
        """Let the backward pass to come launch the reductions of buckets as they become complete."""
        self._armed = True
        for bucket in self.buckets:
            bucket.waiting = {at: self.uses[id(p)] for at, p in enumerate(bucket.parameters)}
            bucket.flushed = False

    def finish(self) -> None:
        """Flush every bucket that backward did not (a parameter without gradient counts as zero)."""
        if not self._armed:
            for bucket in self.buckets:
                bucket.flushed = False
        for bucket in self.buckets:
            bucket.waiting.clear()
        self._flush()
        self._armed = False

    def wait(self) -> None:
        """Return when this rank's rows of all gradients are complete."""
        for bucket in self.buckets:
            bucket.wait()

    def hand_over(self) -> None:
        """Give the optimiser its gradients, in its own dtype."""
        for name, parameter in self.owned.items():
            gradient = self.shard_gradients.get(name)
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient.to(parameter.dtype)

    def publish(self) -> None:
        """After the optimiser: bring the updated rows into the weights of all ranks."""
        for name, shard in self.stored.items():
            owned = self.owned[name]
            if shard.dtype != owned.dtype:
                shard.copy_(owned.data)
            if owned.dtype != self.settings.grad_dtype:
                owned.grad = None  # a copy in the optimiser's dtype
        if self.settings.level == 3 or self.settings.shard.size == 1:
            return
        for unit in self.units.values():
            unit.whole = False
        gather(list(self.units.values()))

    def free_weights(self) -> None:
        """Give up whole weights (level 3)."""
        for unit in self.units.values():
            unit.free()

    def _make_buckets(self) -> list[Bucket]:
        self._names = {id(p): name for name, p in self.parameters.items()}
        sizes = [(n, p.numel() * self.settings.grad_dtype.itemsize) for n, p in self.parameters.items()]
        found = [
            Bucket([self.parameters[name] for name in names], self.settings, [self.dims[name] for name in names])
            for names in buckets(sizes, self.settings.bucket_mb * MIB)
        ]
        self._place = {id(p): (b, i) for b in found for i, p in enumerate(b.parameters)}
        for parameter in self.parameters.values():
            if id(parameter) in self._place:
                parameter.register_post_accumulate_grad_hook(self._ready)
        return found

    def _ready(self, parameter: Tensor) -> None:
        """A gradient has arrived: move it where it belongs, and flush what is complete."""
        bucket, position = self._place[id(parameter)]
        gradient = parameter.grad
        if gradient is None:
            return  # put off by a split backward: it comes with the W action
        if self.settings.stream:
            bucket.take(position, gradient)
            parameter.grad = None
        elif gradient is not bucket.kept[position]:
            bucket.kept[position].add_(gradient)
            parameter.grad = None
        if self._armed:
            # Autograd calls once more, at the end, for gradients that were accumulated by the linear itself.
            left = bucket.waiting.pop(position, 1) - 1
            if left:
                bucket.waiting[position] = left
            self._flush()

    def _flush(self) -> None:
        for bucket in self.buckets:
            if bucket.waiting:
                return
            if bucket.flushed:
                continue
            if bucket.copies:
                while len(self._in_flight) >= IN_FLIGHT:
                    self._in_flight.popleft().settle()
                self._in_flight.append(bucket)
            bucket.flush()


def _in_dtype(shard: Tensor, dtype: torch.dtype) -> Tensor:
    """`shard` itself where it has that dtype, else a master copy of it."""
    return shard if shard.dtype == dtype else shard.to(dtype)
