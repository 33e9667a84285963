"""What the norms of `engine/models/norm.py` allocate, which compute in float32 or wider."""

from __future__ import annotations

from dataclasses import dataclass

from shardsmith.design.footprint.tape import Piece, Tape


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm of `rows` vectors of `width` elements of `narrow` bytes, `fused` (LayerNorm) or composed (RMSNorm)."""

    rows: int
    width: int
    narrow: int
    wide: int
    fused: bool

    @property
    def out(self) -> int:
        """Bytes of its input, or output."""
        return self.rows * self.width * self.narrow

    def forward(self, tape: Tape) -> tuple[Piece, Piece]:
        """The output, and what is kept beside the input: a scale (and a mean) for each row."""
        if self.fused:
            out = tape.new(self.out)
            return out, tape.new(2 * self.rows * self.narrow)
        widened = [tape.new(self._wide)] if self.wide > self.narrow else []
        scale = tape.new(self.rows * self.wide)
        out = tape.new(self._wide)
        if self.wide > self.narrow:
            widened.append(out)
            out = tape.new(self.out)
        tape.free(*widened)
        return out, scale

    def backward(self, tape: Tape) -> Piece:
        """The gradient of the input; beside it live the widened gradient, the unit vectors and their product."""
        if self.fused:
            return tape.new(self.out)
        made = [tape.new(self._wide)] if self.wide > self.narrow else []
        widened = tape.new(self._wide) if self.wide > self.narrow else None
        made.append(tape.new(self._wide))
        tape.free(widened)
        made += [tape.new(self._wide), tape.new(self.rows * self.wide)]
        out = tape.new(self._wide)
        if self.wide > self.narrow:
            made.append(out)
            out = tape.new(self.out)
        tape.free(*made)
        return out

    @property
    def _wide(self) -> int:
        return self.rows * self.width * self.wide
