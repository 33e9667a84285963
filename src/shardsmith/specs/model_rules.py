"""What a ModelSpec must satisfy by itself, before any plan is looked at."""

from __future__ import annotations

from shardsmith.errors import Code, Fault
from shardsmith.specs.model import ModelSpec, RopeScaling, YarnScaling

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

YARN_BANDS = Code(
    code="M106",
    title="impossible YaRN scaling",
    because="channels that turn less than beta_slow times are slowed by factor, those that turn more than beta_fast "
    "times kept, and the band between is blended, so beta_fast must lie above beta_slow and both above zero",
)
WINDOW = Code(
    code="M107",
    title="empty attention window",
    because="a query sees the last `window` keys, its own included, so the window holds at least that one",
)

_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context", "norm_eps", "init_std")


def model_faults(spec: ModelSpec, source: str) -> list[Fault]:
    """Every rule that `spec`, read from `source`, breaks by itself (M101 to M107); empty for a sound model."""
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
    if spec.window is not None and spec.window < 1:
        said = (source, f"window = {spec.window}")
        faults.append(WINDOW.fault("window must be 1 or more", said, hint="leave window out, or window = 4096"))
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
    return faults + _scaling_faults(spec.rope_scaling, source)


def _scaling_faults(scaling: RopeScaling | YarnScaling | None, source: str) -> list[Fault]:
    if isinstance(scaling, RopeScaling):
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        code, names = ROPE_BANDS, "0 < low_freq_factor < high_freq_factor"
        hint = "factor = 8, low_freq_factor = 1, high_freq_factor = 4, original_context = 8192 (Llama 3.1)"
    elif isinstance(scaling, YarnScaling):
        low, high = scaling.beta_slow, scaling.beta_fast
        code, names = YARN_BANDS, "0 < beta_slow < beta_fast"
        hint = "factor = 4, beta_slow = 1, beta_fast = 32, original_context = 32768 (Qwen2.5)"
    else:
        return []
    if scaling.factor >= 1 and scaling.original_context > 0 and 0 < low < high:
        return []
    message = f"rope_scaling needs factor >= 1, original_context > 0 and {names}"
    return [code.fault(message, (source, f"rope_scaling = {scaling}"), hint=hint)]


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
