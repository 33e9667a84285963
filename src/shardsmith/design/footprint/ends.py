"""The two ends of a model in bytes: embedding look-up, and final norm, head and loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardsmith.design.footprint import drops
from shardsmith.design.footprint.norms import Norm
from shardsmith.design.footprint.reductions import Gradients
from shardsmith.design.footprint.sizes import INDEX, Sizes
from shardsmith.design.footprint.tape import Piece, Tape

Later = list[Callable[[], object]]


class Embedding:
    """Token embedding, cut by rows where the tensor axis has several ranks, and learned positions."""

    def __init__(self, tape: Tape, sizes: Sizes, table: Gradients, positions: Gradients, *, shared: bool) -> None:
        self.tape, self.sizes, self.table, self.positions, self.shared = tape, sizes, table, positions, shared
        self.split = sizes.setup.plan.tensor > 1
        self.drops = sizes.setup.model.dropout > 0
        self.learned = sizes.setup.model.positions == "learned"
        place = sizes.setup.model.hidden * sizes.narrow
        length = sizes.length // (sizes.setup.plan.tensor if sizes.scattered else 1)
        self.places = length * place

    def forward(self) -> tuple[Piece, list[Piece]]:
        """Hidden states, and what is kept: which row each token takes, whether it is here, and a mask of dropout."""
        tape, s, kept = self.tape, self.sizes, []
        out = tape.new(s.gathered)
        if self.split:
            kept = [tape.new(s.all_rows * INDEX), tape.new(s.all_rows)]
            masked = tape.new(s.gathered)
            tape.free(out)
            out = masked
        if s.scattered:
            part = tape.new(s.hidden)
            tape.free(out)
            out = part
        if self.learned:
            places = tape.new(self.places)
            added = tape.new(s.hidden)
            tape.free(out, places)
            out = added
        if self.drops:
            left, mask = drops.dropped(tape, s.rows, s.setup.model.hidden, s.hidden)
            tape.free(out)
            return left, [*kept, mask]
        return out, kept

    def backward(self, kept: list[Piece], grad: Piece, by_head: Piece | None) -> None:
        """Takes over `grad` of the output, and the table's gradient `by_head` where it is the head's, too."""
        tape, s = self.tape, self.sizes
        if self.drops:
            *kept, mask = kept
            grad = drops.dropped_backward(tape, mask, grad, s.hidden)
        if self.learned:
            summed = tape.new(self.places) if s.sequences > 1 else None
            self.positions.accumulated("position.weight")
            tape.free(summed)
        if s.scattered:
            full = tape.new(s.gathered)
            tape.free(grad)
            grad = full
        if self.split:
            masked = tape.new(s.gathered)
            tape.free(grad)
            grad = masked
        if not self.shared:
            self.table.product("embedding.weight")
            tape.free(grad, *kept)
            return
        made = tape.new(s.table)
        tape.free(grad, *kept)
        if by_head is not None:
            both = tape.new(s.table)
            tape.free(made, by_head)
            made = both
        self.table.given("embedding.weight")
        tape.free(made)


@dataclass
class HeadKept:
    """What the end of the last stage keeps of one microbatch: of the final norm, of the head, of the loss."""

    x: Piece
    scale: Piece
    entering: Piece
    loss: list[Piece]
    """the exponentials first, unless the loss goes by chunks"""


class Head:
    """Final norm, output head and cross-entropy of this rank's part of the vocabulary (`vocab` rows)."""

    def __init__(self, tape: Tape, sizes: Sizes, gradients: Gradients, table: Gradients, vocab: int) -> None:
        self.tape, self.sizes, self.gradients, self.table, self.vocab = tape, sizes, gradients, table, vocab
        model = sizes.setup.model
        self.fused = model.norm == "layernorm"
        self.name = "embedding.weight" if model.tied else "head.weight"
        self.chunk = sizes.setup.plan.loss_chunk
        self.norm = Norm(rows=sizes.rows, width=model.hidden, narrow=sizes.narrow, wide=sizes.wide, fused=self.fused)

    def forward(self, x: Piece) -> HeadKept:
        """Takes over `x`, the output of the last layer; ends with the loss."""
        entering, scale = self.norm.forward(self.tape)
        loss = self._whole_loss(entering) if self.chunk is None else self._chunked_loss()
        return HeadKept(x=x, scale=scale, entering=entering, loss=loss)

    def backward(self, kept: HeadKept, later: Later | None, *, shared: bool) -> tuple[Piece, Piece | None]:
        """The gradient of the last layer's output, and that of the table where it waits for the table's other use.

        `shared`: the table is the embedding of this very stage, and autograd sums its two gradients.
        """
        apart = shared and later is None
        if self.chunk is None:
            grad, table = self._whole_loss_backward(kept, later, apart=apart)
        else:
            grad, table = self._chunked_loss_backward(kept, later, apart=apart)
        by_norm = self.norm.backward(self.tape)
        self.tape.free(grad, kept.x, kept.scale)
        for kind in ("weight", "bias") if self.fused else ("weight",):
            self.gradients.accumulated(f"final_norm.{kind}")
        return by_norm, table

    def _gathered(self) -> Piece | None:
        return self.tape.new(self.sizes.gathered) if self.sizes.scattered else None

    def _whole_loss(self, entering: Piece) -> list[Piece]:
        tape, s = self.tape, self.sizes
        full = self._gathered()
        logits = tape.new(s.all_rows * self.vocab * s.narrow)
        tape.free(full)
        exponentials = tape.new(s.all_rows * self.vocab * s.wide) if s.wide > s.narrow else tape.hold(logits)
        rest = [tape.new(s.all_rows * size) for size in (2 * s.wide, INDEX, 1, 1)]
        tape.free(tape.new(2 * s.all_rows * s.wide))
        tape.free(logits)
        return [exponentials, *rest]

    def _whole_loss_backward(self, kept: HeadKept, later: Later | None, *, apart: bool) -> tuple[Piece, Piece | None]:
        """Exponentials become the gradient of the logits where they lie; in a narrow dtype it is a copy of that."""
        tape, s = self.tape, self.sizes
        exponentials, *rest = kept.loss
        grad = exponentials
        if s.wide > s.narrow:
            grad = tape.new(s.all_rows * self.vocab * s.narrow)
            tape.free(exponentials)
        tape.free(*rest)
        again = self._gathered() if s.beside else None
        sent = tape.new(s.gathered)
        out = tape.new(s.hidden) if s.scattered else tape.hold(sent)
        if not s.beside:
            tape.free(sent)

        def compute() -> Piece | None:
            full = again or self._gathered()
            table = tape.new(self._table) if apart else None
            if not apart:
                self.table.product(self.name)
            tape.free(full, grad, kept.entering)
            return table

        if later is not None:
            later.append(compute)
            return out, None
        made = compute()
        if s.beside:
            tape.free(sent)
        return out, made

    def _scattered(self, full: Piece) -> Piece:
        if not self.sizes.scattered:
            return full
        part = self.tape.new(self.sizes.hidden)
        self.tape.free(full)
        return part

    def _chunked_loss(self) -> list[Piece]:
        s = self.sizes
        full, logs = self._gathered(), self.tape.new(s.all_rows * s.wide)
        self._chunk()
        self.tape.free(full)
        return [logs]

    @property
    def _table(self) -> int:
        """Bytes of the table's gradient as a product makes it."""
        return self.vocab * self.sizes.setup.model.hidden * self.sizes.narrow

    def _chunked_loss_backward(self, kept: HeadKept, later: Later | None, *, apart: bool) -> tuple[Piece, Piece | None]:
        tape, s = self.tape, self.sizes
        if s.setup.plan.zero == 3:
            later = None  # the gradient of the head is made while the head is whole
        full, out = self._gathered(), tape.new(s.gathered)
        grad = tape.new(self._table) if later is None else None
        self._chunk()
        tape.free(full)

        def compute() -> None:
            full, grad = self._gathered(), tape.new(self._table)
            self._chunk()
            self.table.given(self.name)
            tape.free(full, grad, kept.entering, *kept.loss)

        if later is not None:
            later.append(compute)
        out = self._scattered(out)
        if later is not None:
            return out, None
        tape.free(kept.entering, *kept.loss)
        if not apart:
            self.table.given(self.name)
            tape.free(grad)
        return out, grad if apart else None

    def _chunk(self) -> None:
        """The logits of one chunk, in the computation's dtype and in the wide one."""
        tape, s = self.tape, self.sizes
        assert self.chunk is not None, "the loss goes by chunks"
        widths = {s.wide, s.narrow}
        tape.free(tape.new(min(self.chunk, s.all_rows) * self.vocab * sum(widths)))
