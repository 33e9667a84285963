"""A mixture of experts in bytes: the tensors of `engine/models/experts.py` and its dispatch, in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shardsmith.design.footprint.reductions import Gradients
from shardsmith.design.footprint.sizes import INDEX, Sizes
from shardsmith.design.footprint.tape import Piece, Tape
from shardsmith.layout.axes.expert import local_tokens, routed_activations, takes_grouped
from shardsmith.layout.routing import StatedRouting
from shardsmith.specs.model import Experts

Later = list[Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one dispatch on one rank: `sent` and `received`, and whether received ones must be `sorted`."""

    sent: int
    received: int
    sorted: bool


def rows_of(routing: StatedRouting, rank: int) -> Rows:
    """The rows of global `rank` under the stated `routing`."""
    setup = routing.setup
    assert setup.model.experts is not None, "only for models with experts"
    several = setup.model.experts.count > setup.plan.expert
    return Rows(sent=routing.sent(rank), received=routing.received(rank), sorted=several)


@dataclass
class Routed:
    """What one mixture of experts keeps of one microbatch for its backward pass."""

    x: Piece | None
    """what the router saw, unless it is made again"""
    scores: list[Piece]
    """all that the router keeps beside it"""
    chosen: list[Piece]
    """indices that go with what they index"""
    route: list[Piece]
    """indices that stay as long as the graph"""
    received: Piece
    pending: list[Piece] = field(default_factory=list)
    """rows on their way: as sent, and where they arrive"""
    products: list[Piece] = field(default_factory=list)
    """gate and up"""
    inner: Piece | None = None
    combined: Piece | None = None
    """outputs of the experts, back at the tokens' owner"""


