"""Rows of the table of plans: every schedule with every ZeRO level, alone and with each axis inside a stage."""

from __future__ import annotations

from moe_plans import MIXTRAL, sized
from plans import LLAMA, row

from shardsmith.schedule import orders

SCHEDULES = (*orders.names(), "interleaved:4")
ZERO = (0, 1, 2, 3)
AXES = {
    "alone": ("data=2", LLAMA),
    "tensor 2": ("data=2,tensor=2,sequence_parallel=true", LLAMA),
    "expert 2": ("data=2,expert=2", sized(MIXTRAL, ffn=8).with_(layers=4)),
    "context 2": ("context=2", LLAMA),
}
"""Each with two ranks to shard over, which are the context's where data has one."""

SCHEDULE_TABLE = tuple(
    row(
        f"{schedule}, zero {zero}, {axis}",
        f"pipeline=2,{degrees},zero={zero},schedule={schedule},microbatches=4",
        model.with_(tied=zero in (1, 3)),
    )
    for schedule in SCHEDULES
    for axis, (degrees, model) in AXES.items()
    for zero in ZERO
)
