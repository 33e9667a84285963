"""One training step of one rank, for every plan: the same path whatever the degrees."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardsmith.engine.dataset.batches import Microbatch
from shardsmith.engine.models.decoder import Block, Stage
from shardsmith.engine.models.initialise import materialise
from shardsmith.engine.parallel import context as context_axis
from shardsmith.engine.parallel import expert as expert_axis
from shardsmith.engine.parallel import tensor as tensor_axis
from shardsmith.engine.parallel.data import DataParallel, DataSettings
from shardsmith.engine.parallel.pipeline import Wire
from shardsmith.engine.runtime.groups import Groups, make_groups
from shardsmith.engine.runtime.interpreter import Interpreter
from shardsmith.engine.runtime.linear import Projection
from shardsmith.engine.runtime.packing import rows_first
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.engine.runtime.sequence_parts import Parts
from shardsmith.engine.runtime.units import Gate, Unit
from shardsmith.engine.train.norm import clip_factor, largest_entry, squared_norm
from shardsmith.engine.train.optimizer import make_optimizer
from shardsmith.engine.train.replicas import check_replicas
from shardsmith.engine.train.scaler import LossScaler
from shardsmith.engine.train.stage_work import StageWork
from shardsmith.layout.axes.data import streams_gradients
from shardsmith.layout.axes.tensor import kv_copies
from shardsmith.layout.facts import Shard
from shardsmith.layout.shards import data_shard, shard, stage_weights
from shardsmith.plan.batch import batching
from shardsmith.plan.mesh import Coord, data_index, expert_coord, mesh_of
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import settled, stages
from shardsmith.schedule.forward import forward_only
from shardsmith.schedule.ir import Kind, Order
from shardsmith.schedule.lower import Gather, Payload, lower
from shardsmith.schedule.orders import build
from shardsmith.specs.job import Optimisation
from shardsmith.specs.model import Weight

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TIED = "embedding.weight"
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


@dataclass(frozen=True, kw_only=True)
class Held:
    """What this rank answers for of one full tensor: rows from `offsets` on, as the optimiser has them.

    `parameter` has the dim in front along which ZeRO cuts, which is `dim` of the full tensor.
    """

    offsets: tuple[int, ...]
    parameter: nn.Parameter
    dim: int = 0

    def placed(self, rows: Tensor) -> Tensor:
        """`rows`, laid out as `parameter`, with their dims as in the full tensor (a view)."""
        return rows_first(rows, self.dim)


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
        compile_backend: str = "inductor",
    ) -> None:
        setup = settled(setup)
        self.compile_backend = compile_backend
        self.setup, self.optimisation, self.device = setup, optimisation, device
        self.dtype = DTYPES[setup.workload.dtype]
        mesh = mesh_of(setup.plan)
        self.coord, self.data_index = mesh.coord(rank), data_index(mesh.coord(rank), mesh.sizes)
        self.recorder = Recorder(rank)
        self._every = stages(setup.plan, setup.model)
        ends = (self._every[0].rank, self._every[-1].rank)
        copies = kv_copies(setup.plan, setup.model)
        self.groups: Groups = make_groups(
            mesh,
            rank,
            self.recorder,
            ends=ends,
            kv_copies=copies,
            ulysses=setup.plan.ulysses,
            experts=setup.plan if setup.model.experts is not None else None,
            timeout_s=timeout_s,
        )
        self.parts = Parts(ring=self.groups.ring, ulysses=self.groups.ulysses)
        self.weights: dict[str, Weight] = {}
        self.shards: dict[str, Shard] = {}
        self._drawn: dict[str, Tensor] = {}
        self.stages: dict[int, Stage] = {
            stage.index: self._build(stage.index, stage_weights(setup, stage), seed)
            for stage in self._every
            if stage.rank == self.coord.pipeline
        }
        self._share_tied()
        self._shard_over_data()
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
        # Torch's modules and what was built here stay to the end: the collector need not walk them in every step.
        gc.collect()
        gc.freeze()

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by global name, each once, as the model computes with them."""
        return {name: p for stage in self.stages.values() for name, p in stage.named_parameters()}

    def held(self) -> dict[str, Held]:
        """This rank's rows of every tensor, in the optimiser's dtype, with their place in the full tensor."""
        found = {}
        for data in self._all_data():
            for name, parameter in data.owned.items():
                offsets, dim = list(self.shards[name].offsets), data.dims[name]
                offsets[dim] += data.offsets[name]
                found[name] = Held(offsets=tuple(offsets), parameter=parameter, dim=dim)
        return found

    def gradients(self) -> dict[str, Tensor]:
        """This rank's rows of all gradients, complete once a step's reductions are done; laid out as held rows are."""
        return {name: g for data in self._all_data() for name, g in data.shard_gradients.items()}

    def owns(self, name: str) -> bool:
        """Whether this rank is the one that counts, saves or reports its rows of `name` (replicas: the first)."""
        if self.shards[name].expert:
            place = expert_coord(self.setup.plan, self.coord)
            return place.replicate == 0 and (self.setup.plan.zero > 0 or place.shard == 0)
        if self.coord.replicate:
            return False
        if (self.coord.shard or self.coord.context) and self.setup.plan.zero == 0:
            return False
        if (self.shards[name].tensor_dim is None and self.coord.tensor) or self.shards[name].copy:
            return False
        return name not in self._tied() or self.groups.tied.index == 0

    def biases(self) -> Mapping[str, Tensor]:
        """The balancing biases of this rank's stages, by their global name."""
        return expert_axis.biases(self.stages.values())

    @property
    def owns_biases(self) -> bool:
        """Whether this rank is the one of its pipeline rank that saves and reports them."""
        return self.coord == Coord(pipeline=self.coord.pipeline, replicate=0, shard=0, context=0, tensor=0)

    def check_replicas(self) -> None:
        """Compare what should be equal on several ranks, bit by bit; raises `Refused` (D301) on a difference."""
        every = self.parameters()
        whole = self.setup.plan.zero < 3
        stored = {n: p for d in self._all_data() for n, p in d.stored.items()}
        compared: Mapping[str, Tensor] = every if whole else stored
        routed = {name: p for name, p in compared.items() if self.shards[name].expert}
        compared = {name: p for name, p in compared.items() if name not in routed}
        check_replicas(compared, self.groups.gradient if whole else self.groups.replicate, "data-parallel replicas")
        check_replicas(routed, self.groups.expert_data if whole else self.groups.replicate, "replicas of experts")
        replicated = {name: p for name, p in compared.items() if self.shards[name].tensor_dim is None}
        check_replicas(replicated, self.groups.tensor, "parameters replicated over the tensor axis")
        copied = {name: p for name, p in compared.items() if self.shards[name].copy is not None}
        check_replicas(copied, self.groups.kv_copy, "copies of key/value heads")
        tied = {name: compared[name] for name in self._tied()}
        check_replicas(tied, self.groups.tied, "the two copies of the tied embedding")

    def spread(self) -> None:
        """Bring the rows of `held()` into the weights of all ranks: after an update, and after loading."""
        for data in self._all_data():
            data.publish()

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

    def _build(self, index: int, weights: tuple[Weight, ...], seed: int) -> Stage:
        plan, model = self.setup.plan, self.setup.model
        shards = {w.name: shard(w, plan, model, self.coord) for w in weights}
        with torch.device("meta"):
            module = Stage(model, self._every[index])
        # At level 3 no rank ever holds more of the model than its rows and what is gathered around its use.
        kept = {n: data_shard(s, plan, self.coord) for n, s in shards.items()} if plan.zero == 3 else None
        self._drawn |= materialise(module, weights, shards, seed=seed, dtype=self.dtype, device=self.device, kept=kept)
        tensor_axis.attach(
            module, shards, self.groups.tensor, sequence_parallel=plan.sequence_parallel, overlap=plan.overlap
        )
        expert_axis.attach(module, plan, self.groups)
        context_axis.attach(module, self.parts)
        module.recompute, module.loss_chunk = plan.recompute, plan.loss_chunk
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
        if not self.setup.model.tied or len(self._every) == 1:
            return {}
        return {name: p for name, p in self.parameters().items() if name == TIED}

    def _shard_over_data(self) -> None:
        """Give every stage its gradients and rows, and at ZeRO level 3 its gate."""
        plan, tied = self.setup.plan, self._tied()
        settings = self._data_settings()
        routed = replace(
            settings,
            shard=self.groups.expert_shard if plan.zero else self.groups.alone,
            replicate=self.groups.replicate if plan.zero else self.groups.expert_data,
        )
        self.data: dict[int, list[DataParallel]] = {}
        # The gradient of a tied embedding stays whole until both its stages have finished.
        self.tied_data = DataParallel(tied, {"tied": list(tied)}, replace(settings, stream=False), self._drawn)
        for index, stage in self.stages.items():
            own = {name: p for name, p in stage.named_parameters() if name not in tied}
            self.data[index] = []
            for expert, how in ((False, settings), (True, routed)):
                part = {name: p for name, p in own.items() if self.shards[name].expert is expert}
                dims = {name: self.shards[name].zero_dim for name in part}
                if part or not expert:
                    self.data[index].append(DataParallel(part, _places(part), how, self._drawn, dims, _uses(stage)))
            if plan.zero == 3:
                stage.gate = Gate(self._units(stage, self.data[index]), streaming=plan.zero_gather == "per_pass")
        self._drawn.clear()
        for name, held in self.held().items():
            planned, found = data_shard(self.shards[name], plan, self.coord), tuple(held.placed(held.parameter).shape)
            assert (held.offsets, found) == (planned.offsets, planned.shape), f"{name}: the shard is not as planned"

    def _data_settings(self) -> DataSettings:
        plan, kinds = self.setup.plan, precision(self.setup.plan, self.setup.workload)
        level = plan.zero
        return DataSettings(
            shard=self.groups.shard if level else self.groups.alone,
            replicate=self.groups.replicate if level else self.groups.gradient,
            level=level,
            stream=streams_gradients(plan),
            bucket_mb=plan.bucket_mb,
            grad_dtype=DTYPES[kinds.grad],
            reduce_dtype=DTYPES[kinds.reduce],
            optimizer_dtype=DTYPES[kinds.optimizer],
        )

    def _units(self, stage: Stage, parts: list[DataParallel]) -> dict[str, list[Unit]]:
        """The units of each place of `stage`, in the order of the forward pass; a tied table serves both ends."""
        spec, data = stage.stage, parts[0]
        table = data.units.get("embedding") if not self._tied() else self.tied_data.units.get("tied")
        found: dict[str, list[Unit]] = {}
        if spec.embedding:
            found["embedding"] = [u for u in (data.units.get("embedding"), table) if u is not None]
        for place in map(str, spec.layers):
            found[place] = [part.units[place] for part in parts if place in part.units]
        if spec.head:
            found["head"] = [data.units["head"], *([table] if self.setup.model.tied and table is not None else [])]
        return {place: list(dict.fromkeys(units)) for place, units in found.items()}

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

    def _all_data(self) -> list[DataParallel]:
        return [*(data for parts in self.data.values() for data in parts), self.tied_data]

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


def _places(parameters: Mapping[str, nn.Parameter]) -> dict[str, list[str]]:
    """Names of a stage's parameters by the place that needs them whole: embedding, a layer's index, head."""
    found: dict[str, list[str]] = {}
    for name in parameters:
        first, *rest = name.split(".")
        ends = {"embedding": "embedding", "position": "embedding", "final_norm": "head", "head": "head"}
        found.setdefault(rest[0] if first == "layers" else ends.get(first, first), []).append(name)
    return found


def _uses(stage: Stage) -> dict[str, int]:
    """How often a backward pass adds to the gradients of matrices in place, by name, where that is more than once."""
    halved = {
        n: b for n, b in stage.named_modules() if isinstance(b, Block) and "half_microbatches" in b.mlp.seam.overlap
    }
    return {
        f"{name}.{inner}.weight": 2
        for name, block in halved.items()
        for inner, module in block.named_modules()
        if isinstance(module, Projection)
    }


def _valid_tokens(microbatches: list[Microbatch]) -> int:
    return sum(m.targets for m in microbatches)
