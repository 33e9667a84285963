"""Cures: hints that have been tried, so that what they propose mends the fault and raises no other error.

A rule alone knows only its own legal values; one that is legal for it may clash with the rest of the plan. What is
proposed is therefore laid over the plan and judged by all rules, and where that reveals an error which one further
change mends, the hint says both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardsmith.errors import Fault
from shardsmith.layout.axes.tensor import copies_hint, model_degrees
from shardsmith.plan.batch import batching, divisors
from shardsmith.plan.setup import Setup, shown

Change = Mapping[str, Any]
"""New values of plan fields, and of `global_batch`."""

BESIDE: dict[str, Change] = {
    "T206": {"sequence_parallel": False},
    "T301": {"overlap": ()},
    "T302": {"overlap": ()},
    "C203": {"ulysses": 1},
    "C204": {"ulysses": 1},
    "E103": {"expert": 1, "expert_tensor": 1},
    "H404": {"zero": 3},
}
"""What mends an error that a change reveals, by its code."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A fault of a setup by its `code`, the codes of the errors `beside` it, and how to find those of another setup."""

    setup: Setup
    code: str
    beside: frozenset[str]
    errors_of: Callable[[Setup], frozenset[str]]

    def cure(self, change: Change) -> Change | None:
        """`change` and what it takes beside it to mend the fault without any new error; None where that is not known.

        Terminates, as each round changes a field that had not been changed.
        """
        whole = dict(change)
        while True:
            after = self.errors_of(changed(self.setup, whole))
            if self.code in after:
                return None
            new = after - self.beside
            if not new:
                return whole
            further = {key: value for code in new for key, value in BESIDE.get(code, {}).items() if key not in whole}
            if not further:
                return None
            whole |= {key: value for key, value in further.items() if value != getattr(self.setup.plan, key)}
            if not whole.keys() & further.keys():
                return None

    def first(self, changes: Iterable[Change]) -> list[Change]:
        """The first of `changes` that cures, as a list of one or none."""
        cures = (self.cure(change) for change in changes)
        return [found for found in cures if found is not None][:1]


def changed(setup: Setup, change: Change) -> Setup:
    """`setup` with the values of `change`."""
    plan = {key: value for key, value in change.items() if key != "global_batch"}
    work = {key: value for key, value in change.items() if key == "global_batch"}
    return replace(setup, plan=setup.plan.with_(**plan), workload=replace(setup.workload, **work))


def with_cures(setup: Setup, faults: list[Fault], errors_of: Callable[[Setup], frozenset[str]]) -> list[Fault]:
    """`faults` whose hints have been tried, where this page knows how to; the rule's own hint where nothing cures."""
    codes = frozenset(fault.code for fault in faults if fault.severity == "error")
    found = []
    for fault in faults:
        hint = ""
        if fault.code in HINTS:
            trial = Trial(setup=setup, code=fault.code, beside=codes - {fault.code}, errors_of=errors_of)
            hint = HINTS[fault.code](trial)
        found.append(replace(fault, hint=hint) if hint else fault)
    return found


def _words(change: Change) -> str:
    """A change as a hint says it: `tensor = 2 with ulysses = 1 and without overlap`."""
    first, *others = [f"{key} = {value if isinstance(value, str) else shown(value)}" for key, value in change.items()]
    dropped = {f"{key} = {shown(value)}": f"without {key}" for key, value in change.items() if value in ((), None)}
    beside = [dropped.get(text, f"with {text}") for text in others]
    return " ".join([first, " and ".join(beside)]).rstrip()


def _tensor(trial: Trial) -> str:
    """The nearest degrees below and above that the whole plan allows, and copies of key/value heads."""
    plan, model = trial.setup.plan, trial.setup.model
    legal = model_degrees(model, replicate_kv=plan.replicate_kv)
    below = trial.first({"tensor": d} for d in reversed(legal) if d < plan.tensor)
    found = below + trial.first({"tensor": d} for d in legal if d > plan.tensor)
    plain = [str(change["tensor"]) for change in found if len(change) == 1]
    words = [f"tensor = {' or '.join(plain)}"] if plain else []
    words += [_words(change) for change in found if len(change) > 1]
    if words:
        words[-1] += f" ({model.name} allows {', '.join(map(str, legal))})"
    copies: Change = {"replicate_kv": True}
    if trial.code == "T204" and trial.cure(copies) == copies:
        words.append(copies_hint(trial.setup))
    return ", or ".join(word for word in words if word)


def _ulysses(trial: Trial) -> str:
    """All degrees of the exchange that the context degree and the heads allow."""
    legal = [d for d in divisors(trial.setup.plan.context) if trial.cure({"ulysses": d}) == {"ulysses": d}]
    return f"ulysses = one of {', '.join(map(str, legal))}" if legal else ""


def _microbatches(trial: Trial) -> str:
    """Smaller microbatches, the V schedule that takes any number, or a larger batch."""
    plan, work = trial.setup.plan, trial.setup.workload
    least, each, size = 2 * plan.pipeline, work.global_batch // plan.data, batching(plan, work).microbatch
    both = {"microbatch": plan.microbatch, "microbatches": plan.microbatches}
    stated = [key for key, value in both.items() if value is not None]
    options: list[Change] = []
    for count in [d for d in divisors(each) if d >= least][:1]:
        cut = {"microbatches": count, "microbatch": each // count}
        options.append({key: cut[key] for key in cut if key in stated})
    options.append({"schedule": "zb_v"})
    larger: dict[str, Any] = {"global_batch": plan.data * least * size}
    options.append(larger | ({"microbatches": least} if plan.microbatches is not None else {}))
    found = [trial.cure(change) for change in options if change]
    return ", or ".join(_words(change) for change in found if change is not None)


def _groups(trial: Trial) -> str:
    """Groups as large as the pipeline."""
    names = (f"interleaved:{trial.setup.plan.pipeline}", "interleaved")
    legal = [name for name in names if trial.cure({"schedule": name}) == {"schedule": name}]
    return f"schedule = {' or '.join(legal)}" if legal else ""


HINTS: dict[str, Callable[[Trial], str]] = {
    "T203": _tensor,
    "T204": _tensor,
    "T205": _tensor,
    "C201": _ulysses,
    "S008": _microbatches,
    "S015": _groups,
}
