"""What a ModelSpec must satisfy by itself, before any plan is looked at."""

from __future__ import annotations

from shardsmith.errors import Code, Fault
from shardsmith.specs.model import ModelSpec

POSITIVE_SIZE = Code(
    code="M101", title="a model size must be positive", because="a model with an empty dimension computes nothing"
)
HEAD_GROUPS = Code(
    code="M102",
    title="query heads must be a multiple of key/value heads",
    because="each key/value head serves an equal group of query heads (grouped-query attention)",
)
EVEN_HEAD = Code(
    code="M103",
    title="rotary positions need an even head size",
    because="rotary positions turn the channels of a head in pairs",
)
ROPE_WITHOUT_ROPE = Code(
    code="M104",
    title="a rotary setting on a model with learned positions",
    because="it would be ignored: learned positions do not rotate anything",
)
ROPE_BANDS = Code(
    code="M105",
    title="impossible rotary frequency scaling",
    because="frequencies below the low band are divided by factor, those above the high band kept, and the band "
    "between is interpolated, so the high band must lie above the low one and both above zero",
)

_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context", "norm_eps", "init_std")


def model_faults(spec: ModelSpec, source: str) -> list[Fault]:
    """Every rule that `spec`, read from `source`, breaks by itself (M101 to M105); empty for a sound model."""
    faults = [
        POSITIVE_SIZE.fault(f"{name} must be greater than zero", (source, f"{name} = {getattr(spec, name)}"))
        for name in _SIZES
        if getattr(spec, name) <= 0
    ]
    if spec.heads > 0 and spec.kv_heads > 0 and spec.heads % spec.kv_heads:
        legal = [n for n in range(1, spec.heads + 1) if spec.heads % n == 0]
        nearest = min(legal, key=lambda n: abs(n - spec.kv_heads))
        faults.append(
            HEAD_GROUPS.fault(
                f"kv_heads = {spec.kv_heads} does not divide {spec.heads} query heads",
                (source, f"heads = {spec.heads}"),
                (source, f"kv_heads = {spec.kv_heads}"),
                hint=f"kv_heads = {nearest}",
            )
        )
    return faults + (_rope_faults(spec, source) if spec.positions == "rope" else _learned_faults(spec, source))


def _rope_faults(spec: ModelSpec, source: str) -> list[Fault]:
    faults: list[Fault] = []
    if spec.head_dim > 0 and spec.head_dim % 2:
        faults.append(
            EVEN_HEAD.fault(
                f"head_dim = {spec.head_dim} is odd",
                (source, f"head_dim = {spec.head_dim}"),
                (source, "positions = rope"),
                hint=f"head_dim = {spec.head_dim + 1}",
            )
        )
    if spec.rope_theta <= 0:
        faults.append(
            POSITIVE_SIZE.fault("rope_theta must be greater than zero", (source, f"rope_theta = {spec.rope_theta}"))
        )
    scaling = spec.rope_scaling
    if scaling and not (
        scaling.factor >= 1 and scaling.original_context > 0 and 0 < scaling.low_freq_factor < scaling.high_freq_factor
    ):
        faults.append(
            ROPE_BANDS.fault(
                "rope_scaling needs factor >= 1, original_context > 0 and 0 < low_freq_factor < high_freq_factor",
                (source, f"rope_scaling = {scaling}"),
                hint="factor = 8, low_freq_factor = 1, high_freq_factor = 4, original_context = 8192 (Llama 3.1)",
            )
        )
    return faults


def _learned_faults(spec: ModelSpec, source: str) -> list[Fault]:
    neutral = {"rope_theta": 10000.0, "rope_scaling": None}
    return [
        ROPE_WITHOUT_ROPE.fault(
            f"{name} has no meaning with learned positions",
            (source, f"{name} = {getattr(spec, name)}"),
            (source, "positions = learned"),
            hint=f"leave {name} out, or positions = rope",
        )
        for name, value in neutral.items()
        if getattr(spec, name) != value
    ]
