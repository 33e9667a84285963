"""The real training step on toy stages, so that every gradient can be worked out by hand; and batches by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardsmith.engine.dataset.batches import IGNORED, Microbatch
from shardsmith.engine.models.initialise import whole
from shardsmith.engine.parity.reference import Record, run_reference
from shardsmith.engine.runtime.linear import WeightQueue
from shardsmith.engine.train.gather import full_parameters
from shardsmith.engine.train.step import StepResult, Trainer
from shardsmith.layout.facts import Shard
from shardsmith.plan.file import make_setup, parse_plan_line
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import Stage as StageSpec
from shardsmith.plan.stages import stages
from shardsmith.specs.job import Optimisation, Workload
from shardsmith.specs.library import cluster_named
from shardsmith.specs.model import ModelSpec, Weight

Parameters = Mapping[str, Tensor]

PLAIN = Optimisation(optimizer="sgd", lr=1.0, weight_decay=0.0, clip=0.0)
"""SGD without clipping: a parameter moves by exactly its gradient."""


def microbatch(
    index: int, tokens: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], first: int = 0
) -> Microbatch:
    """One microbatch of the given rows, at positions `first` and following."""
    return Microbatch(
        index=index,
        samples=tuple(range(len(tokens))),
        tokens=torch.tensor(tokens),
        labels=torch.tensor(labels),
        positions=torch.arange(first, first + len(tokens[0]))[None],
    )


def random_microbatch(
    index: int, length: int, *, valid: int | None = None, rows: int = 1, first: int = 0
) -> Microbatch:
    """Random tokens below 29 and labels, of which the first `valid` of each row count (None: all)."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, 29, (rows, length), generator=generator)
    labels = torch.randint(0, 29, (rows, length), generator=generator)
    if valid is not None:
        labels[:, valid:] = IGNORED
    return microbatch(index, tokens.tolist(), labels.tolist(), first)


def single(index: int, token: int, label: int = 0) -> Microbatch:
    """One valid token."""
    return microbatch(index, [[token]], [[label]])


@dataclass(frozen=True, kw_only=True)
class Toy:
    """What a stage computes: `value` of every token from what enters, and on the last stage its `loss`.

    `sharded` names parameters of which each tensor rank holds another part.
    """

    parameters: Mapping[str, Sequence[float]]
    value: Callable[[Parameters, Tensor], Tensor]
    loss: Callable[[Parameters, Tensor, Tensor], Tensor] = lambda parameters, left, labels: left
    sharded: frozenset[str] = frozenset()


def scale(name: str = "w") -> Toy:
    """A stage with one weight 1, by which it multiplies."""
    return Toy(parameters={name: [1.0]}, value=lambda p, x: x * p[name])


def given(sharded: Sequence[str] = (), /, **gradients: Sequence[float]) -> Toy:
    """A stage whose parameters, ones at first, get the `gradients` named here from every valid token."""
    asked = {name: torch.tensor(g, dtype=torch.float64) for name, g in gradients.items()}
    return Toy(
        parameters={name: [1.0] * len(g) for name, g in gradients.items()},
        value=lambda p, x: x + sum((p[name] * g).sum() for name, g in asked.items()),
        sharded=frozenset(sharded),
    )


class ToyStage(nn.Module):
    """A `Toy` in the place of a stage of a model."""

    def __init__(self, stage: StageSpec, toy: Toy) -> None:
        super().__init__()
        self.stage, self.toy, self.queue = stage, toy, WeightQueue()
        for name, values in toy.parameters.items():
            parameter = nn.Parameter(torch.tensor(values, dtype=torch.float64))
            owner, _, attribute = name.rpartition(".")
            if owner:
                setattr(self, owner, nn.ParameterDict({attribute: parameter}))
            else:
                setattr(self, name, parameter)

    def forward(self, x: Tensor, *around: object) -> Tensor:
        """Tokens [S, B] or values [S, B, 1] -> values [S, B, 1]."""
        entered = x.double()[..., None] if self.stage.embedding else x
        return self.toy.value(dict(self.named_parameters()), entered)

    def loss_sum(self, left: Tensor, labels: Tensor) -> Tensor:
        """Sum over all tokens whose label counts."""
        losses = self.toy.loss(dict(self.named_parameters()), left[..., 0], labels)
        return torch.where(labels == IGNORED, 0.0, losses).sum()


