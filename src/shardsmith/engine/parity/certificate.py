"""The parity certificate: a plan on its real ranks against the one-process reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shardsmith.engine.dataset.batches import Batches, Synthetic, batches_of
from shardsmith.engine.dataset.samples import Source
from shardsmith.engine.parity.reference import Arrays, Record, run_reference
from shardsmith.engine.runtime.forked import run_forked
from shardsmith.engine.runtime.grouped import Kernel, kernel_for
from shardsmith.engine.runtime.routing import Choices
from shardsmith.engine.train.rank_model import DTYPES
from shardsmith.engine.train.step import Trainer
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import stored_weights, weights
from shardsmith.units import counted

TOLERANCE = {"float64": 1e-10, "float32": 2e-5}
"""Largest relative error that counts as equal, by compute dtype."""

COMPILE_BACKEND = "aot_eager"
"""Blocks of a plan with `compile` are traced and differentiated ahead of time, but their operators run as they are."""

SGD = Optimisation(optimizer="sgd", lr=1.0, weight_decay=0.01, clip=0.1)
"""Plain SGD, so that a constant factor in a gradient shows, with a clip low enough to be always at work."""


@dataclass(frozen=True, kw_only=True)
class ParameterError:
    """Relative errors of one full tensor: its gradient in step 1, its value after the last step."""

    name: str
    grad_error: float
    value_error: float


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was compared, and how far apart it was; `passed` if nothing exceeds the tolerance of the dtype."""

    setup: Setup
    asked: Setup
    steps: int
    seed: int
    losses: tuple[float, ...]
    loss_error: float
    grad_norm_error: float
    parameters: tuple[ParameterError, ...]
    routing_flips: int = 0

    @property
    def expert_kernel(self) -> Kernel | None:
        """Which kernel multiplied tokens and experts; None without experts."""
        experts, setup = self.setup.model.experts, self.setup
        if experts is None:
            return None
        width = experts.ffn // setup.plan.expert_tensor
        return kernel_for(DTYPES[setup.workload.dtype], setup.model.hidden, width)

    @property
    def tolerance(self) -> float:
        """Largest error allowed in this dtype."""
        return TOLERANCE[self.setup.workload.dtype]

    @property
    def worst(self) -> float:
        """The largest error of all."""
        errors = [max(p.grad_error, p.value_error) for p in self.parameters]
        return max(self.loss_error, self.grad_norm_error, *errors)

    @property
    def passed(self) -> bool:
        """Whether the plan computes what one process computes (a NaN never passes)."""
        return self.worst <= self.tolerance

    @property
    def shrunk(self) -> bool:
        """Whether a smaller model was run than asked for."""
        return self.setup.model != self.asked.model

    def summary(self) -> str:
        """The certificate in a few lines for a person."""
        setup, asked = self.setup, self.asked
        lines = [
            f"{'PASSED' if self.passed else 'FAILED'}: {counted(setup.plan.world, 'rank')} against one process",
            f"  plan      {setup.plan or 'one rank'}",
            f"  model     {setup.model.name}, {setup.workload.dtype}, "
            f"{counted(self.steps, 'step')} of SGD with clipping",
            f"  loss      {self.loss_error:.1e} relative error",
            f"  norm      {self.grad_norm_error:.1e}",
            f"  gradients {max(p.grad_error for p in self.parameters):.1e} "
            f"(worst of {counted(len(self.parameters), 'tensor')})",
            f"  values    {max(p.value_error for p in self.parameters):.1e} after the last step",
            f"  allowed   {self.tolerance:.0e}",
        ]
        if self.expert_kernel is not None:
            replayed = "replayed; " if self.setup.workload.dtype == "float32" else ""
            lines.append(
                f"  experts   {self.expert_kernel}; {replayed}{counted(self.routing_flips, 'token')} chose others"
            )
        if self.shrunk:
            lines.insert(
                2, f"  shrunk    from {counted(asked.plan.world, 'rank')}: {asked.plan}, model {asked.model.name}"
            )
        elif setup.workload.dtype != asked.workload.dtype:
            asked_dtype = asked.workload.dtype
            lines.insert(3, f"  dtype     {setup.workload.dtype}: {asked_dtype}, as asked, rounds too much to judge by")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The certificate as plain JSON values."""
        return {
            "passed": self.passed,
            "tolerance": self.tolerance,
            "loss_error": self.loss_error,
            "grad_norm_error": self.grad_norm_error,
            "params": [vars(p) for p in self.parameters],
            "plan_asked": str(self.asked.plan),
            "plan_run": str(self.setup.plan),
            "shrunk": self.shrunk,
            "model_asked": self.asked.model.name,
            "model_run": self.setup.model.name,
            "ranks": self.setup.plan.world,
            "steps": self.steps,
            "seed": self.seed,
            "losses": list(self.losses),
            "dtype": self.setup.workload.dtype,
            "dtype_asked": self.asked.workload.dtype,
            "expert_kernel": self.expert_kernel,
            "routing_flips": self.routing_flips,
        }


def certify(
    setup: Setup,
    *,
    asked: Setup | None = None,
    steps: int,
    seed: int = 0,
    packed: bool = False,
    timeout_s: float,
) -> Certificate:
    """Train `steps` steps of SGD under the plan and in one process, and compare everything.

    Both see the same initial weights and the same synthetic batches, in which the valid tokens are spread
    unevenly over sequences; `packed` puts several documents into each. In float32 tokens visit the experts that
    they chose in one process, as a rounding error may change a choice; how many would have is reported. Ranks are
    forked: the caller must not have run any torch operation.
    """
    case = Case(setup=setup, steps=steps, seed=seed, packed=packed)
    (certificate,) = certify_together([case], timeout_s=timeout_s)
    return replace(certificate, asked=asked or setup)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan to certify; `source` holds the samples to train on, where they are not the synthetic ones."""

    setup: Setup
    steps: int
    seed: int = 0
    packed: bool = False
    source: Source | None = None


