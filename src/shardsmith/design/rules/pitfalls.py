"""Pitfalls: plans that are legal but cost, each with its predicted cost on this cluster, and the fix.

A pitfall is only reported where the fix, one change to the plan, is legal by the layout's rules and saves time (or,
for memory, bytes); so the same plan may be a pitfall on one cluster and right on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardsmith.design.cost.estimate import Estimate, estimate_plan
from shardsmith.design.cost.limit import device_bytes, too_many
from shardsmith.design.cost.subject import Subject
from shardsmith.design.rules.changes import changes, typed
from shardsmith.errors import Code, Fault, Refused
from shardsmith.layout.axes.data import streams_gradients
from shardsmith.layout.check import examine
from shardsmith.plan.batch import batching, divisors
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Setup
from shardsmith.plan.stages import settled
from shardsmith.units import GIB, counted, format_seconds

ACROSS = Code(
    code="L201",
    title="tensor ranks on several nodes",
    because="every layer sums activations over the tensor ranks several times, and links between nodes are slower",
    severity="warning",
)
BUBBLE = Code(
    code="L202",
    title="few microbatches for the pipeline",
    because="while the pipeline fills and empties ranks wait: 1F1B idles (P-1)/(m+P-1) of a step of even stages, m "
    "microbatches of any size; it is their number that counts",
    severity="warning",
)
STREAMED = Code(
    code="L203",
    title="gradients reduced (or weights gathered) for every microbatch",
    because="ZeRO 2 and 3 move them once a microbatch unless they are held over the step: the more microbatches, the "
    "more is sent",
    severity="warning",
)
RECOMPUTED = Code(
    code="L204",
    title="recomputation that the memory does not ask for",
    because="recomputing spends up to a third more compute to save activations, which only pays where they do not fit",
    severity="warning",
)
OUTSIDE = Code(
    code="L205",
    title="an order that puts busy ranks far apart",
    because="ranks that talk most should be neighbours: they share the fast links of a node",
    severity="warning",
)
DEEP = Code(
    code="L206",
    title="a deep pipeline where fewer ranks would do",
    because="stages of few layers are harder to balance, and each further pipeline rank adds messages and, with as "
    "many microbatches, to the bubble",
    severity="warning",
)
SEQUENCE = Code(
    code="L207",
    title="tensor ranks that all keep the whole sequence",
    because="sequence_parallel cuts what lies between the products over the tensor ranks, and sends the same bytes",
    severity="warning",
)
SMALL = Code(
    code="L208",
    title="layers too small to keep a device busy",
    because="where kernels are shorter than their launches the host sets the pace, however fast the device is",
    severity="warning",
)
WHOLE_STATES = Code(
    code="L209",
    title="optimiser states on every data rank",
    because="ZeRO 1 keeps each state once among the data ranks; a reduce-scatter and a gather move what an all-reduce "
    "does",
    severity="warning",
)

WORTH = 0.02
"""Share of the step (or of the memory) that a fix must save to be mentioned."""
PARTS = {
    "compute": "in the layers",
    "imbalance": "by more even stages",
    "pipeline": "in messages between stages",
    "data": "in what data ranks exchange",
    "optimizer": "in the update",
}
"""Where a step is saved beside the bubble, by the part of the cost model's breakdown."""


Fixes = Callable[[Subject, Setup], Iterator[Plan]]


@dataclass(frozen=True, kw_only=True)
class Pitfall:
    """A rule: whether a plan is in it, in which words, and the plans that would be out of it, the nearest first.

    `own` is what a fix saves of the rule's own cause, in seconds (None: all it saves). What else the fix saves, such
    as `besides`, is said but not charged, so that two rules do not charge the same seconds. Where no fix is legal, fits
    and saves, those `otherwise` are tried.
    """

    code: Code
    keys: tuple[str, ...]
    inside: Callable[[Subject, Setup, Estimate], str]
    fixes: Fixes
    by_memory: bool = False
    own: Callable[[Subject, Setup, Estimate, Setup, Estimate], float] | None = None
    besides: str = ""
    otherwise: Fixes | None = None

    def charged(self, s: Subject, setup: Setup, found: Estimate, other: Setup, e: Estimate) -> float:
        """Seconds of what the fix `other` saves that this rule stands for."""
        saved = found.step_time_s - e.step_time_s
        return saved if self.own is None else min(saved, self.own(s, setup, found, other, e))


