"""What gradients cost between backward and the optimiser: `engine/parallel/data.py` in bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from shardsmith.design.footprint.tape import Piece, Tape
from shardsmith.layout.axes.data import (
    IN_FLIGHT,
    Spread,
    buckets,
    chunk_elements,
    data_rows,
    streams_gradients,
)
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.units import DTYPE_BYTES, MIB

Shape = tuple[int, ...]


@dataclass(eq=False)
class _Bucket:
    """The memory of one bucket: what fills (`pending`), and what is in flight, its input and its result."""

    names: tuple[str, ...]
    whole: int
    part: int
    kept: int
    waiting: set[str] = field(default_factory=set)
    flushed: bool = False
    pending: Piece | None = None
    flying: list[Piece] = field(default_factory=list)


class Gradients:
    """The gradients of one stage's parameters, `shapes` by name in the order of the forward pass.

    All are spread alike (`spread`), with the dim that ZeRO cuts first.
    Not `direct` are those whose products make a tensor first, as gradients accumulate in another dtype or at
    once in a bucket. `streams` is off for a tied embedding.
    """

    def __init__(self, tape: Tape, setup: Setup, shapes: Mapping[str, Shape], spread: Spread, *, streams: bool) -> None:
        plan, kinds = setup.plan, precision(setup.plan, setup.workload)
        self.tape, self.shapes = tape, shapes
        self.shards, self.replicas = spread.ranks, spread.replicas
        self.streams = streams and streams_gradients(plan)
        self.direct = kinds.grad == kinds.param and not self.streams
        self.same = kinds.reduce == kinds.grad
        self.copies = self.streams or self.shards > 1 or not self.same
        self.param, self.grad, self.reduce = (DTYPE_BYTES[k] for k in (kinds.param, kinds.grad, kinds.reduce))
        self._armed = False
        self._in_flight: deque[_Bucket] = deque()
        self.buckets = [self._bucket(names, spread.index) for names in self._named(plan.bucket_mb * MIB)]
        self._place = {name: bucket for bucket in self.buckets for name in bucket.names}

    def arm(self) -> None:
        """Let the backward pass to come flush buckets as they become complete."""
        self._armed = True
        for bucket in self.buckets:
            bucket.waiting, bucket.flushed = set(bucket.names), False

    def product(self, name: str, *, last: bool = True) -> None:
        """The weight gradient of a product: added in place, or made first; not the `last` one leaves it incomplete."""
        self._arrive(name, made=not self.direct, last=last)

    def stack(self, name: str, *, made: bool) -> None:
        """The gradients of stacked experts: `made` at once and then added, or added expert by expert."""
        gradient = self.tape.new(prod(self.shapes[name]) * self.param) if made else None
        self.product(name)
        self.tape.free(gradient)

    def accumulated(self, name: str) -> None:
        """A gradient that autograd makes and hands over."""
        self._arrive(name, made=True)

    def given(self, name: str) -> None:
        """A gradient that was made already."""
        self._arrive(name, made=False)

    def finish(self) -> None:
        """Flush what backward did not."""
        if not self._armed:
            for bucket in self.buckets:
                bucket.flushed = False
        for bucket in self.buckets:
            bucket.waiting.clear()
        self._flush()
        self._armed = False

    def wait(self) -> None:
        """All reductions are done, over the replicas too."""
        for bucket in self.buckets:
            self._settle(bucket)
            if (self.shards > 1 or self.streams) and self.replicas > 1:
                self._all_reduce(bucket, bucket.kept)
                self._settle(bucket)

    def _named(self, limit: float) -> Sequence[tuple[str, ...]]:
        return buckets([(name, prod(shape) * self.grad) for name, shape in self.shapes.items()], limit)

    def _bucket(self, names: tuple[str, ...], index: int) -> _Bucket:
        shapes = [self.shapes[name] for name in names]
        part = chunk_elements(shapes, self.shards) * self.reduce
        kept = sum(data_rows(shape[0], self.shards, index)[1] * prod(shape[1:]) for shape in shapes)
        return _Bucket(names=names, whole=self.shards * part, part=part, kept=kept)

    def _arrive(self, name: str, *, made: bool, last: bool = True) -> None:
        bucket = self._place.get(name)
        if bucket is None:
            return  # a tensor of no elements
        gradient = self.tape.new(prod(self.shapes[name]) * self.param) if made else None
        if self.streams and bucket.pending is None:
            bucket.pending = self.tape.new(bucket.whole, "buckets")
        if self.streams and self.shapes[name][0] % self.shards:
            padded = chunk_elements([self.shapes[name]], self.shards) * self.shards * self.reduce
            self.tape.free(self.tape.new(padded))
        if self._armed and last:
            bucket.waiting.discard(name)
            self._flush()
        self.tape.free(gradient)

    def _flush(self) -> None:
        for bucket in self.buckets:
            if bucket.waiting:
                return
            if bucket.flushed:
                continue
            if self.copies:
                while len(self._in_flight) >= IN_FLIGHT:
                    self._settle(self._in_flight.popleft())
                self._in_flight.append(bucket)
            bucket.flushed = True
            self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        if self.streams:
            self._settle(bucket)
            pending, bucket.pending = bucket.pending, None
            pending = pending or self.tape.new(bucket.whole, "buckets")
        elif self.shards > 1:
            pending = self.tape.new(bucket.whole, "buckets")
        else:
            self._all_reduce(bucket, bucket.kept)
            return
        bucket.flying = [pending]
        if self.shards > 1:
            bucket.flying.append(self.tape.new(bucket.part, "buckets"))

    def _all_reduce(self, bucket: _Bucket, elements: int) -> None:
        """In place where the rows lie together in the dtype of the reduction; else on a copy."""
        together = self.streams or self.shards == 1
        if self.replicas == 1 or (together and self.same):
            return
        copy = self.tape.new(elements * self.grad, "buckets")
        if not self.same:
            narrow = self.tape.new(elements * self.reduce, "buckets")
            self.tape.free(copy)
            copy = narrow
        bucket.flying = [copy]

    def _settle(self, bucket: _Bucket) -> None:
        self.tape.free(*bucket.flying)
        bucket.flying = []
