"""Who runs what: the layouts, the systems, and the command that starts one rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way of splitting the work; `zero` is the level of sharding over the data ranks."""

    name: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    ulysses: int = 1
    zero: int = 0

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def options(self) -> dict[str, int]:
        """What differs from one process: degrees above 1, and the level."""
        names = ("data", "tensor", "pipeline", "context", "ulysses", "zero")
        every = {name: getattr(self, name) for name in names}
        return {key: value for key, value in every.items() if value != (0 if key == "zero" else 1)}

    @property
    def plan(self) -> str:
        """Shardsmith's one-line plan."""
        return ",".join(f"{key}={value}" for key, value in self.options.items())


LAYOUTS = (
    Layout(name="1 process"),
    Layout(name="data 2", data=2),
    Layout(name="data 2 with ZeRO-1", data=2, zero=1),
    Layout(name="data 2 with ZeRO-2", data=2, zero=2),
    Layout(name="data 2 with ZeRO-3", data=2, zero=3),
    Layout(name="tensor 2", tensor=2),
    Layout(name="pipeline 2", pipeline=2),
    Layout(name="context 2", context=2),
    Layout(name="context 2 with Ulysses", context=2, ulysses=2),
    Layout(name="data 2 x pipeline 2", data=2, pipeline=2),
    Layout(name="2 x 2 x 2", data=2, tensor=2, pipeline=2),
)
OURS, SYSTEMS = "shardsmith", ("torch", "shardsmith", "deepspeed", "megatron")
Pair = tuple[str, Layout]
"""A system at a layout."""
REFERENCE: Pair = ("torch", LAYOUTS[1])
"""Raw DDP at data 2: what everything is compared with."""


def can(system: str, layout: Layout) -> bool:
    """Whether `system` offers `layout` on a CPU at all (what Shardsmith's engine can do is asked of the engine)."""
    if layout.context > 1 and system != OURS:
        return False  # torch's own has no CPU path, and megatron-core's needs an attention of another package
    if system == "deepspeed":
        pipelined = layout.pipeline > 1 and layout.zero == 0
        return layout.tensor == 1 and layout.world > 1 and (layout.pipeline == 1 or pipelined)
    if system == "megatron":
        return layout.zero <= 1 and layout.world > 1
    return True


def command(system: str, layout: Layout, python: Path, *, inputs: Path, steps: int, warmup: int) -> list[str]:
    """What starts one rank; the rank itself is told by environment variables."""
    script = HERE / ("rank_ours.py" if system == OURS else f"rank_{system}.py")
    degrees = [f"--plan={layout.plan}"] if system == OURS else [f"--{k}={v}" for k, v in layout.options.items()]
    return [str(python), str(script), *degrees, f"--inputs={inputs}", f"--steps={steps}", f"--warmup={warmup}"]