def pitfalls(s: Subject, setup: Setup, found: Estimate) -> list[Fault]:
    """Every pitfall that a priced plan is in, with what the fix saves."""
    faults = []
    for rule in PITFALLS:
        words = rule.inside(s, setup, found)
        options = (rule.fixes, rule.otherwise) if words else ()
        fix = next(filter(None, (_best_fix(s, setup, found, rule, fixes) for fixes in options if fixes)), None)
        if fix is None:
            continue
        other, e, charged = fix
        gib = (found.peak - e.peak) / GIB
        cost = f"{gib:.1f} GiB a rank more than with the fix" if rule.by_memory else _cost(rule, found, e, charged)
        said = setup.said(*(f"plan.{key}" for key in rule.keys))
        hint = f"{', '.join(changes(setup, other.plan))} ({_price(e, device_bytes(setup))})"
        faults.append(rule.code.fault(f"{words}: costs {cost}", *said, hint=hint))
    return faults


def _cost(rule: Pitfall, found: Estimate, e: Estimate, charged: float) -> str:
    """What the cause costs, and where the fix saves more than that, how much and most of the rest where."""
    step, saved = found.step_time_s, found.step_time_s - e.step_time_s
    text = f"{format_seconds(charged)} a step, {charged / step:.1%} of it"
    if saved - charged < WORTH * step:
        return text
    parts = {name: found.breakdown[name] - e.breakdown[name] for name in PARTS}
    most = max(parts, key=lambda name: parts[name])
    rest = rule.besides or f"{format_seconds(parts[most])} of that {PARTS[most]}"
    return f"{text}; its fix saves {format_seconds(saved)} in all, {rest}"


def _price(e: Estimate, limit: float) -> str:
    short = f", still {too_many(e.peak, limit)} too many" if e.peak > limit > 0 else ""
    return f"{format_seconds(e.step_time_s)} a step, {e.peak / GIB:.1f} GiB{short}"


def _best_fix(
    s: Subject, setup: Setup, found: Estimate, rule: Pitfall, fixes: Fixes
) -> tuple[Setup, Estimate, float] | None:
    """The legal one of `fixes` that saves most, where it is worth saying, with its price and what the rule charges.

    A fix fits; of a plan that does not fit itself it may also only be smaller.
    """
    limit = device_bytes(setup)
    best: tuple[Setup, Estimate, float] | None = None
    for proposed in fixes(s, setup):
        try:
            plan = typed(setup, proposed)
            other = settled(replace(setup, plan=plan))
            batching(plan, setup.workload)
        except Refused:
            continue
        if any(fault.code != "H404" for fault in examine(other, cured=False).errors):
            continue
        e = estimate_plan(s, other)
        if (e.peak > limit and e.peak >= found.peak) or (best is not None and e.step_time_s >= best[1].step_time_s):
            continue
        if e.peak > limit >= found.peak:
            continue
        charged = 0.0 if rule.by_memory else rule.charged(s, setup, found, other, e)
        gain, base = (found.peak - e.peak, found.peak) if rule.by_memory else (charged, found.step_time_s)
        slower = rule.by_memory and e.step_time_s > found.step_time_s * (1.0 + WORTH)
        if gain >= WORTH * base and not slower:
            best = replace(setup, plan=plan), e, charged
    return best


def _node(s: Subject) -> int:
    return s.cluster.levels[0].size or s.cluster.devices_per_node or 1


def _across(s: Subject, setup: Setup, e: Estimate) -> str:
    plan, size = setup.plan, _node(s)
    if plan.tensor <= size:
        return ""
    return f"tensor = {plan.tensor} spans {-(-plan.tensor // size)} groups of {size} devices that {_link(s)} joins"


