"""When a loss or gradient is not a finite number: on which rank, and where it is to be seen."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from shardsmith.engine.train.step import StepResult, Trainer
from shardsmith.errors import Code

NOT_FINITE = Code(
    code="R301",
    title="loss or gradient is not finite",
    because="a step with NaN or infinity would spoil every parameter, so the run ends with those of the step before",
)

_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What one rank holds that is not finite: losses by microbatch, names of gradients and of weights."""

    rank: int
    losses: tuple[tuple[int, float], ...]
    gradients: tuple[str, ...]
    weights: tuple[str, ...]


def stop_nonfinite(trainer: Trainer, result: StepResult, step: int) -> NoReturn:
    """Raise `Refused` (R301) on every rank, with the ranks and the first tensors concerned; all ranks must call this.

    Gradients are looked at after their reduction, so all data ranks hold one that began on a single one of
    them; a loss that is not finite names the rank it came from.
    """
    everyone = _everywhere(_look(trainer))
    what = "loss" if not math.isfinite(result.loss) else "gradient"
    value = result.loss if what == "loss" else result.grad_norm
    raise NOT_FINITE.refuse(
        f"step {step}: the {what if what == 'loss' else 'gradient norm'} is {value}",
        *(pair for found in everyone for pair in _said(found)),
        hint="a lower lr, more warmup_steps or a lower clip; nonfinite = 'skip' leaves such steps out",
    )


def _look(trainer: Trainer) -> _Found:
    parameters, gradients = trainer.parameters(), trainer.gradients()
    return _Found(
        rank=dist.get_rank() if dist.is_initialized() else 0,
        losses=tuple((m, x.item()) for m, x in sorted(trainer.work.loss_sums.items()) if not _finite(x)),
        gradients=_bad((name, gradients.get(name)) for name in parameters),
        weights=_bad(parameters.items()),
    )


def _said(found: _Found) -> Iterable[tuple[str, str]]:
    where = f"rank {found.rank}"
    if found.losses:
        yield where, "loss of microbatch " + ", ".join(f"{m} is {value}" for m, value in found.losses[:_NAMED])
    for kind, names in (("gradients", found.gradients), ("weights, before this step,", found.weights)):
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            yield where, f"{kind} not finite: {', '.join(names[:_NAMED])}{more}"


def _bad(named: Iterable[tuple[str, Tensor | None]]) -> tuple[str, ...]:
    return tuple(name for name, x in named if x is not None and not _finite(x))


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _everywhere(mine: _Found) -> list[_Found]:
    if not dist.is_initialized():
        return [mine]
    everyone: list[_Found | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return [found for found in everyone if found is not None]
