"""The state of a run as parts of blocks: weights, and what the optimiser and random generators keep beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from shardsmith.engine.checkpoint.blocks import Block, whole_block
from shardsmith.engine.checkpoint.record import OptimizerRecord, needed_states
from shardsmith.specs.job import Optimisation


class Rows(Protocol):
    """What a rank keeps of one tensor."""

    @property
    def parameter(self) -> nn.Parameter:
        """What the optimiser updates."""

    def placed(self, rows: Tensor) -> Tensor:
        """`rows`, laid out as `parameter`, with their dims as in the full tensor."""


def optimizer_record(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, optimisation: Optimisation
) -> OptimizerRecord:
    """What the optimiser keeps just now."""
    first = optimizer.state.get(next(iter(parameters.values())), {})
    needs = needed_states(optimisation)
    return OptimizerRecord(
        kind=optimisation.optimizer,
        steps=int(first["step"]) if "step" in first else None,
        states=tuple(key for key in needs if first.get(key) is not None),
        needs=needs,
    )


def optimizer_blocks(
    weights: Mapping[str, Block],
    held: Mapping[str, Rows],
    optimizer: torch.optim.Optimizer,
    record: OptimizerRecord,
) -> dict[str, Block]:
    """The tensors of `record.states` of each parameter, cut as the parameter is: `optimizer.exp_avg.NAME`."""
    return {
        f"optimizer.{key}.{name}": replace(block, tensor=held[name].placed(optimizer.state[held[name].parameter][key]))
        for key in record.states
        for name, block in weights.items()
    }


def prepare_optimizer(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, record: OptimizerRecord | None
) -> None:
    """Give the optimiser the state that `record` tells of, all zero and ready to be filled (None: no state)."""
    optimizer.state.clear()
    if record is None:
        return
    for parameter in parameters.values():
        state: dict[str, Tensor] = {}
        if record.steps is not None:
            state["step"] = torch.tensor(float(record.steps))
        state |= {key: torch.zeros_like(parameter, requires_grad=False) for key in record.states}
        if state:
            optimizer.state[parameter] = state


def generator_blocks(rank: int, device: torch.device) -> dict[str, Block]:
    """Copies of this rank's random generators: `random.cpu.RANK`, and on a GPU `random.cuda.RANK`."""
    found = {f"random.cpu.{rank}": whole_block(torch.get_rng_state())}
    if device.type == "cuda":
        found[f"random.cuda.{rank}"] = whole_block(torch.cuda.get_rng_state(device))
    return found


def restore_generators(blocks: Mapping[str, Block], device: torch.device) -> None:
    """Set this rank's random generators to what was loaded into `blocks`."""
    for name, block in blocks.items():
        if name.startswith("random.cpu."):
            torch.set_rng_state(block.tensor)
        else:
            torch.cuda.set_rng_state(block.tensor, device)