class ToyTrainer(Trainer):
    """The real Trainer; only its stages are toys, `toys[i]` for global stage i."""

    def __init__(
        self,
        line: str,
        toys: Sequence[Toy],
        optimisation: Optimisation = PLAIN,
        *,
        seq_len: int = 1,
        tied: bool = False,
    ) -> None:
        self.toys = toys
        plan = parse_plan_line(line)
        microbatches = plan.microbatches or 1
        plan = plan.with_(microbatch=1, microbatches=microbatches)
        model = ModelSpec(
            name="toy",
            layers=len(toys),
            hidden=1,
            heads=1,
            kv_heads=1,
            head_dim=1,
            ffn=1,
            vocab=1,
            context=seq_len,
            positions="learned",
            tied=tied,
        )
        workload = Workload(seq_len=seq_len, global_batch=plan.data * microbatches, dtype="float64")
        setup = Setup(model=model, workload=workload, cluster=cluster_named("local"), plan=plan)
        super().__init__(setup, optimisation, rank=dist.get_rank(), seed=0, device=torch.device("cpu"))

    def _build(self, index: int, weights: tuple[Weight, ...], seed: int) -> ToyStage:  # type: ignore[override]
        toy, tensor = self.toys[index], self.setup.plan.tensor
        module = ToyStage(stages(self.setup.plan, self.setup.model)[index], toy)
        for name, parameter in module.named_parameters():
            shape = tuple(parameter.shape)
            self.weights[name] = Weight(name=name, shape=shape, role="norm", decay=False)
            self.shards[name] = whole(self.weights[name])
            if name in toy.sharded and tensor > 1:
                self.shards[name] = Shard(offsets=(self.coord.tensor * shape[0],), shape=shape, tensor_dim=0)
        return module

    def values(self) -> dict[str, list[float]]:
        """This rank's parameters."""
        return {name: p.detach().tolist() for name, p in self.parameters().items()}

    def grads(self) -> dict[str, list[float]]:
        """Their gradients after the last step."""
        return {name: gradient.tolist() for name, gradient in self.gradients().items()}


def small(
    line: str, model: str = "tiny-llama", *, seq_len: int = 8, dtype: str = "float64", **changes: object
) -> Setup:
    """A real model of few elements under the plan `line`; heads split over 2 and 4 tensor ranks."""
    found = make_setup(plan=line, model=model, seq_len=seq_len, dtype=dtype)
    sizes = {"layers": 4, "hidden": 24, "heads": 4, "kv_heads": 4, "head_dim": 6, "ffn": 24, "vocab": 29}
    return replace(found, model=found.model.with_(**(sizes | {"init_std": 0.2} | changes)))


def trained(
    setup: Setup, batches: Sequence[Sequence[Microbatch]], optimisation: Optimisation = PLAIN
) -> tuple[list[StepResult], dict[str, Tensor] | None]:
    """What this rank reports of each step on `batches[step]`, and the full parameters afterwards (rank 0)."""
    trainer = Trainer(setup, optimisation, rank=dist.get_rank(), seed=0, device=torch.device("cpu"))
    results = [trainer.step(list(batch)) for batch in batches]
    return results, full_parameters(trainer)


def referred(setup: Setup, batches: Sequence[Sequence[Microbatch]], optimisation: Optimisation = PLAIN) -> Record:
    """The same in one process, by torch's own loss, autograd, clipping and optimiser."""
    return run_reference(setup.model, [list(b) for b in batches], optimisation, seed=0, dtype=torch.float64)


def assert_same(
    run_ranks: Callable[..., list],
    setup: Setup,
    batches: Sequence[Sequence[Microbatch]],
    optimisation: Optimisation = PLAIN,
    tolerance: float = 1e-10,
) -> Record:
    """The plan computes what one process computes on these batches, on all of its ranks; returns the latter."""
    (reference,) = run_ranks(1, referred, setup, batches, optimisation)
    ranks = run_ranks(setup.plan.world, trained, setup, batches, optimisation)
    for results, _ in ranks:
        for result, loss, norm in zip(results, reference.losses, reference.grad_norms, strict=True):
            assert abs(result.loss / loss - 1) <= tolerance
            assert abs(result.grad_norm / norm - 1) <= tolerance
    full = ranks[0][1]
    assert full is not None, "rank 0 gathers"
    assert full.keys() == reference.values.keys()
    for name, value in reference.values.items():
        error = abs(full[name].numpy() - value).max() / max(abs(value).max(), 1.0)
        assert error <= tolerance, (name, error)
    return reference