def _link(s: Subject) -> str:
    return s.cluster.levels[0].name


def _inside_node(s: Subject, setup: Setup) -> Iterator[Plan]:
    plan = setup.plan
    for tensor in range(min(_node(s), plan.tensor), 1, -1):
        spread, rest = divmod(plan.tensor, tensor)
        if rest:
            continue
        shared = {"tensor": tensor, "replicate_kv": plan.replicate_kv and tensor > s.model.kv_heads, "layers": None}
        yield plan.with_(**shared, data=plan.data * spread, microbatch=None, microbatches=None)
        yield plan.with_(**shared, pipeline=plan.pipeline * spread)
        return


def _few(s: Subject, setup: Setup, e: Estimate) -> str:
    plan, m = setup.plan, batching(setup.plan, setup.workload).microbatches
    share = e.breakdown["bubble"] / e.step_time_s
    if plan.pipeline == 1 or share < 0.05:
        return ""
    return f"{counted(m, 'microbatch')} for {plan.pipeline} pipeline ranks leave a bubble of {share:.1%} of the step"


def _bubble_alone(s: Subject, setup: Setup, found: Estimate, other: Setup, e: Estimate) -> float:
    """Seconds of bubble saved: another number of pipeline ranks also evens out stages, which is another matter."""
    return found.breakdown["bubble"] - e.breakdown["bubble"]


