"""Rules of thumb beside a plan: which it follows, which it beats, and by how much, from prices and not by decree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardsmith.design.cost.layouts import Layouts
from shardsmith.design.cost.subject import Subject
from shardsmith.design.planner.bounded import Bounded
from shardsmith.design.planner.found import Rivals
from shardsmith.design.planner.plans import plan_of
from shardsmith.design.planner.result import Choice, RuleNote

Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Thumb:
    """A rule: what it says, which frames follow it, and whether it says anything about this subject."""

    name: str
    says: str
    follows: Callable[[Subject, Layouts], Mask]
    applies: Callable[[Subject], bool] = lambda s: True


def _node(s: Subject) -> float:
    """Devices of the innermost fast domain."""
    return float(s.cluster.levels[0].size or s.cluster.devices_per_node or 1)


def _several_nodes(s: Subject) -> bool:
    return s.cluster.nodes > 1


THUMBS = (
    Thumb(
        name="data parallel where the model fits one device",
        says="tensor = pipeline = context = 1",
        follows=lambda s, p: (p.tensor == 1) & (p.pipeline == 1) & (p.context == 1),
    ),
    Thumb(
        name="tensor parallel inside one node",
        says="on 2 to 8 devices of one node, tensor above 1 and no pipeline",
        follows=lambda s, p: (p.tensor > 1) & (p.pipeline == 1),
        applies=lambda s: s.cluster.nodes == 1 and (s.cluster.devices or 1) > 1,
    ),
    Thumb(
        name="tensor ranks stay inside a node",
        says="tensor no larger than the fast domain",
        follows=lambda s, p: p.tensor <= _node(s),
        applies=_several_nodes,
    ),
    Thumb(
        name="tensor and pipeline across nodes",
        says="tensor and pipeline both above 1",
        follows=lambda s, p: (p.tensor > 1) & (p.pipeline > 1),
        applies=_several_nodes,
    ),
    Thumb(
        name="tensor and expert parallel for a mixture of experts",
        says="tensor and expert both above 1",
        follows=lambda s, p: (p.tensor > 1) & (p.expert > 1),
        applies=lambda s: s.model.experts is not None,
    ),
    Thumb(
        name="at most 16 pipeline ranks",
        says="pipeline up to 16",
        follows=lambda s, p: p.pipeline <= 16,
        applies=_several_nodes,
    ),
    Thumb(
        name="at least 4 microbatches a pipeline rank",
        says="microbatches at least 4 x pipeline",
        follows=lambda s, p: (p.pipeline == 1) | (p.microbatches >= 4 * p.pipeline),
        applies=_several_nodes,
    ),
)


def sides(s: Subject, p: Layouts) -> list[Mask]:
    """Which of these frames break, and which follow, each rule that applies: two sets a rule, in this order."""
    follows = [thumb.follows(s, p) for thumb in THUMBS if thumb.applies(s)]
    return [side for mask in follows for side in (~mask, mask)]


def rule_notes(s: Subject, best: Choice, bounded: Bounded, rivals: Rivals) -> tuple[RuleNote, ...]:
    """Every rule that applies, with the best plan that decides otherwise, of the `rivals` on all `sides`."""
    chosen, notes = bounded.layouts_of(best.setup), []
    for at, thumb in enumerate(thumb for thumb in THUMBS if thumb.applies(s)):
        follows = bool(thumb.follows(s, chosen)[0])
        found = rivals.best_of(2 * at + (not follows))
        others = f"of the plans that {'do not follow' if follows else 'follow'} it"
        if found is None:
            text = f"({thumb.says}): none {others} is legal and fits"
            notes.append(RuleNote(rule=thumb.name, verdict="followed" if follows else "does not apply", text=text))
            continue
        p, seconds = found
        ratio = seconds / best.estimate.step_time_s
        text = f"({thumb.says}): the best {others} takes {max(ratio - 1, 0.0):.1%} longer"
        notes.append(
            RuleNote(
                rule=thumb.name,
                verdict="followed" if follows else "beaten",
                text=text,
                other=str(plan_of(p, 0, bounded.space.base)),
                ratio=ratio,
            )
        )
    return tuple(notes)