class Mixture:
    """The routed experts of `layer`, whose gradients are in `routed`; that of the router is in `gradients`."""

    def __init__(
        self, tape: Tape, sizes: Sizes, gradients: Gradients, routed: Gradients, rows: Rows, layer: int
    ) -> None:
        setup = sizes.setup
        assert setup.model.experts is not None, "only for layers with experts"
        self.tape, self.sizes, self.gradients, self.routed, self.rows = tape, sizes, gradients, routed, rows
        self.spec: Experts = setup.model.experts
        self.name = f"layers.{layer}.mlp"
        self.tokens = local_tokens(setup)
        self.travels = setup.plan.expert * setup.plan.expert_tensor > 1
        self.apart = setup.plan.tensor > 1 and not sizes.scattered
        keeps = routed_activations(setup, sent=rows.sent, received=rows.received)
        self.mine = self.tokens * setup.model.hidden * sizes.narrow
        self.sent, self.received, self.inner = (n * sizes.narrow for n in (keeps.combined, keeps.received, keeps.inner))
        self.all_scores = self.tokens * self.spec.count * sizes.wide
        self.choices = self.tokens * self.spec.top_k
        self.grouped = takes_grouped(sizes.narrow, setup.model.hidden, self.spec.ffn // setup.plan.expert_tensor)

    def send(self, entering: Piece) -> Routed:
        """Route the tokens of `entering`, and begin to send their rows."""
        tape = self.tape
        x = tape.new(self.mine) if self.apart else tape.hold(entering)
        scores, chosen, route = self._scores(), *self._route()
        rows = tape.new(self.sent)
        arriving = tape.new(self.received) if self.travels else rows
        pending = [rows, arriving] if self.travels else []
        return Routed(x=x, scores=scores, chosen=chosen, route=route, received=arriving, pending=pending)

    def compute(self, kept: Routed) -> Piece:
        """Wait for the rows, compute them and bring them home: outputs for this rank's tokens, or all it holds."""
        tape, s, width = self.tape, self.sizes, self.sizes.narrow
        if self.travels:
            tape.free(kept.pending[0])
            if self.rows.sorted:
                kept.received = tape.new(self.received)
                tape.free(kept.pending[1])
            kept.pending = []
        kept.products = [tape.new(self.inner), tape.new(self.inner)]
        kept.inner = tape.new(self.inner)
        out = tape.new(self.received)
        narrowed = tape.new(self.choices * width) if s.wide > width else None
        if self.travels:
            out = self._sorted(out)
            home = tape.new(self.sent)
            tape.free(out)
            out = home
        kept.combined = out
        kept.chosen += [tape.new(self.rows.sent * width), tape.new(self.rows.sent * INDEX)]
        weighted = tape.new(self.sent)
        mine = tape.new(self.mine)
        tape.free(weighted, narrowed)
        if self.apart:
            joined = tape.new(s.gathered)
            tape.free(mine)
            mine = joined
        return mine

    def reroute(self, kept: Routed) -> None:
        """Of a pass that was made again: its route goes, as that of the first pass serves backward.

        Only the order of the rows was saved beside it.
        """
        self.tape.free(*kept.route[1:])
        kept.chosen[:0], kept.route = kept.route[:1], []

    def forget(self, kept: Routed) -> None:
        """Let go of what recomputation makes again; indices of the route stay."""
        self.tape.free(kept.x, *kept.scores, *kept.chosen, kept.received, *kept.products, kept.inner, kept.combined)

    def forget_inner(self, kept: Routed) -> None:
        """Let go of what selective recomputation makes again."""
        self.tape.free(kept.inner)
        kept.inner = None
        if not self.apart:
            self.tape.free(kept.x)
            kept.x = None

    def back(self, kept: Routed, grad: Piece, later: Later | None) -> list[Piece]:
        """From `grad` of the outputs, which is taken over, to that of the rows received, which begins its way home."""
        tape = self.tape
        combined = tape.new(self.sent)
        tape.free(tape.new(self.sent))  # by the weights of the rows, before it is summed
        tape.free(grad, kept.combined, *kept.chosen[-2:])
        del kept.chosen[-2:]
        if self.travels:
            away = tape.new(self.received)
            tape.free(combined)
            combined = self._sorted(away)
        inner = kept.inner or tape.new(self.inner)
        by_inner = tape.new(self.inner)
        self._weights(["down"], inner, [combined], later)
        product = tape.new(self.inner)
        by_gate = tape.new(self.inner)
        tape.free(product)
        by_up = tape.new(self.inner)
        tape.free(by_inner, *kept.products)
        rows = tape.new(self.received)
        tape.free(tape.new(self.received))
        self._weights(["gate", "up"], kept.received, [by_gate, by_up], later)
        if not self.travels:
            return [rows]
        rows = self._sorted(rows)
        return [rows, tape.new(self.sent)]

    def home(self, kept: Routed, travelling: list[Piece], again: Callable[[], Piece]) -> Piece:
        """The gradient of what entered, from that of the rows sent and from the router.

        `again` makes what entered a second time.
        """
        tape = self.tape
        *left, rows = travelling
        tape.free(*left)
        blank = tape.new(self.mine)
        grad = tape.new(self.mine)
        tape.free(blank, rows, kept.chosen.pop())
        by_router = self._router_backward(kept, again)
        both = tape.new(self.mine)
        tape.free(grad, by_router)
        self.gradients.accumulated(f"{self.name}.router.weight")
        if self.apart:
            whole = tape.new(self.sizes.gathered)
            tape.free(both)
            both = whole
        return both

    def _scores(self) -> list[Piece]:
        """The router, up to the weights of the choices; returns what it keeps."""
        tape, s, e = self.tape, self.sizes, self.spec
        picked, each = self.choices * s.wide, self.tokens * s.wide
        weight = e.count * s.setup.model.hidden
        widened = [tape.new(n * s.wide) for n in (self.mine // s.narrow, weight)] if s.wide > s.narrow else []
        logits = tape.new(self.all_scores)
        tape.free(*widened)
        scores = tape.new(self.all_scores)
        tape.free(tape.new(self.all_scores * ((e.balance == "bias") + (e.groups > 1))))
        kept = [scores]
        of_choices = tape.new(picked)
        if e.normalise:
            kept += [of_choices, tape.new(each)]
            of_choices = tape.new(picked)
        tape.free(of_choices)
        if e.score == "sigmoid":
            sums = tape.new(each)
            tape.free(tape.new(self.all_scores))
            if e.has_aux_loss:
                kept.append(sums)
            else:
                tape.free(sums)
        if e.z_loss:
            kept += [logits, tape.new(each)]
        else:
            tape.free(logits)
        return kept

    def _route(self) -> tuple[list[Piece], list[Piece]]:
        """Where rows go: indices that are kept with what they index, and those that the route holds."""
        tape, rows = self.tape, self.rows
        chosen = [tape.new(self.choices * INDEX)]
        order = tape.new(self.choices * INDEX)
        if not self.travels:
            return [*chosen, order, tape.new(rows.sent * INDEX)], []
        if self.sizes.setup.plan.expert_tensor > 1:
            copied = tape.new(rows.sent * INDEX)
            tape.free(order)
            order = copied
        held = [order]
        if rows.sorted:
            expert = tape.new(rows.received * INDEX)
            held += [tape.new(rows.received * INDEX) for _ in range(2)]
            tape.free(expert)
        return [*chosen, tape.new(rows.sent * INDEX)], held

    def _router_backward(self, kept: Routed, again: Callable[[], Piece]) -> Piece:
        """The gradient of what the router saw."""
        tape, s = self.tape, self.sizes
        weight = self.spec.count * s.setup.model.hidden
        grads = [tape.new(self.all_scores) for _ in range(2)]
        tape.free(*grads, *kept.scores, *kept.chosen)
        kept.chosen = []
        by_logits = tape.new(self.all_scores)
        x = kept.x or again()
        if s.wide == s.narrow:
            by_x = tape.new(self.mine)
        else:
            widened, by_wide = tape.new(weight * s.wide), tape.new(self.mine // s.narrow * s.wide)
            tape.free(widened)
            by_x = tape.new(self.mine)
            tape.free(by_wide)
            tape.free(tape.new(self.mine // s.narrow * s.wide + weight * s.wide))
        tape.free(by_logits, x)
        return by_x

    def _sorted(self, rows: Piece) -> Piece:
        """Rows in another order, where they must be."""
        if not self.rows.sorted:
            return rows
        out = self.tape.new(self.received)
        self.tape.free(rows)
        return out

    def _weights(self, names: list[str], x: Piece, grads: list[Piece], later: Later | None) -> None:
        """Weight gradients of grouped products of the rows `x`, now or when they are due; frees what they need."""

        def compute() -> None:
            for name in names:
                self.routed.stack(f"{self.name}.experts.{name}.weight", made=self.grouped)
            self.tape.free(x, *grads)

        if later is None:
            compute()
        else:
            later.append(compute)
