"""One training step of one rank, for every plan: the same path whatever the degrees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardsmith.engine.dataset.batches import Microbatch
from shardsmith.engine.models.decoder import Stage
from shardsmith.engine.models.initialise import materialise
from shardsmith.engine.parallel import tensor as tensor_axis
from shardsmith.engine.parallel.data import StageGradients
from shardsmith.engine.parallel.pipeline import Wire
from shardsmith.engine.runtime.groups import Groups, make_groups
from shardsmith.engine.runtime.interpreter import Interpreter
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.engine.runtime.vocabulary import IGNORED
from shardsmith.engine.train.norm import clip_factor, largest_entry, squared_norm
from shardsmith.engine.train.optimizer import make_optimizer
from shardsmith.engine.train.replicas import check_replicas
from shardsmith.engine.train.stage_work import StageWork
from shardsmith.layout.axes.tensor import kv_copies
from shardsmith.layout.facts import Shard
from shardsmith.layout.shards import shard, stage_weights
from shardsmith.plan.batch import batching
from shardsmith.plan.mesh import data_index, mesh_of
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import settled, stages
from shardsmith.schedule.ir import Kind
from shardsmith.schedule.lower import Payload, lower
from shardsmith.schedule.orders import build
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import Weight

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did, the same numbers on every rank."""

    loss: float
    grad_norm: float
    tokens: int


