"""One training step of one rank, for every plan: the same path whatever the degrees."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from shardsmith.engine.dataset.batches import Microbatch
from shardsmith.engine.parallel import context as context_axis
from shardsmith.engine.parallel import expert as expert_axis
from shardsmith.engine.parallel import tensor as tensor_axis
from shardsmith.engine.parallel.pipeline import Wire
from shardsmith.engine.runtime.interpreter import Interpreter
from shardsmith.engine.train.norm import clip_factor, largest_entry, squared_norm
from shardsmith.engine.train.optimizer import make_optimizer
from shardsmith.engine.train.rank_model import RankModel
from shardsmith.engine.train.scaler import LossScaler
from shardsmith.engine.train.stage_work import StageWork
from shardsmith.layout.axes.data import streams_gradients
from shardsmith.plan.batch import batching
from shardsmith.plan.setup import Setup
from shardsmith.schedule.forward import forward_only
from shardsmith.schedule.ir import Kind, Order
from shardsmith.schedule.lower import Gather, Payload, lower
from shardsmith.schedule.orders import build
from shardsmith.specs.job import Optimisation

FIRST_LOSS_SCALE = 2.0**16


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did, the same numbers on every rank.

    `skipped`: loss or gradient was not finite, so the parameters are those from before. `stop`: some rank
    was asked to stop. `loads` says how the experts were used, where there are any.
    """

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool = False
    stop: bool = False
    loads: expert_axis.Loads | None = None


