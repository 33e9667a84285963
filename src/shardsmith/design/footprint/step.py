"""The peak memory of a rank of our own engine: its lowered program, played in bytes.

Nothing here is fitted: every piece is a tensor that the engine makes, with the size that follows from model, plan
and workload, and lives as long as there. Not counted are tensors of a few numbers, what kernels need inside
themselves, and what an allocator or a CUDA context reserves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from shardsmith.design.footprint.experts import Rows, rows_of
from shardsmith.design.footprint.gathers import Gate, Unit, gather
from shardsmith.design.footprint.reductions import Gradients
from shardsmith.design.footprint.sizes import INDEX, Sizes
from shardsmith.design.footprint.stage import StageTape
from shardsmith.design.footprint.tape import Piece, Tape
from shardsmith.layout.axes.data import Spread, dense_spread, streams_gradients
from shardsmith.layout.axes.pipeline import has_tied_copies
from shardsmith.layout.routing import StatedRouting
from shardsmith.layout.shards import TIED, Held, data_shard, rank_states, rows_first, spread_of, stage_shards
from shardsmith.plan.batch import batching
from shardsmith.plan.mesh import mesh_of
from shardsmith.plan.precision import precision
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import Stage, stages
from shardsmith.schedule.ir import Action, Kind
from shardsmith.schedule.lower import Exchange, Gather, Payload, Reduce, Reshard, Unshard, lower, reduced
from shardsmith.schedule.orders import build
from shardsmith.units import DTYPE_BYTES

Key = tuple[Payload, int, int]


def footprint(setup: Setup, rank: int, routing: StatedRouting | None = None, *, moments: int = 2) -> dict[str, int]:
    """Bytes by item (`layout.record.ITEMS`) on global `rank` when a step of a legal, settled plan holds most.

    Experts are given the rows that `routing` brings them (balanced unless stated). `moments` as in
    `layout.shards.rank_states` (AdamW: 2).
    """
    if routing is None and setup.model.experts is not None:
        routing = StatedRouting(setup, rank)
    played = _Step(setup, rank, None if routing is None else rows_of(routing, rank), moments)
    played.play()
    return {item: size for item, size in played.tape.at_peak.items() if size}


class _Step:
    """One rank between two steps, and its program."""

    def __init__(self, setup: Setup, rank: int, rows: Rows | None, moments: int) -> None:
        self.rows = rows
        self.coord = mesh_of(setup.plan).coord(rank)
        self.setup, self.tape, self.sizes = setup, Tape(), Sizes(setup, self.coord.context)
        self.held: dict[Key, Piece] = {}
        self.arrived: dict[Key, Piece] = {}
        self.sent: deque[list[Piece]] = deque()
        states = rank_states(setup, rank, moments=moments)
        self.tape.new(states.weights, "weights")
        self.tape.new(states.gradients, "gradients")
        self.tape.new(states.optimizer, "optimizer")
        self.microbatches = batching(setup.plan, setup.workload).microbatches
        places = setup.workload.seq_len + (
            self.sizes.length if setup.plan.context > 1 else 0
        )  # the batch, and its part
        tokens = (2 * self.sizes.sequences + 1) * places
        self.tape.new(self.microbatches * tokens * INDEX, "inputs")
        self._build()

    def play(self) -> None:
        """From the first action to the weights that the optimiser has updated."""
        for step in self._program():
            if isinstance(step, Exchange):
                self._exchange(step)
            elif isinstance(step, Reduce):
                for gradients in self.gradients[step.stage]:
                    gradients.finish()
            elif isinstance(step, Unshard):
                self.stages[step.stage].gate.open_all()
            elif isinstance(step, Reshard):
                self.stages[step.stage].gate.close_all()
            else:
                self._perform(step)
        self._settle(keep=0)
        self._reduce()
        self._update()

    def _build(self) -> None:
        plan, model = self.setup.plan, self.setup.model
        every = stages(plan, model)
        apart = has_tied_copies(self.setup, every)
        self.gradients: dict[int, list[Gradients]] = {}
        self.stages: dict[int, StageTape] = {}
        self.shards: dict[str, Held] = {}
        self.units: list[list[Unit]] = []
        """Each of these in turn, units that are gathered one after another when the optimiser is done."""
        mine = {s.index: stage_shards(self.setup, s, self.coord) for s in every if s.rank == self.coord.pipeline}
        tied = {h.weight.name: h for held in mine.values() for h in held if apart and h.weight.name == TIED}
        dense = dense_spread(plan, self.coord)
        self.tied = Gradients(self.tape, self.setup, _shapes(tied), dense, streams=False)
        of_table = self._units(tied, dense)
        table = of_table.get("embedding")
        for spec in every:
            if spec.index not in mine:
                continue
            held = {h.weight.name: h for h in mine[spec.index]}
            self.shards |= held
            parts: list[Gradients] = []
            units: dict[str, list[Unit]] = {}
            for expert in (False, True):
                own = {n: h for n, h in held.items() if n not in tied and h.shard.expert is expert}
                if expert and not own:
                    continue
                spread = spread_of(next(iter(own.values())).shard, plan, self.coord) if own else dense
                parts.append(Gradients(self.tape, self.setup, _shapes(own), spread, streams=True))
                found = self._units(own, spread)
                self.units.append(list(found.values()))
                for place, unit in found.items():
                    units.setdefault(place, []).append(unit)
            vocab = next((h.shard.shape[0] for h in held.values() if h.weight.role in ("head", "embedding")), 0)
            if spec.head and not model.tied:
                vocab = held["head.weight"].shard.shape[0]
            gate = self._gate(spec, units, table)
            self.gradients[spec.index] = parts
            self.stages[spec.index] = StageTape(
                self.tape,
                self.sizes,
                spec,
                parts[0],
                self.tied if tied else parts[0],
                gate,
                vocab,
                *((parts[1], self.rows) if len(parts) > 1 else ()),
            )
        self.units.append(list(of_table.values()))

    def _units(self, held: Mapping[str, Held], spread: Spread) -> dict[str, Unit]:
        """Units of tensors that are spread alike, by place."""
        width = DTYPE_BYTES[precision(self.setup.plan, self.setup.workload).param]
        shapes = _shapes(held)
        return {
            place: Unit(self.tape, [shapes[n] for n in names], spread.ranks, width)
            for place, names in _places(shapes).items()
        }

    def _gate(self, spec: Stage, units: Mapping[str, list[Unit]], table: Unit | None) -> Gate:
        """The gate of a stage whose own `units` these are; a tied `table` that is another's serves its ends, too."""
        plan = self.setup.plan
        places: dict[str, list[Unit]] = {}
        shared = [table] if table is not None else units.get("embedding", [])
        if spec.embedding:
            places["embedding"] = list(dict.fromkeys([*units.get("embedding", []), *([table] if table else [])]))
        places |= {str(layer): units[str(layer)] for layer in spec.layers}
        if spec.head:
            places["head"] = [*units["head"], *(shared if self.setup.model.tied else [])]
        return Gate(places if plan.zero == 3 else {}, streaming=plan.zero == 3 and plan.zero_gather == "per_pass")

    def _program(self) -> tuple[Action | Exchange | Reduce | Unshard | Reshard, ...]:
        plan = self.setup.plan
        order = build(
            plan.schedule,
            pipeline=plan.pipeline,
            microbatches=self.microbatches,
            stages_per_rank=plan.stages_per_rank,
        )
        self.last = order.stages - 1
        gathers: Gather = plan.zero_gather if plan.zero == 3 else "never"
        program = lower(order, gather=gathers, reduce_each=streams_gradients(plan)).ranks[self.coord.pipeline]
        self.reduced = reduced(program)
        return program

    def _perform(self, action: Action) -> None:
        tape, stage = self.tape, self.stages[action.stage]
        with tape.surviving("activations"):
            if action.kind is Kind.W:
                stage.weights(action.microbatch)
                return
            if action.kind is Kind.F:
                entered = self._take(Payload.ACTIVATION, action.stage - 1, action.microbatch)
                if entered is not None:
                    tape.name(entered, "activations")
                out, payload = stage.forward(action.microbatch, entered), Payload.ACTIVATION
            else:
                if action.kind is Kind.B and action in self.reduced:
                    for gradients in self.gradients[action.stage]:
                        gradients.arm()
                incoming = self._take(Payload.GRADIENT, action.stage + 1, action.microbatch)
                if incoming is not None:
                    tape.hold(incoming)  # by the caller, until all of backward is over
                out = stage.backward(action.microbatch, incoming, split=action.kind is Kind.I)
                tape.free(incoming)
                payload = Payload.GRADIENT
        if out is not None:
            tape.name(out, "messages")
            self.held[payload, action.stage, action.microbatch] = out

    def _take(self, payload: Payload, stage: int, microbatch: int) -> Piece | None:
        if not 0 <= stage <= self.last:
            return None
        key = (payload, stage, microbatch)
        return self.arrived.pop(key) if key in self.arrived else self.held.pop(key)

    def _exchange(self, step: Exchange) -> None:
        self.sent.append([self.held.pop((t.payload, t.stage, t.microbatch)) for t in step.sends])
        for t in step.receives:
            self.arrived[t.payload, t.stage, t.microbatch] = self.tape.new(self.sizes.hidden, "messages")
        self._settle(keep=2)

    def _settle(self, keep: int) -> None:
        while len(self.sent) > keep:
            self.tape.free(*self.sent.popleft())

    def _reduce(self) -> None:
        """Between the last backward and complete gradients: tied copies, data, and parts over the tensor axis."""
        self.tied.finish()
        for gradients in (*(g for parts in self.gradients.values() for g in parts), self.tied):
            gradients.wait()
        width = DTYPE_BYTES[precision(self.setup.plan, self.setup.workload).grad]
        rows = [data_shard(h.shard, self.setup.plan, self.coord) for h in self.shards.values()]
        for sums in ([r for r in rows if r.partial_over_tensor], [r for r in rows if r.copy is not None]):
            self.tape.free(self.tape.new(width * sum(r.numel for r in sums)))

    def _update(self) -> None:
        """The optimiser, and its rows in the weights of all ranks."""
        plan, kinds = self.setup.plan, precision(self.setup.plan, self.setup.workload)
        kept = sum(data_shard(h.shard, plan, self.coord).numel for h in self.shards.values())
        if kinds.grad != kinds.optimizer:
            self.tape.free(self.tape.new(kept * DTYPE_BYTES[kinds.optimizer]))
        if 0 < plan.zero < 3:
            for units in self.units:
                gather([unit for unit in units if unit.shards > 1], in_place=True)


def _shapes(held: Mapping[str, Held]) -> dict[str, tuple[int, ...]]:
    """Shapes by name, the dim in front that ZeRO cuts."""
    return {name: rows_first(h.shard) for name, h in held.items()}


def _places(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Names by the place that needs them whole: embedding, a layer's index, head."""
    found: dict[str, list[str]] = {}
    for name in shapes:
        first, *rest = name.split(".")
        outside = "embedding" if first in ("embedding", "position") else "head"
        found.setdefault(rest[0] if first == "layers" else outside, []).append(name)
    return found