class Trainer:
    """Model, optimiser and communication of one rank.

    The process group must be up and hold exactly `plan.world` ranks. `pace` gives the length in seconds
    to which compute actions are padded (measurement of schedules on few cores).
    """

    def __init__(
        self,
        setup: Setup,
        optimisation: Optimisation,
        *,
        rank: int,
        seed: int,
        device: torch.device,
        timeout_s: float = 300.0,
        pace: Mapping[Kind, float] | None = None,
    ) -> None:
        setup = settled(setup)
        plan, model = setup.plan, setup.model
        self.setup, self.optimisation, self.device = setup, optimisation, device
        self.dtype = DTYPES[setup.workload.dtype]
        mesh = mesh_of(plan)
        self.coord, self.data_index = mesh.coord(rank), data_index(mesh.coord(rank), mesh.sizes)
        self.batching = batching(plan, setup.workload)
        order = build(
            plan.schedule,
            pipeline=plan.pipeline,
            microbatches=self.batching.microbatches,
            stages_per_rank=plan.stages_per_rank,
        )
        self.recorder = Recorder(rank)
        ends = (order.placement[0], order.placement[-1])
        copies = kv_copies(plan, model)
        self.groups: Groups = make_groups(mesh, rank, self.recorder, ends=ends, kv_copies=copies, timeout_s=timeout_s)
        self.weights: dict[str, Weight] = {}
        self.shards: dict[str, Shard] = {}
        self.stages: dict[int, Stage] = {}
        for stage in stages(plan, model):
            if stage.rank == self.coord.pipeline:
                self.stages[stage.index] = self._build(stage.index, stage_weights(setup, stage), seed)
        self._share_tied()
        self.gradients = {index: self._gradients(self._own(index)) for index in self.stages}
        self.tied_gradients = self._gradients(self._tied())
        self.optimizer = make_optimizer(self.parameters(), self.weights, optimisation)
        self.work = StageWork(self.stages, self.gradients, self.recorder, pace)
        self.interpreter: Interpreter[Tensor] = Interpreter(lower(order).ranks[self.coord.pipeline], order.stages)
        wires = {Payload.ACTIVATION: self.groups.forward, Payload.GRADIENT: self.groups.backward}
        self.wire = Wire(wires, self._message_shape, self.dtype, device)

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by global name, each once."""
        return {name: p for stage in self.stages.values() for name, p in stage.named_parameters()}

    def check_replicas(self) -> None:
        """Compare what should be equal on several ranks, bit by bit; raises `Refused` (D301) on a difference."""
        every = self.parameters()
        check_replicas(every, self.groups.data, "data-parallel replicas")
        replicated = {name: p for name, p in every.items() if self.shards[name].tensor_dim is None}
        check_replicas(replicated, self.groups.tensor, "parameters replicated over the tensor axis")
        copied = {name: p for name, p in every.items() if self.shards[name].copy is not None}
        check_replicas(copied, self.groups.kv_copy, "copies of key/value heads")
        check_replicas(self._tied(), self.groups.tied, "the two copies of the tied embedding")

    def move(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """`microbatches` on this rank's device."""
        return [
            replace(
                m,
                tokens=m.tokens.to(self.device),
                labels=m.labels.to(self.device),
                positions=m.positions.to(self.device),
            )
            for m in microbatches
        ]

    def step(self, microbatches: list[Microbatch]) -> StepResult:
        """Forward, backward, reductions, clipping and one optimiser step on this rank's `microbatches`."""
        for gradients in self._all_gradients():
            gradients.zero()
        self.work.begin(microbatches, self._global_tokens(microbatches))
        self.interpreter.run(self.work, self.wire)
        self._reduce_gradients()
        result = self._summarise(microbatches)
        factor = clip_factor(result.grad_norm, self.optimisation.clip)
        if factor != 1.0:
            torch._foreach_mul_([b.flat for g in self._all_gradients() for b in g.buckets], factor)
        self.optimizer.step()
        return result

    def owns(self, name: str) -> bool:
        """Whether this rank is the one that counts, saves or reports its shard of `name` (replicas: the first)."""
        if self.coord.replicate or self.coord.shard or self.coord.context:
            return False
        if (self.shards[name].tensor_dim is None and self.coord.tensor) or self.shards[name].copy:
            return False
        return name not in self._tied() or self.groups.tied.index == 0

    def _build(self, index: int, weights: tuple[Weight, ...], seed: int) -> Stage:
        plan, model = self.setup.plan, self.setup.model
        shards = {w.name: shard(w, plan, model, self.coord) for w in weights}
        with torch.device("meta"):
            module = Stage(model, stages(plan, model)[index])
        materialise(module, weights, shards, seed=seed, dtype=self.dtype, device=self.device)
        tensor_axis.attach(module, shards, self.groups.tensor, sequence_parallel=plan.sequence_parallel)
        self.weights.update({w.name: w for w in weights})
        self.shards.update(shards)
        return module

    def _share_tied(self) -> None:
        """Where a tied model has both its ends on this rank, in two stages, they hold one Parameter."""
        holders = [s for s in self.stages.values() if self.setup.model.tied and hasattr(s, "embedding")]
        for other in holders[1:]:
            other.embedding.weight = holders[0].embedding.weight

    def _tied(self) -> dict[str, nn.Parameter]:
        """The tied embedding where two stages hold it: its gradient is complete only when both have finished."""
        model, plan = self.setup.model, self.setup.plan
        if not model.tied or len(stages(plan, model)) == 1:
            return {}
        return {name: p for name, p in self.parameters().items() if name == "embedding.weight"}

    def _own(self, index: int) -> dict[str, nn.Parameter]:
        tied = self._tied()
        return {name: p for name, p in self.stages[index].named_parameters() if name not in tied}

    def _gradients(self, parameters: dict[str, nn.Parameter]) -> StageGradients:
        dtype = torch.promote_types(self.dtype, torch.float32)
        return StageGradients(list(parameters.items()), self.groups.data, self.setup.plan.bucket_mb, dtype)

    def _all_gradients(self) -> list[StageGradients]:
        return [*self.gradients.values(), self.tied_gradients]

    def _message_shape(self, microbatch: int) -> tuple[int, ...]:
        length, sequences = self.work.microbatches[microbatch].tokens.t().shape
        if self.setup.plan.sequence_parallel:
            length //= self.setup.plan.tensor
        return (length, sequences, self.setup.model.hidden)

    def _global_tokens(self, microbatches: list[Microbatch]) -> float:
        """Valid tokens of the step over all data ranks; only the last stage needs, and asks for, the number."""
        if not any(s.stage.head for s in self.stages.values()):
            return 1.0
        count = torch.tensor(float(_valid_tokens(microbatches)), dtype=torch.float64, device=self.device)
        return max(1.0, self.groups.data.all_reduce(count, "token_count").item())

    def _reduce_gradients(self) -> None:
        """Everything between the last backward and complete gradients on every rank."""
        for name, parameter in self._tied().items():
            assert parameter.grad is not None, f"{name} has its gradient in a bucket"
            self.groups.tied.all_reduce(parameter.grad, "tied_embedding")
        self.tied_gradients.finish()
        for gradients in self._all_gradients():
            gradients.wait()
        partial = [p for name, p in self.parameters().items() if self.shards[name].partial_over_tensor]
        tensor_axis.sum_partial_gradients(partial, self.groups.tensor, "partial_gradients")
        copied = [p for name, p in self.parameters().items() if self.shards[name].copy is not None]
        tensor_axis.sum_partial_gradients(copied, self.groups.kv_copy, "kv_copies")

    def _summarise(self, microbatches: list[Microbatch]) -> StepResult:
        """Loss, norm and tokens of the whole step in one small collective over all ranks."""
        counted = [p.grad for name, p in self.parameters().items() if self.owns(name) and p.grad is not None]
        loss, tokens = 0.0, 0
        if self.work.loss_sums and self.coord.tensor == 0 and self.coord.context == 0:
            loss = float(torch.stack([self.work.loss_sums[m] for m in sorted(self.work.loss_sums)]).double().sum())
            tokens = _valid_tokens(microbatches)
        mine = torch.tensor([0.0, loss, float(tokens)], dtype=torch.float64, device=self.device)
        mine[0] = squared_norm(counted)
        square, loss, count = self.groups.world.all_reduce(mine, "step_summary").tolist()
        norm = square**0.5
        if self.optimisation.norm == "max":
            largest = largest_entry(counted).to(self.device)
            norm = self.groups.world.all_reduce(largest, "largest_gradient", dist.ReduceOp.MAX).item()
        return StepResult(loss=loss / max(1.0, count), grad_norm=norm, tokens=int(count))


def _valid_tokens(microbatches: list[Microbatch]) -> int:
    return sum(int((m.labels != IGNORED).sum()) for m in microbatches)
