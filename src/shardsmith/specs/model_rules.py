"""What a ModelSpec must satisfy by itself, before any plan is looked at."""

from __future__ import annotations

import json

from shardsmith.errors import Code, Fault
from shardsmith.specs.model import Experts, ModelSpec, RopeScaling, YarnScaling
from shardsmith.units import counted

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

EXPERTS = Code(
    code="M108",
    title="impossible mixture of experts",
    because="a token visits top_k different experts out of those in its best top_groups groups, and each group holds "
    "an equal number of them; routed and shared experts are gated MLPs",
)
LATENT = Code(
    code="M109",
    title="impossible latent attention",
    because="every head has its own nope + rope channels and its own key and value, made from a latent without biases",
)

DROPOUT = Code(
    code="M110",
    title="a share of dropped elements outside 0 to 1",
    because="the rest is scaled by 1 / (1 - dropout), and of all elements dropped nothing is left to scale",
)

TOO_LARGE = Code(
    code="M111",
    title="a size beyond any model",
    because="what is computed layer by layer, or head by head, would take more time and memory than this machine has",
)
ONE_TOKEN = Code(
    code="M112",
    title="a vocabulary of one token",
    because="the next token is always the only one there is: the loss is 0 from the first step, and nothing is learnt",
)
MOST = {"layers": 1000, "heads": 10**6, "kv_heads": 10**6}
"""Sizes above which nobody means what is written; of all others 10**9."""

_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context", "norm_eps", "init_std")


def model_faults(spec: ModelSpec, source: str) -> list[Fault]:
    """Every rule that `spec`, read from `source`, breaks by itself (M101 to M112); empty for a sound model."""
    large = _large_faults(spec, source)
    if large:  # the rules below go through heads and layers
        return large
    faults = [
        POSITIVE_SIZE.fault(f"{name} must be greater than zero", (source, f"{name} = {getattr(spec, name)}"))
        for name in _SIZES
        if getattr(spec, name) <= 0
    ]
    if spec.vocab == 1:
        said = (source, "vocab = 1")
        faults.append(ONE_TOKEN.fault("vocab = 1 leaves nothing to predict", said, hint="vocab = 2 or more"))
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
    faults += [
        DROPOUT.fault(f"{name} must be 0 or more and below 1", (source, f"{name} = {value}"), hint=f"{name} = 0.1")
        for name, value in (("dropout", spec.dropout), ("attention_dropout", spec.attention_dropout))
        if not 0 <= value < 1
    ]
    faults += _expert_faults(spec, source) + _latent_faults(spec, source)
    return faults + (_rope_faults(spec, source) if spec.positions == "rope" else _learned_faults(spec, source))


def _large_faults(spec: ModelSpec, source: str) -> list[Fault]:
    sizes = {name: (getattr(spec, name), MOST.get(name, 10**9)) for name in _SIZES}
    if spec.experts is not None:
        sizes["experts.count"] = (spec.experts.count, 10**6)
    return [
        TOO_LARGE.fault(f"{name} = {value} is above {most:,}", (source, f"{name} = {value}"), hint=f"{most} or less")
        for name, (value, most) in sizes.items()
        if value > most
    ]


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


_Rule = tuple[str, tuple[str, ...], str]
"""A rule of experts that is broken: message, keys of the values that clash, hint."""


def _expert_faults(spec: ModelSpec, source: str) -> list[Fault]:
    e = spec.experts
    if e is None:
        return []
    wrong: list[_Rule] = [
        (f"{name} = {getattr(e, name)} must be 1 or more", (name,), f"{name} = 1")
        for name in ("count", "top_k", "ffn", "groups", "top_groups")
        if getattr(e, name) < 1
    ]
    if not wrong:  # it divides by these
        wrong += _group_rules(e)
    wrong += [
        (f"{name} = {getattr(e, name):g} must not be negative", (name,), f"{name} = 0")
        for name in ("first_dense", "shared_ffn", "aux_loss", "z_loss", "bias_rate")
        if getattr(e, name) < 0
    ]
    if e.first_dense >= spec.layers:
        message = f"first_dense = {e.first_dense} leaves no layer with experts of {spec.layers}"
        wrong.append((message, ("first_dense",), f"first_dense = {spec.layers - 1}"))
    if e.shared_gate and not e.shared_ffn:
        wrong.append(
            (
                "shared_gate weighs a shared expert, and there is none",
                ("shared_gate", "shared_ffn"),
                "shared_gate = false",
            )
        )
    found = [
        EXPERTS.fault(message, *((source, f"experts.{key} = {_toml(getattr(e, key))}") for key in keys), hint=hint)
        for message, keys, hint in wrong
    ]
    if not spec.gated:
        said = (source, f"activation = {_toml(spec.activation)}")
        found.append(EXPERTS.fault("experts are gated MLPs", said, hint='activation = "swiglu"'))
    return found


def _group_rules(e: Experts) -> list[_Rule]:
    """What is wrong between counts that are all 1 or more."""
    if e.count % e.groups:
        near = max(d for d in range(1, e.groups + 1) if e.count % d == 0)
        message = f"groups = {e.groups} does not divide {e.count} experts"
        return [(message, ("count", "groups"), f"groups = {near}")]
    each, found = e.count // e.groups, list[_Rule]()
    most = each * min(e.top_groups, e.groups)
    keys = ("count", "top_k", *(("groups", "top_groups") if e.groups > 1 else ()))
    if e.top_k > most:
        of = "experts that there are" if most == e.count else f"experts of the best {counted(e.top_groups, 'group')}"
        found.append((f"top_k = {e.top_k} is more than the {most} {of}", keys, f"top_k = {most}"))
    if e.top_groups > e.groups:
        message = f"top_groups = {e.top_groups} is more than {counted(e.groups, 'group')}"
        found.append((message, ("groups", "top_groups"), f"top_groups = {e.groups}"))
    if e.groups > 1 and e.score == "sigmoid" and each < 2:
        message = f"a group scored by its two best experts has {each}"
        found.append((message, ("count", "groups", "score"), f"groups = {max(e.count // 2, 1)}"))
    return found


def _toml(value: object) -> str:
    return json.dumps(value)


def _latent_faults(spec: ModelSpec, source: str) -> list[Fault]:
    latent = spec.latent
    if latent is None:
        return []
    wrong = {
        "all sizes must be 1 or more": min(latent.kv_rank, latent.nope, latent.rope, latent.value) < 1,
        "head_dim must be nope + rope": spec.head_dim != latent.nope + latent.rope,
        "kv_heads must be heads": spec.kv_heads != spec.heads,
        "value must not exceed head_dim": latent.value > spec.head_dim,
        "rope must be even": latent.rope % 2 != 0,
        "positions must be rope": spec.positions != "rope",
        "attention_bias, output_bias and qk_norm have no meaning": spec.attention_bias
        or spec.output_bias
        or spec.qk_norm,
    }
    return [
        LATENT.fault(message, (source, f"latent = {latent}"), hint="see the presets deepseek-v2-lite and deepseek-v3")
        for message, broken in wrong.items()
        if broken
    ]
