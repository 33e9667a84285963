"""Each ZeRO row of the table of plans against one process, and proof that broken sharding would be caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from plans import Row, row
from together import Together, certified
from torch import Tensor
from zero_plans import ZERO_TABLE

from shardsmith.engine.parallel.data import Bucket
from shardsmith.engine.runtime.packing import Packing
from shardsmith.engine.runtime.units import Unit

pytestmark = pytest.mark.ranks

CERTIFICATES = Together(ZERO_TABLE)


@pytest.mark.parametrize("found", ZERO_TABLE, ids=lambda found: found.name)
def test_sharded_plan_equals_one_process(found: Row) -> None:
    CERTIFICATES.holds(found)


def _last_microbatch_only(packing: Packing, flat: Tensor, shards: Sequence[Tensor]) -> None:
    packing.write_shards(flat, shards)


def _no_sum_over_replicas(bucket: Bucket) -> None:
    return None


def _no_update_spread(unit: Unit) -> None:
    unit.whole = True


@pytest.mark.parametrize(
    ("owner", "method", "broken", "line"),
    [
        (Packing, "add_shards", _last_microbatch_only, "data=2,zero=2"),
        (Bucket, "_start_all_reduce", _no_sum_over_replicas, "data=4,replicate=2,zero=1"),
        (Unit, "start", _no_update_spread, "data=2,zero=1"),
    ],
)
def test_broken_sharding_is_caught(
    owner: type, method: str, broken: Callable[..., None], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, broken)
    (certificate,) = certified([row("broken", line)], 60.0)
    assert not certificate.passed, f"{owner.__name__}.{method} may be broken without notice"
    assert certificate.worst > 1e-6
