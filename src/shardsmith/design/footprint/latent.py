"""Latent attention in bytes, up to queries, keys and values: `LatentAttention` of `engine/models/decoder.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shardsmith.design.footprint.attention import Three
from shardsmith.design.footprint.norms import Norm
from shardsmith.design.footprint.sizes import Sizes
from shardsmith.design.footprint.tape import Piece, Tape

Later = list[Callable[[], object]]


class Arrivals(Protocol):
    """Where gradients arrive that autograd makes (`Gradients`)."""

    def accumulated(self, name: str) -> None:
        """See `Gradients`."""


class Weights(Protocol):
    """`Block._weights`: the weight gradients of products of one input."""

    def __call__(
        self,
        names: list[str],
        inputs: list[Piece],
        grads: list[Piece],
        later: Later | None,
        *,
        bias: bool,
        gathers: bool = ...,
    ) -> None:
        """See `Block`."""


@dataclass
class Latents:
    """What one layer keeps of one microbatch: `down`, outputs of the down-projections, their norms' `scales`.

    `entered` are the normed latents and the rotated key, as they enter the heads.
    """

    down: list[Piece]
    scales: list[Piece]
    entered: Piece


class LatentTape:
    """The way from hidden states to queries, keys and values of this rank's heads, and back."""

    def __init__(self, tape: Tape, sizes: Sizes, gradients: Arrivals, layer: int) -> None:
        self.tape, self.sizes, self.gradients = tape, sizes, gradients
        model = sizes.setup.model
        assert model.latent is not None, "only for latent attention"
        self.name, self.spec = f"layers.{layer}.attention", model.latent
        self.ranks = [self.spec.kv_rank, *([self.spec.q_rank] if self.spec.q_rank else [])]
        self.norms = [
            Norm(rows=sizes.rows, width=rank, narrow=sizes.narrow, wide=sizes.wide, fused=False) for rank in self.ranks
        ]
        self.width = sum(self.ranks) + self.spec.rope
        of_heads = sizes.all_rows * sizes.heads * sizes.narrow
        self.turned, self.turned_key = of_heads * self.spec.rope, sizes.all_rows * self.spec.rope * sizes.narrow
        self.up = of_heads * (self.spec.nope + self.spec.value)
        self.values = of_heads * self.spec.value
        """Values, or what attention gives back, as wide as they are before they are padded."""

    def forward(self) -> tuple[Latents, Three]:
        """What is kept, and queries, keys and values as the attention kernel takes them."""
        tape, s = self.tape, self.sizes
        kept = self._latents()
        if self.spec.q_rank is None:
            full = tape.new(s.gathered) if s.scattered else None
            q = tape.new(s.queries)
            tape.free(full)
        else:
            q = tape.new(s.queries)
        up = tape.new(self.up)
        turned, key = tape.new(self.turned), tape.new(self.turned_key)
        whole = tape.new(s.queries), tape.new(s.queries)
        tape.free(q)
        values = tape.new(s.queries)
        tape.free(up, turned, key)
        return kept, (*whole, values)

    def backward(
        self, kept: Latents, entering: Piece, grads: list[Piece], later: Later | None, weights: Weights
    ) -> Piece:
        """From gradients of queries, keys and values to that of what entered; `entering` is taken over."""
        tape, s = self.tape, self.sizes
        q, k, v = grads
        values = tape.new(self.values)
        tape.free(v)
        summed = tape.new(self.turned_key)
        key = tape.new(self.turned_key)
        tape.free(summed)
        turned = tape.new(self.turned)
        up = tape.new(self.up)
        tape.free(k, values)
        queries = tape.new(s.queries)
        tape.free(q, turned)
        by_latent = [tape.new(s.all_rows * self.spec.kv_rank * s.narrow)]
        weights(["attention.kv_up"], [tape.hold(kept.entered)], [up], later, bias=False)
        direct: Piece | None = None
        if self.spec.q_rank is None:
            direct = tape.new(s.gathered)
            if s.scattered:
                part = tape.new(s.hidden)
                tape.free(direct)
                direct = part
            weights(["attention.q"], [tape.hold(entering)], [queries], later, bias=False, gathers=s.scattered)
        else:
            by_latent.append(tape.new(s.all_rows * self.spec.q_rank * s.narrow))
            weights(["attention.q"], [tape.hold(kept.entered)], [queries], later, bias=False)
        tape.free(kept.entered)
        entered = tape.new(s.all_rows * self.width * s.narrow)
        tape.free(*by_latent, key)
        return self._down_backward(kept, entering, entered, direct, later, weights)

    def forget(self, kept: Latents) -> None:
        """Let go of everything."""
        self.tape.free(*kept.down, *kept.scales, kept.entered)

    def _latents(self) -> Latents:
        tape, s = self.tape, self.sizes
        extra = [self.spec.rope, 0]
        down = [tape.new(s.rows * (r + more) * s.narrow) for r, more in zip(self.ranks, extra, strict=False)]
        normed = [norm.forward(tape) for norm in self.norms]
        entered = tape.new(s.rows * self.width * s.narrow)
        tape.free(*(out for out, _ in normed))
        if s.scattered:
            full = tape.new(s.all_rows * self.width * s.narrow)
            tape.free(entered)
            entered = full
        return Latents(down=down, scales=[scale for _, scale in normed], entered=entered)

    def _down_backward(
        self, kept: Latents, entering: Piece, grad: Piece, direct: Piece | None, later: Later | None, weights: Weights
    ) -> Piece:
        tape, s = self.tape, self.sizes
        if s.scattered:
            part = tape.new(s.rows * self.width * s.narrow)
            tape.free(grad)
            grad = part
        by_norm: list[Piece] = []
        names = ["kv_norm", "q_norm"][: len(self.norms)]
        for norm, name, x, scale in reversed(list(zip(self.norms, names, kept.down, kept.scales, strict=True))):
            by_norm.append(norm.backward(tape))
            tape.free(x, scale)
            self.gradients.accumulated(f"{self.name}.{name}.weight")
        together = tape.new(s.rows * (self.spec.kv_rank + self.spec.rope) * s.narrow)
        tape.free(grad, by_norm.pop())
        out = tape.new(s.hidden)
        names = ["attention.kv_down", *(["attention.q_down"] if self.spec.q_rank else [])]
        weights(names, [entering], [together, *by_norm], later, bias=False)
        if direct is not None:
            both = tape.new(s.hidden)
            tape.free(out, direct)
            out = both
        return out
