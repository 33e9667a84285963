"""Plans with a context axis against one process; those of equal world run in the same processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from context_plans import CONTEXT_TABLE, cut
from plans import Row
from together import Together, certified
from torch import Tensor

from shardsmith.engine.dataset.samples import Sample, next_tokens
from shardsmith.engine.parity.certificate import Case, Certificate, certify_together
from shardsmith.engine.runtime import block_attention
from shardsmith.engine.runtime.group import Arriving
from shardsmith.engine.train import step
from shardsmith.plan.stages import stages_per_rank
from shardsmith.schedule import orders

pytestmark = pytest.mark.ranks


CERTIFICATES = Together(CONTEXT_TABLE, timeout_s=380.0)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("found", CONTEXT_TABLE, ids=lambda found: found.name)
def test_a05_a_plan_with_context_equals_one_process(found: Row) -> None:
    CERTIFICATES.holds(found)


def test_the_table_has_context_with_everything() -> None:
    assert [name for name, times in Counter(r.name for r in CONTEXT_TABLE).items() if times > 1] == []
    strict = [r.setup for r in CONTEXT_TABLE if r.setup.workload.dtype == "float64"]
    plans = [s.plan for s in strict]
    for axis in ("data", "tensor", "pipeline"):
        others = {"data", "tensor", "pipeline"} - {axis}
        pairs = [p for p in plans if getattr(p, axis) > 1 and all(getattr(p, o) == 1 for o in others)]
        assert {p.ulysses > 1 for p in pairs} == {False, True}, axis
    assert any((p.data, p.context, p.tensor) == (2, 2, 2) for p in plans)
    assert {p.zero for p in plans} == {0, 1, 2, 3}
    assert {p.schedule for p in plans if p.pipeline > 1} == set(orders.names())
    assert {p.recompute for p in plans} == {"none", "selective", "full"}
    assert any(stages_per_rank(p) > 1 and p.context > 1 for p in plans)
    assert {(p.context // p.ulysses > 1, p.ulysses > 1) for p in plans} == {(True, False), (False, True), (True, True)}


class Chosen:
    """Samples of given document lengths: sample i is cut into `lengths[i % len]`, with random tokens."""

    def __init__(self, vocab: int, lengths: tuple[tuple[int, ...], ...]) -> None:
        self.vocab, self.lengths, self.seq_len, self.samples = vocab, lengths, sum(lengths[0]), 64

    def sample(self, index: int) -> Sample:
        """See `Source`."""
        lengths = (*self.lengths[index % len(self.lengths)], 1)
        numbers = np.repeat(np.arange(len(lengths)), lengths)
        tokens = np.random.default_rng(index).integers(0, self.vocab, self.seq_len + 1)
        return Sample(tokens=tokens[:-1], labels=next_tokens(tokens, numbers), documents=numbers[:-1])


ONES = (1,) * 4
SHORT_DOCUMENTS = {
    "f12 a document of 7 tokens and one of 1": ((7, 1), (1, 7)),
    "f12 documents of 1, 2 and 3 tokens": ((1, 2, 3, 2), (3, 2, 2, 1), (2, 3, 1, 2)),
    "documents of one token beside longer ones": ((*ONES, 4), (2, *ONES, 2), (4, *ONES), (8,)),
}


@pytest.mark.parametrize("name", SHORT_DOCUMENTS)
def test_short_documents_lose_no_token(name: str) -> None:
    """Head and tail are those of the whole pack, masks those of documents: lengths need not divide by anything."""
    lines = ("context=2", "context=2,ulysses=2")
    rows = [cut(line, f"{line},microbatches=4", seq_len=8).setup for line in lines]
    source = Chosen(rows[0].model.vocab, SHORT_DOCUMENTS[name])
    for found in certify_together([Case(setup=s, steps=2, source=source) for s in rows], timeout_s=60):
        assert found.passed, found.summary()


def broken(line: str, *, packed: bool = False) -> Certificate:
    return certified((cut("broken", line, packed=packed),), 60.0)[0]


def test_an_lse_of_0_where_nothing_is_seen_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel says of queries that see no key of a block would weigh 0 as if it were something."""
    monkeypatch.setattr(block_attention, "_nothing_seen", lambda out, lse, mask: (out, lse))
    assert broken("context=2,microbatch=2", packed=True).worst > 1e-3


def test_keys_of_the_wrong_rank_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arriving, "wait", lambda self: self.sent)
    assert broken("context=2").worst > 1e-3


def test_a25_labels_shifted_after_the_cut_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = step.context_axis.split

    def shifted(microbatch: object, parts: object) -> object:
        found = whole(microbatch, parts)  # type: ignore[arg-type]
        labels: Tensor = torch.roll(found.tokens, -1, 1)
        labels[:, -1] = -100
        return replace(found, labels=labels)

    monkeypatch.setattr(step.context_axis, "split", shifted)
    assert broken("context=2").worst > 1e-3