def _more_microbatches(s: Subject, setup: Setup) -> Iterator[Plan]:
    plan, cut = setup.plan, batching(setup.plan, setup.workload)
    for size in range(cut.microbatch - 1, 0, -1):
        if cut.microbatch % size == 0:
            yield plan.with_(microbatch=size, microbatches=cut.microbatches * cut.microbatch // size)
    plan = plan.with_(layers=None)
    loops = plan.schedule in ("gpipe", "one_f_one_b")
    for each in range(2, s.model.layers // plan.pipeline + 1) if loops else ():
        if each <= 4 or s.model.layers % (plan.pipeline * each) == 0:
            yield plan.with_(schedule="interleaved", stages_per_rank=each)
    for ranks in divisors(plan.pipeline)[:-1]:
        fewer = plan.with_(
            pipeline=ranks, data=plan.data * (plan.pipeline // ranks), microbatch=None, microbatches=None
        )
        each, rest = divmod(s.model.layers, ranks)
        if ranks == 1:
            yield fewer.with_(schedule="one_f_one_b", stages_per_rank=None)
        else:
            yield fewer
            if loops and not rest and each > 1:
                yield fewer.with_(schedule="interleaved", stages_per_rank=each)


def _streams(s: Subject, setup: Setup, e: Estimate) -> str:
    plan, m = setup.plan, batching(setup.plan, setup.workload).microbatches
    if not streams_gradients(plan) or m == 1:
        return ""
    return f"zero = {plan.zero} moves gradients{' and weights' if plan.zero == 3 else ''} {m} times a step"


def _held_over(s: Subject, setup: Setup) -> Iterator[Plan]:
    yield setup.plan.with_(zero_gather="per_step")
    yield setup.plan.with_(zero=1)


def _streams_alone(s: Subject, setup: Setup, found: Estimate, other: Setup, e: Estimate) -> float:
    """Seconds saved of gathers and reductions: what a larger microbatch also saves in kernels `SMALL` charges."""
    saved = found.step_time_s - e.step_time_s
    return saved - _without_streams(s, setup, found, other, e) if streams_gradients(other.plan) else saved


def _recomputes(s: Subject, setup: Setup, e: Estimate) -> str:
    return f"recompute = {setup.plan.recompute}" if setup.plan.recompute != "none" else ""


def _recompute_less(s: Subject, setup: Setup) -> Iterator[Plan]:
    yield setup.plan.with_(recompute="none")
    if setup.plan.recompute == "full":
        yield setup.plan.with_(recompute="selective")


def _placed_badly(s: Subject, setup: Setup, e: Estimate) -> str:
    return f"order = {setup.plan.order}" if s.cluster.nodes > 1 else ""


def _tensor_first(s: Subject, setup: Setup) -> Iterator[Plan]:
    for order in ("tensor-context-data-pipeline", "tensor-context-pipeline-data"):
        if order != setup.plan.order:
            yield setup.plan.with_(order=order)


def _deep(s: Subject, setup: Setup, e: Estimate) -> str:
    return f"pipeline = {setup.plan.pipeline}" if setup.plan.pipeline > 16 else ""


def _shallower(s: Subject, setup: Setup) -> Iterator[Plan]:
    plan = setup.plan
    for ranks in range(16, 1, -1):
        if plan.pipeline % ranks == 0:
            spread = plan.pipeline // ranks
            yield plan.with_(pipeline=ranks, data=plan.data * spread, layers=None, microbatch=None, microbatches=None)
            return


def _whole_sequence(s: Subject, setup: Setup, e: Estimate) -> str:
    plan = setup.plan
    return f"tensor = {plan.tensor} without sequence_parallel" if plan.tensor > 1 and not plan.sequence_parallel else ""


def _cut_sequence(s: Subject, setup: Setup) -> Iterator[Plan]:
    yield setup.plan.with_(sequence_parallel=True)


def _small(s: Subject, setup: Setup, e: Estimate) -> str:
    cut = batching(setup.plan, setup.workload)
    return f"microbatch = {cut.microbatch}" if cut.microbatches > 1 else ""


def _without_streams(s: Subject, setup: Setup, found: Estimate, other: Setup, e: Estimate) -> float:
    """Seconds that a larger microbatch saves where gradients and weights move once a step.

    With ZeRO 2 and 3 it also moves them less often, which `STREAMED` charges; so both plans are compared without.
    """
    if not streams_gradients(setup.plan):
        return found.step_time_s - e.step_time_s
    before, after = (estimate_plan(s, one.with_plan(zero_gather="per_step")) for one in (setup, other))
    return before.step_time_s - after.step_time_s


def _larger(s: Subject, setup: Setup) -> Iterator[Plan]:
    plan, cut = setup.plan, batching(setup.plan, setup.workload)
    for factor in divisors(cut.microbatches)[1:]:
        yield plan.with_(microbatch=cut.microbatch * factor, microbatches=cut.microbatches // factor)


def _unsharded(s: Subject, setup: Setup, e: Estimate) -> str:
    plan = setup.plan
    return f"zero = 0 on {plan.data} data ranks" if plan.zero == 0 and plan.data * plan.context > 1 else ""


def _first_level(s: Subject, setup: Setup) -> Iterator[Plan]:
    yield setup.plan.with_(zero=1)


PITFALLS = (
    Pitfall(code=ACROSS, keys=("tensor", "order"), inside=_across, fixes=_inside_node),
    Pitfall(
        code=BUBBLE,
        keys=("pipeline", "microbatches", "schedule"),
        inside=_few,
        fixes=_more_microbatches,
        own=_bubble_alone,
    ),
    Pitfall(
        code=STREAMED,
        keys=("zero", "zero_gather"),
        inside=_streams,
        fixes=_held_over,
        own=_streams_alone,
        otherwise=_larger,
        besides="the rest in larger kernels (L208)",
    ),
    Pitfall(code=RECOMPUTED, keys=("recompute",), inside=_recomputes, fixes=_recompute_less),
    Pitfall(code=OUTSIDE, keys=("order",), inside=_placed_badly, fixes=_tensor_first),
    Pitfall(code=DEEP, keys=("pipeline",), inside=_deep, fixes=_shallower),
    Pitfall(
        code=SEQUENCE, keys=("tensor", "sequence_parallel"), inside=_whole_sequence, fixes=_cut_sequence, by_memory=True
    ),
    Pitfall(
        code=SMALL,
        keys=("microbatch", "microbatches"),
        inside=_small,
        fixes=_larger,
        own=_without_streams,
        besides="the rest in gradients and weights that move less often (L203)",
    ),
    Pitfall(code=WHOLE_STATES, keys=("zero", "data"), inside=_unsharded, fixes=_first_level, by_memory=True),
)
