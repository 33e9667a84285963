"""The part of a model that one rank holds under a plan: stages, rows that ZeRO leaves it, gradients, what it owns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shardsmith.engine.models.decoder import Block, Stage
from shardsmith.engine.models.initialise import materialise
from shardsmith.engine.parallel import context as context_axis
from shardsmith.engine.parallel import expert as expert_axis
from shardsmith.engine.parallel import tensor as tensor_axis
from shardsmith.engine.parallel.data import DataParallel, DataSettings
from shardsmith.engine.runtime.groups import Groups, make_groups
from shardsmith.engine.runtime.linear import Projection
from shardsmith.engine.runtime.packing import rows_first
from shardsmith.engine.runtime.recorder import Recorder
from shardsmith.engine.runtime.sequence_parts import Parts
from shardsmith.engine.runtime.units import Gate, Unit
from shardsmith.engine.train.replicas import check_replicas
from shardsmith.layout.axes.data import streams_gradients
from shardsmith.layout.axes.tensor import kv_copies
from shardsmith.layout.facts import Shard
from shardsmith.layout.shards import data_shard, shard, stage_weights
from shardsmith.plan.mesh import Coord, data_index, expert_coord, mesh_of
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import settled, stages
from shardsmith.specs.model import Weight

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TIED = "embedding.weight"


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


class RankModel:
    """Stages, groups and shards of one rank; the process group must be up and hold exactly `plan.world` ranks."""

    def __init__(self, setup: Setup, *, rank: int, seed: int, device: torch.device, timeout_s: float) -> None:
        setup = settled(setup)
        self.setup, self.device = setup, device
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

    def _all_data(self) -> list[DataParallel]:
        return [*(data for parts in self.data.values() for data in parts), self.tied_data]


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
