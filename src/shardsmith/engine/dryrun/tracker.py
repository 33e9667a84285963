"""Tracker: which storages live, what each is for, and how many FLOPs are asked for, operator by operator.

A storage counts from the operator that made it until its last tensor is gone, so views and in-place updates cost
nothing and whatever the engine forgets to let go shows. What a kernel needs inside itself is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardsmith.engine.dryrun.products import PRODUCTS

ATEN, PRIM = torch.ops.aten, torch.ops.prim
TEMPORARY = "temporary"


def _grouped_mm(x: Tensor, y: Tensor, offs: Tensor, **unused: Any) -> Tensor:
    """The output of torch's grouped product, whose own fake takes bfloat16 alone where the real one takes float32."""
    if y.dim() == 3:
        return x.new_empty(x.shape[0], y.shape[2])
    return x.new_empty(len(offs), x.shape[0], y.shape[1])


class Tracker(TorchDispatchMode):
    """Sees every operator while it is entered; meant to stand above a `FakeTensorMode`.

    `live` are bytes by label, `at_peak` those when their sum was largest since `start`. What an operator makes gets
    the label that is set (`labelling`), and may get another later (`name`). A number that the host asks of a
    tensor, which has no data, is 0. What is computed of tensors that do have data has them as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.label = TEMPORARY
        self.live: Counter[str] = Counter()
        self.at_peak: Mapping[str, int] = {}
        self.flops: Counter[str] = Counter()
        self._total = self._peak = 0
        self._sizes: dict[int, tuple[int, str]] = {}
        self._watched: dict[int, weakref.ref[UntypedStorage]] = {}
        self._new: set[int] | None = None
        self._data = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles here, and torch's guard against it costs more than this class

    def __enter__(self) -> Tracker:
        self._resize = UntypedStorage.resize_
        tracker, resize = self, self._resize

        def seen(storage: UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            tracker._resized(storage)
            return out

        UntypedStorage.resize_ = seen  # type: ignore[method-assign, assignment]  # no operator, so never dispatched
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *failure: Any) -> None:
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*failure)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `op`, count its FLOPs and the storages it makes."""
        if op is PRIM.device.default:
            return args[0].fake_device
        if not types and (self._data or any(isinstance(x, Tensor) for x in tree_iter(args))):
            with unset_fake_temporarily():
                out = op(*args, **(kwargs or {}))
        elif op is ATEN._local_scalar_dense.default:
            return 0
        elif op is ATEN._grouped_mm.default:
            out = _grouped_mm(*args, **kwargs)
        else:
            out = op(*args, **(kwargs or {}))
        product = PRODUCTS.get(op)
        if product is not None:
            part, count = product(args, kwargs or {}, out)
            self.flops[part] += count
        if isinstance(out, Tensor):
            self._see(out)
        else:
            for x in tree_iter(out):
                if isinstance(x, Tensor):
                    self._see(x)
        return out

    def start(self) -> None:
        """Begin a measurement: the peak is what lives now, FLOPs are 0."""
        self._peak, self.at_peak = self._total, dict(self.live)
        self.flops.clear()

    @contextmanager
    def labelling(self, label: str) -> Iterator[None]:
        """Within, what is made is for `label`."""
        before, self.label = self.label, label
        yield
        self.label = before

    @contextmanager
    def surviving(self, label: str) -> Iterator[None]:
        """What is made within as a temporary and outlives it is for `label` from then on."""
        self._new = set()
        yield
        for key in self._new:
            self._relabel(key, label)
        self._new = None

    @contextmanager
    def with_data(self) -> Iterator[None]:
        """Within, tensors that are made of nothing have data."""
        before, self._data = self._data, True
        yield
        self._data = before

    def name(self, tensors: Iterable[Tensor], label: str) -> None:
        """The storages of `tensors` are for `label`."""
        for x in tensors:
            self._relabel(x.untyped_storage()._cdata, label)

    def _see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._watched[key] = weakref.ref(storage, lambda _: self._gone(key))
        self._sizes[key] = (storage.nbytes(), self.label)
        self._add(storage.nbytes(), self.label)
        if self._new is not None and self.label == TEMPORARY:
            self._new.add(key)

    def _gone(self, key: int) -> None:
        size, label = self._sizes.pop(key)
        del self._watched[key]
        self._total -= size
        self.live[label] -= size
        if self._new is not None:
            self._new.discard(key)

    def _resized(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            return
        size, label = self._sizes[key]
        self._total -= size
        self.live[label] -= size
        self._sizes[key] = (storage.nbytes(), label)
        self._add(storage.nbytes(), label)

    def _relabel(self, key: int, label: str) -> None:
        size, before = self._sizes[key]
        self._sizes[key] = (size, label)
        self.live[before] -= size
        self.live[label] += size

    def _add(self, size: int, label: str) -> None:
        self._total += size
        self.live[label] += size
        if self._total > self._peak:
            self._peak, self.at_peak = self._total, dict(self.live)