def certify_together(cases: Sequence[Case], *, timeout_s: float) -> list[Certificate]:
    """`certify` for plans of equal world, one after another in the same processes."""
    world = cases[0].setup.plan.world
    assert all(case.setup.plan.world == world for case in cases), "plans that run together have equally many ranks"
    (references,) = run_forked(_references, 1, cases, timeout_s=timeout_s)
    choices = [reference.choices for reference in references]
    by_rank = run_forked(_parts, world, cases, choices, timeout_s=timeout_s)
    found = []
    for case, reference, parts in zip(cases, references, zip(*by_rank, strict=True), strict=True):
        record, flips = _assemble(case.setup, list(parts)), sum(part.routing_flips for part in parts)
        found.append(compare(case.setup, case.setup, reference, record, seed=case.seed, routing_flips=flips))
    return found


def compare(
    setup: Setup, asked: Setup, reference: Record, found: Record, *, seed: int = 0, routing_flips: int = 0
) -> Certificate:
    """The certificate of two records of the same model; a tensor's error as in `relative_errors`."""
    gradients = relative_errors(found.gradients, reference.gradients)
    values = relative_errors(found.values, reference.values)
    return Certificate(
        setup=setup,
        asked=asked,
        steps=len(reference.losses),
        seed=seed,
        losses=found.losses,
        loss_error=_worst(found.losses, reference.losses),
        grad_norm_error=_worst(found.grad_norms, reference.grad_norms),
        parameters=tuple(
            ParameterError(name=name, grad_error=gradients.get(name, 0.0), value_error=values[name])
            for name in reference.values
        ),
        routing_flips=routing_flips,
    )


def relative_errors(found: Arrays, reference: Arrays) -> dict[str, float]:
    """||g - r|| / max(||r||, 1e-3 ||R|| / sqrt(tensors)), R all of the reference: some tensors are identically 0."""
    assert found.keys() == reference.keys(), f"tensors differ: {sorted(found.keys() ^ reference.keys())}"
    total = np.sqrt(sum(float(np.vdot(r, r)) for r in reference.values()))
    floor = 1e-3 * total / np.sqrt(len(reference))
    return {
        name: float(np.linalg.norm(found[name] - r) / max(np.linalg.norm(r), floor)) for name, r in reference.items()
    }


def _worst(found: tuple[float, ...], reference: tuple[float, ...]) -> float:
    """Largest relative difference; of two numbers that are both 0 there is none."""
    return max(0.0 if f == r else abs(f - r) / max(abs(r), 1e-300) for f, r in zip(found, reference, strict=True))


