"""Which dtype each kind of state is kept in, where a plan leaves it open."""

from __future__ import annotations

from dataclasses import dataclass

from shardsmith.plan.plan import Plan
from shardsmith.specs.job import Workload
from shardsmith.units import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtype names of weights, accumulated gradients, gradient reductions and optimiser moments."""

    param: str
    grad: str
    reduce: str
    optimizer: str

    @property
    def master(self) -> bool:
        """Whether the optimiser keeps its own copy of the weights, because theirs is narrower than its dtype."""
        return DTYPE_BYTES[self.param] < DTYPE_BYTES[self.optimizer]


def precision(plan: Plan, workload: Workload) -> Precision:
    """The dtypes that `plan` means: weights follow the workload, everything else is at least float32.

    Gradients are reduced in the dtype in which they are accumulated unless the plan says otherwise.
    """
    wide = "float64" if workload.dtype == "float64" else "float32"
    grad = plan.grad_dtype or wide
    return Precision(
        param=plan.param_dtype or workload.dtype,
        grad=grad,
        reduce=plan.reduce_dtype or grad,
        optimizer=plan.optimizer_dtype or wide,
    )
