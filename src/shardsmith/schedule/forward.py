"""The forward half of an order: what an evaluation performs."""

from __future__ import annotations

from dataclasses import replace

from shardsmith.schedule.ir import Kind, Order


def forward_only(order: Order) -> Order:
    """The forwards of `order`, each rank's in the order in which it has them.

    Forwards need nothing but forwards, so what is left of a legal order can be performed and lowered like it;
    no pair is left, as a pair holds a backward.
    """
    ranks = tuple(tuple(action for action in actions if action.kind is Kind.F) for actions in order.ranks)
    return replace(order, name=f"{order.name}, forward only", ranks=ranks, pairs=frozenset())