class Trainer(RankModel):
    """Model, optimiser and communication of one rank: its part of the model, and what a step does with it.

    The process group must be up and hold exactly `plan.world` ranks. `pace` gives the length in seconds
    to which compute actions are padded (measurement of schedules on few cores). `stays`: it is the only trainer
    of its process, to the end.
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
        compile_backend: str = "inductor",
        stays: bool = True,
    ) -> None:
        super().__init__(setup, rank=rank, seed=seed, device=device, timeout_s=timeout_s)
        setup = self.setup
        self.compile_backend, self.optimisation = compile_backend, optimisation
        owned = {name: held.parameter for name, held in self.held().items()}
        self.optimizer = make_optimizer(owned, self.weights, optimisation)
        half = setup.workload.dtype == "float16"
        self.updates = 0
        """Steps that the optimiser took; those that were skipped are not counted."""
        self.scaler = LossScaler(scale=FIRST_LOSS_SCALE if half else 1.0, dynamic=half)
        self.work = StageWork(self.stages, self.data, self.recorder, pace, seed)
        self.steps_taken = 0
        """Steps begun, skipped ones included: what names the dropout masks of the next one."""
        self._prepare_pipeline()
        self.stopping = False
        """Set to ask all ranks to stop after the step; see `StepResult.stop`."""
        if stays:
            # Neither torch's modules nor what was built here: the collector need not walk them in every step.
            gc.collect()
            gc.freeze()

    def move(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """`microbatches` on this rank's device."""
        return [m.to(self.device) for m in microbatches]

    def step(self, microbatches: list[Microbatch]) -> StepResult:
        """Forward, backward, reductions, clipping and one optimiser step on this rank's `microbatches`."""
        for data in self._all_data():
            data.begin()
        self.work.step = self.steps_taken
        self.steps_taken += 1
        tokens, sequences = self._global_tokens(microbatches), self.setup.workload.global_batch
        microbatches = [context_axis.split(m, self.parts) for m in microbatches]
        self.work.begin(microbatches, tokens, self.scaler.scale, sequences=sequences)
        self.interpreter.run(self.work, self.wire)
        self._reduce_gradients()
        result = self._summarise(microbatches)
        if self.setup.model.experts is not None:
            result = replace(result, loads=self._balance(skipped=result.skipped))
        self.scaler.update(finite=not result.skipped)
        if not result.skipped:
            self._update(clip_factor(result.grad_norm, self.optimisation.clip) / self.work.loss_scale)
        return result

    def evaluate(self, microbatches: list[Microbatch]) -> tuple[float, int]:
        """Sum of the losses and number of targets of this rank's part of `microbatches`, by forward passes alone.

        (0, 0) on all ranks but one of those with the same part, so that sums over the world count everything once.
        """
        microbatches = [context_axis.split(m, self.parts) for m in microbatches]
        self.work.begin(microbatches, 1.0, training=False)
        self.forward_interpreter.run(self.work, self.forward_wire)
        return self._counted(microbatches)

    def _prepare_pipeline(self) -> None:
        plan = self.setup.plan
        order = build(
            plan.schedule,
            pipeline=plan.pipeline,
            microbatches=batching(plan, self.setup.workload).microbatches,
            stages_per_rank=plan.stages_per_rank,
        )
        if plan.compile:
            split = any(action.kind is Kind.W for actions in order.ranks for action in actions)
            for stage in self.stages.values():
                stage.compile_blocks(self.compile_backend, split=split)
        self.interpreter, self.wire = self._program(order)
        self.forward_interpreter, self.forward_wire = self._program(forward_only(order))

    def _program(self, order: Order) -> tuple[Interpreter[Tensor], Wire]:
        """What performs `order` on this rank, and its wire, which checks the messages of the first run."""
        plan = self.setup.plan
        gather: Gather = plan.zero_gather if plan.zero == 3 else "never"
        steps = lower(order, gather=gather, reduce_each=streams_gradients(plan)).ranks[self.coord.pipeline]
        wires = {Payload.ACTIVATION: self.groups.forward, Payload.GRADIENT: self.groups.backward}
        return Interpreter(steps, order.stages), Wire(wires, self._message_shape, self.dtype, self.device)

    def _message_shape(self, microbatch: int) -> tuple[int, ...]:
        length, sequences = self.work.microbatches[microbatch].tokens.t().shape
        if self.setup.plan.sequence_parallel:
            length //= self.setup.plan.tensor
        return (length, sequences, self.setup.model.hidden)

    def _global_tokens(self, microbatches: list[Microbatch]) -> float:
        """Valid tokens of the step over all data ranks, of whole sequences; only the last stage asks for the number."""
        if not any(s.stage.head for s in self.stages.values()):
            return 1.0
        count = torch.tensor(float(_valid_tokens(microbatches)), dtype=torch.float64, device=self.device)
        return max(1.0, self.groups.data.all_reduce(count, "token_count").item())

    def _reduce_gradients(self) -> None:
        """Everything between the last backward and complete gradients on every rank."""
        for bucket in self.tied_data.buckets:
            self.groups.tied.all_reduce(bucket.flat, "tied_embedding")
        self.tied_data.finish()
        for data in self._all_data():
            data.wait()
        gradients = [(self.shards[name], g) for name, g in self.gradients().items()]
        partial = [g for shard, g in gradients if shard.partial_over_tensor]
        tensor_axis.sum_partial_gradients(partial, self.groups.tensor, "partial_gradients")
        copied = [g for shard, g in gradients if shard.copy is not None]
        tensor_axis.sum_partial_gradients(copied, self.groups.kv_copy, "kv_copies")

    def _summarise(self, microbatches: list[Microbatch]) -> StepResult:
        """Loss, norm and tokens of the whole step in one small collective over all ranks."""
        counted = [g for name, g in self.gradients().items() if self.owns(name)]
        loss, tokens = self._counted(microbatches)
        mine = torch.tensor([0.0, loss, float(tokens), self.stopping], dtype=torch.float64, device=self.device)
        mine[0] = squared_norm(counted)
        square, loss, count, stop = self.groups.world.all_reduce(mine, "step_summary").tolist()
        norm = square**0.5
        if self.optimisation.norm == "max":
            largest = largest_entry(counted).to(self.device)
            norm = self.groups.world.all_reduce(largest, "largest_gradient", dist.ReduceOp.MAX).item()
        return StepResult(
            loss=loss / max(1.0, count),
            grad_norm=norm / self.work.loss_scale,
            tokens=int(count),
            skipped=not (math.isfinite(loss) and math.isfinite(square)),
            stop=stop > 0,
        )

    def _balance(self, *, skipped: bool) -> expert_axis.Loads:
        """How the experts were used in the step; biases follow it, where they balance."""
        setup, stages = self.setup, self.stages.values()
        sequences = setup.workload.global_batch
        loads = expert_axis.gather_loads(self.work.routing, setup.model, sequences, self.groups.world, self.device)
        if not skipped and setup.model.experts is not None and setup.model.experts.balance == "bias":
            expert_axis.balance(stages, loads, setup.model)
        return loads

    def _counted(self, microbatches: list[Microbatch]) -> tuple[float, int]:
        """Losses and targets that this rank has to report; (0, 0) where another rank reports them."""
        if not self.work.loss_sums or self.coord.tensor:
            return 0.0, 0
        loss = torch.stack([self.work.loss_sums[m] for m in sorted(self.work.loss_sums)]).double().sum()
        return float(loss), _valid_tokens(microbatches)

    def _update(self, factor: float) -> None:
        """Scale all gradients by `factor`, let the optimiser work on this rank's rows, and spread the result."""
        if factor != 1.0:
            torch._foreach_mul_(list(self.gradients().values()), factor)
        for data in self._all_data():
            data.hand_over()
        self.optimizer.step()
        self.updates += 1
        self.spread()


def _valid_tokens(microbatches: list[Microbatch]) -> int:
    return sum(m.targets for m in microbatches)
