"""Sizes of everything that one rank handles for one microbatch, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardsmith.layout.axes.tensor import kv_copies
from shardsmith.layout.overlap import parts
from shardsmith.plan.batch import batching
from shardsmith.plan.setup import Setup
from shardsmith.units import DTYPE_BYTES

INDEX = 8
"""Bytes of a token, label or position (int64)."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of a rank's tensors of one microbatch.

    `rows` counts the tokens that stand on this rank between blocks (1/tensor of them under sequence parallelism),
    `all_rows` all tokens of the microbatch. `narrow` is the width of the computation, `wide` that of norms and
    loss, at least float32.
    """

    setup: Setup
    context: int = 0
    """which part of the sequence stands here"""
    halves: int = 1
    """into how many parts a microbatch is cut"""

    @cached_property
    def narrow(self) -> int:
        """Bytes of one element of the computation."""
        return DTYPE_BYTES[self.setup.workload.dtype]

    @cached_property
    def wide(self) -> int:
        """Bytes of one element where norms and loss are computed."""
        return max(self.narrow, DTYPE_BYTES["float32"])

    @cached_property
    def sequences(self) -> int:
        """Sequences of a microbatch, or of a half of it."""
        return batching(self.setup.plan, self.setup.workload).microbatch // self.halves

    @cached_property
    def length(self) -> int:
        """Places of a sequence on this rank."""
        return self.setup.workload.seq_len // self.setup.plan.context

    @cached_property
    def mask(self) -> int:
        """What is added to scores where a window hides keys; one for all layers of a stage, 0 where there is none."""
        window = self.setup.model.window if self.setup.plan.context == 1 else None
        return self.length**2 * self.narrow if window is not None and window < self.length else 0

    @cached_property
    def chunked(self) -> bool:
        """Whether products of layers go by chunks."""
        return "chunks" in self.setup.plan.overlap and self.setup.plan.tensor > 1

    @cached_property
    def beside(self) -> bool:
        """Whether sums of input gradients are on their way while weight gradients are computed."""
        asked = "weight_gradient" in self.setup.plan.overlap or self.halves > 1
        return asked and self.setup.plan.tensor > 1

    @cached_property
    def halved(self) -> bool:
        """Whether layers take the halves of a microbatch in turn."""
        return "half_microbatches" in self.setup.plan.overlap and self.setup.plan.tensor > 1

    def chunks(self, size: int) -> list[int]:
        """`size` bytes of all tokens, or of this rank's, as chunks along the sequence."""
        rows = self.length // (self.setup.plan.tensor if self.scattered else 1)
        return [size // rows * (part.stop - part.start) for part in parts(rows)]

    @cached_property
    def all_rows(self) -> int:
        """Tokens of a microbatch, of this rank's part of the sequence."""
        return self.sequences * self.length

    @cached_property
    def scattered(self) -> bool:
        """Whether ranks hold parts of the sequence between blocks."""
        return self.setup.plan.sequence_parallel and self.setup.plan.tensor > 1

    @cached_property
    def rows(self) -> int:
        """Tokens between blocks on this rank."""
        return self.all_rows // (self.setup.plan.tensor if self.scattered else 1)

    @cached_property
    def hidden(self) -> int:
        """Hidden states between blocks."""
        return self.rows * self.setup.model.hidden * self.narrow

    @cached_property
    def gathered(self) -> int:
        """Hidden states of all tokens."""
        return self.all_rows * self.setup.model.hidden * self.narrow

    @cached_property
    def heads(self) -> int:
        """Attention heads of this rank."""
        return self.setup.model.heads // self.setup.plan.tensor

    @cached_property
    def kv_heads(self) -> int:
        """Key/value heads of this rank."""
        plan, model = self.setup.plan, self.setup.model
        return model.kv_heads * kv_copies(plan, model) // plan.tensor

    @cached_property
    def queries(self) -> int:
        """Queries of this rank's heads; keys and values are `keys` each."""
        return self.all_rows * self.heads * self.setup.model.head_dim * self.narrow

    @cached_property
    def keys(self) -> int:
        """Keys of this rank's heads."""
        return self.all_rows * self.kv_heads * self.setup.model.head_dim * self.narrow

    @cached_property
    def log_sums(self) -> int:
        """Logarithms of the sums of exponentials, which attention keeps for its backward pass."""
        return self.all_rows * self.heads * self.wide

    @cached_property
    def inner(self) -> int:
        """One tensor inside the MLP."""
        return self.all_rows * (self.setup.model.ffn // self.setup.plan.tensor) * self.narrow

    @cached_property
    def shared(self) -> int:
        """One tensor inside the shared expert."""
        experts = self.setup.model.experts
        width = 0 if experts is None else experts.shared_ffn
        return self.all_rows * (width // self.setup.plan.tensor) * self.narrow

    @cached_property
    def table(self) -> int:
        """The gradient of a tied table on the fullest rank, as a product makes it."""
        model = self.setup.model
        return -(-model.vocab // self.setup.plan.tensor) * model.hidden * self.narrow
