"""The reference: one process, the whole model, torch's own loss, autograd, clipping and optimiser.

It shares the model's modules with the engine and nothing else: no interpreter, no buckets, no split
vocabulary, no clipping of ours. What a plan computes is compared with this.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from shardsmith.engine.dataset.batches import Microbatch
from shardsmith.engine.models.decoder import Stage
from shardsmith.engine.models.whole import whole_model
from shardsmith.engine.runtime.noise import noise_of
from shardsmith.engine.runtime.routing import Choices, Routing, RoutingLog
from shardsmith.engine.runtime.vocabulary import IGNORED
from shardsmith.engine.train.optimizer import make_optimizer
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import ModelSpec, weights

Arrays = dict[str, npt.NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a run computed: losses and gradient norms a step, the first step's (clipped) gradients, the last values.

    `values` include balancing biases. `choices` are the experts that tokens chose, a step.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    gradients: Arrays
    values: Arrays
    choices: tuple[Choices, ...] = ()


def run_reference(
    model: ModelSpec,
    batches: list[list[Microbatch]],
    optimisation: Optimisation,
    *,
    seed: int,
    dtype: torch.dtype,
    capacity_factor: float | None = None,
) -> Record:
    """Train on the global batches `batches[step]` and record it all."""
    device = torch.device("cpu")
    module = whole_model(model, seed=seed, dtype=dtype, device=device, capacity_factor=capacity_factor)
    parameters = dict(module.named_parameters())
    optimizer = make_optimizer(parameters, {w.name: w for w in weights(model)}, optimisation)
    losses, norms, choices = [], [], []
    kind = 2.0 if optimisation.norm == "l2" else float("inf")
    gradients: Arrays = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        log = RoutingLog(keeping=True)
        losses.append(_accumulate(module, batch, seed, step, log))
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), optimisation.clip or float("inf"), kind)
        norms.append(float(norm))
        gradients = gradients or {name: _array(p.grad) for name, p in parameters.items() if p.grad is not None}
        optimizer.step()
        choices.append(_choices(log, batch))
        _balance(module, log, model)
    values = {name: _array(p) for name, p in module.state_dict().items()}
    return Record(
        losses=tuple(losses), grad_norms=tuple(norms), gradients=gradients, values=values, choices=tuple(choices)
    )


def _accumulate(module: Stage, batch: list[Microbatch], seed: int, step: int, log: RoutingLog) -> float:
    """Backward of the mean over the valid tokens of all of `batch`; returns that mean.

    Losses of the routers are means over its sequences.
    """
    sequences = sum(len(m.samples) for m in batch)
    tokens = max(1, sum(int((m.labels != IGNORED).sum()) for m in batch))
    total = 0.0
    for at, m in enumerate(batch):
        noise = noise_of(seed, step, m.samples, m.tokens.device)
        routing = Routing(microbatch=at, samples=m.samples, scale=1.0 / sequences, log=log)
        logits_SBV = module(m.tokens.t(), m.positions.t(), m.documents, noise, routing)
        loss = F.cross_entropy(logits_SBV.flatten(0, 1), m.labels.t().flatten(), ignore_index=IGNORED, reduction="sum")
        (loss / tokens).backward()
        total += loss.item()
    return total / tokens


def _choices(log: RoutingLog, batch: list[Microbatch]) -> Choices:
    return {
        (layer, sample): chosen_SBK[:, column].clone()
        for (layer, microbatch), chosen_SBK in log.choices.items()
        for column, sample in enumerate(batch[microbatch].samples)
    }


@torch.no_grad()
def _balance(module: Stage, log: RoutingLog, model: ModelSpec) -> None:
    """Biases of the choice: up where an expert was chosen less than the mean, down where more."""
    for name, bias in module.named_buffers():
        layer = int(name.split(".")[1])
        chosen = [x.flatten() for (at, _), x in log.choices.items() if at == layer]
        counts = torch.bincount(torch.cat(chosen), minlength=len(bias)).double()
        assert model.experts is not None, "only routers have biases"
        bias += (counts.mean() - counts).sign() * model.experts.bias_rate


def _array(x: Tensor) -> npt.NDArray[np.float64]:
    return x.detach().double().cpu().numpy()