def _batches(case: Case) -> Batches:
    setup, seed, source = case.setup, case.seed, case.source
    if source is None:
        seq_len = setup.workload.seq_len
        source = Synthetic(seed=seed, vocab=setup.model.vocab, seq_len=seq_len, ignored=0.5, packed=case.packed)
    return batches_of(source, seed=seed, setup=setup)


def _references(cases: Sequence[Case]) -> list[Record]:
    """One a case; cases that differ in the plan alone share theirs."""
    found: list[tuple[Case, Record]] = []
    for case in cases:
        alone = replace(
            case, setup=replace(case.setup, plan=Plan(microbatch=1, capacity_factor=case.setup.plan.capacity_factor))
        )
        found.append((alone, next((record for other, record in found if other == alone), None) or _reference(alone)))
    return [record for _, record in found]


def _reference(alone: Case) -> Record:
    setup = alone.setup
    batches = [_batches(alone).batch(step, 0) for step in range(alone.steps)]
    dtype, factor = DTYPES[setup.workload.dtype], setup.plan.capacity_factor
    return run_reference(setup.model, batches, SGD, seed=alone.seed, dtype=dtype, capacity_factor=factor)


@dataclass(frozen=True, kw_only=True)
class _Part:
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    gradients: dict[str, tuple[tuple[int, ...], Any]]
    values: dict[str, tuple[tuple[int, ...], Any]]
    routing_flips: int = 0


def _parts(cases: Sequence[Case], choices: Sequence[tuple[Choices, ...]]) -> list[_Part]:
    return [_part(case, chosen) for case, chosen in zip(cases, choices, strict=True)]


def _part(case: Case, choices: tuple[Choices, ...]) -> _Part:
    rank, cpu = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0, torch.device("cpu")
    trainer = Trainer(
        case.setup, SGD, rank=rank, seed=case.seed, device=cpu, compile_backend=COMPILE_BACKEND, stays=False
    )
    batches = _batches(case)
    trainer.work.forced = case.setup.workload.dtype == "float32"
    results, flips = [], 0
    gradients: dict[str, tuple[tuple[int, ...], Any]] = {}
    for step in range(case.steps):
        trainer.work.replay = choices[step]
        results.append(trainer.step(batches.batch(step, trainer.data_index)))
        flips += sum(int(count) for count in trainer.work.routing.flips.values())
        gradients = gradients or _owned(trainer, gradients=True)
    return _Part(
        losses=tuple(r.loss for r in results),
        grad_norms=tuple(r.grad_norm for r in results),
        gradients=gradients,
        values=_owned(trainer, gradients=False) | _biases(trainer),
        routing_flips=flips,
    )


def _owned(trainer: Trainer, *, gradients: bool) -> dict[str, tuple[tuple[int, ...], Any]]:
    out = {}
    for name, held in trainer.held().items():
        if trainer.owns(name):
            tensor = held.parameter.grad if gradients else held.parameter
            assert tensor is not None, f"{name} has no gradient"
            out[name] = (held.offsets, held.placed(tensor.detach()).double().numpy().copy())
    return out


def _biases(trainer: Trainer) -> dict[str, tuple[tuple[int, ...], Any]]:
    if not trainer.owns_biases:
        return {}
    return {name: ((0,), bias.double().numpy().copy()) for name, bias in trainer.biases().items()}


def _assemble(setup: Setup, parts: list[_Part]) -> Record:
    """Full tensors from the shards that the ranks own; every element must come from exactly one rank."""
    gradients: Arrays = {}
    values: Arrays = {}
    trained = len(weights(setup.model))
    for at, weight in enumerate(stored_weights(setup.model)):
        for target, shards in ((gradients, "gradients"), (values, "values"))[at >= trained :]:
            full = np.full(weight.shape, np.nan)
            filled = 0
            for part in parts:
                if weight.name in getattr(part, shards):
                    offsets, array = getattr(part, shards)[weight.name]
                    full[tuple(slice(o, o + n) for o, n in zip(offsets, array.shape, strict=True))] = array
                    filled += array.size
            assert filled == weight.numel, f"{weight.name}: ranks own {filled} of {weight.numel} elements"
            target[weight.name] = full
    first = parts[0]
    for part in parts:
        same = (part.losses, part.grad_norms) == (first.losses, first.grad_norms)
        assert same, f"ranks report different losses or norms: {part.losses} and {first.losses}"
    return Record(losses=first.losses, grad_norms=first.grad_norms, gradients=gradients, values=values)
