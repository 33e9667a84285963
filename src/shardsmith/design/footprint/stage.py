"""One pipeline stage in bytes: forward, backward and the second half of a split backward of a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardsmith.design.footprint.block import Block
from shardsmith.design.footprint.ends import Embedding, Head, HeadKept
from shardsmith.design.footprint.experts import Rows
from shardsmith.design.footprint.gathers import Gate
from shardsmith.design.footprint.halves import Halves
from shardsmith.design.footprint.reductions import Gradients
from shardsmith.design.footprint.sizes import INDEX, Sizes
from shardsmith.design.footprint.sparse import SparseBlock
from shardsmith.design.footprint.tape import Piece, Tape
from shardsmith.plan.stages import Stage


@dataclass
class Pass:
    """What one forward pass keeps."""

    entered: Piece | None = None
    """the input, where it came from another stage: held until its gradient is complete"""
    looked_up: list[Piece] = field(default_factory=list)
    layers: list[Any] = field(default_factory=list)
    head: HeadKept | None = None


class StageTape:
    """The stage `spec` on one rank; `table` holds the gradient of its embedding or tied head.

    `routed` holds gradients of experts, to which `rows` travel.
    """

    def __init__(
        self,
        tape: Tape,
        sizes: Sizes,
        spec: Stage,
        gradients: Gradients,
        table: Gradients,
        gate: Gate,
        vocab: int,
        routed: Gradients | None = None,
        rows: Rows | None = None,
    ) -> None:
        self.tape, self.sizes, self.spec, self.gate = tape, sizes, spec, gate
        model = sizes.setup.model
        self.shared = model.tied and spec.embedding and spec.head
        embedded = table if model.tied else gradients
        self.embedding = Embedding(tape, sizes, embedded, gradients, shared=self.shared) if spec.embedding else None

        def block(layer: int) -> Block | Halves:
            if routed is not None and rows is not None and model.is_sparse(layer):
                return SparseBlock(tape, sizes, gradients, routed, rows, layer)
            return (Halves if sizes.halved else Block)(tape, sizes, gradients, layer)

        self.blocks = [block(layer) for layer in spec.layers]
        self.head = Head(tape, sizes, gradients, embedded, vocab) if spec.head else None
        turns = model.positions == "rope" and bool(spec.layers)
        width = model.latent.rope if model.latent else model.head_dim
        self.around = 2 * sizes.length * width * sizes.narrow if turns else 0
        if sizes.setup.plan.context > 1 and sizes.setup.plan.recompute == "full" and spec.layers:
            self.around += sizes.length * INDEX  # which places stand here
        self.mask = sizes.mask if spec.layers else 0
        self.live: dict[int, Pass] = {}
        self.deferred: dict[int, list[Callable[[], object]]] = {}

    def forward(self, microbatch: int, x: Piece | None) -> Piece | None:
        """Takes over `x`, the stage's input (None: tokens); returns its output (None: a loss)."""
        tape, kept = self.tape, Pass()
        if x is not None:
            kept.entered = tape.hold(x)
        if self.embedding is not None:
            self.gate.enter("embedding")
            x, kept.looked_up = self.embedding.forward()
            self.gate.leave("embedding")
        assert x is not None, "a stage without embedding has an input"
        tape.new(self.mask)  # of the first pass, kept for all others
        self.mask = 0
        around = tape.new(self.around) if self.around else None
        for block in self.blocks:
            self.gate.enter(str(block.layer))
            x, layer = block.forward(x, around)
            kept.layers.append(layer)
            self.gate.leave(str(block.layer))
        if self.head is not None:
            self.gate.enter("head")
            kept.head = self.head.forward(x)
            self.gate.leave("head")
        tape.free(around)
        self.live[microbatch] = kept
        return None if self.head is not None else x

    def backward(self, microbatch: int, grad: Piece | None, *, split: bool) -> Piece | None:
        """Takes over `grad` of the output; returns that of the input. `split` puts weight gradients off."""
        kept = self.live.pop(microbatch)
        later: list[Callable[[], object]] | None = [] if split else None
        table: Piece | None = None
        if self.head is not None:
            assert kept.head is not None, "the last stage has a loss"
            self.gate.enter_backward("head")
            grad, table = self.head.backward(kept.head, later, shared=self.shared)
            self.gate.leave("head")
        assert grad is not None, "a stage without head is given a gradient"
        while kept.layers:
            block, layer = self.blocks[len(kept.layers) - 1], kept.layers.pop()
            self.gate.enter_backward(str(block.layer))
            grad = block.backward(layer, grad, later)
            self.gate.leave(str(block.layer))
        if self.embedding is not None:
            self.embedding.backward(kept.looked_up, grad, table)
        self.tape.free(kept.entered)
        for block in self.blocks:
            if isinstance(block, Block):
                self.tape.free(*block.graph)
                block.graph.clear()
        if later is not None:
            self.deferred[microbatch] = later
        return None if self.embedding is not None else grad

    def weights(self, microbatch: int) -> None:
        """The weight gradients that were put off."""
        for compute in self.deferred.pop(microbatch):
            compute()
