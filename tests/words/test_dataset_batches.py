"""Batches: tokens and labels of every replica, and the synthetic source."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shardsmith.engine.dataset.batches import Batches, HeldOut, batch_digest, batches_of  # noqa: E402
from shardsmith.engine.dataset.open import open_data  # noqa: E402
from shardsmith.engine.dataset.prepare import prepare  # noqa: E402
from shardsmith.engine.dataset.samples import IGNORED, Ints, Source, Synthetic, Windows  # noqa: E402
from shardsmith.errors import Refused  # noqa: E402
from shardsmith.plan.plan import Plan  # noqa: E402
from shardsmith.plan.setup import Setup  # noqa: E402
from shardsmith.specs.job import Data, Workload  # noqa: E402
from shardsmith.specs.library import cluster_named, model_named  # noqa: E402

SOURCE = Synthetic(seed=0, vocab=50, seq_len=8, samples=100)


def batches(source: object = SOURCE, *, data: int = 1, microbatch: int = 1, microbatches: int = 1) -> Batches:
    return Batches(source=source, seed=9, data=data, microbatch=microbatch, microbatches=microbatches)  # type: ignore[arg-type]


def pair(source: Source, index: int) -> tuple[Ints, Ints]:
    sample = source.sample(index)
    return sample.tokens, sample.labels


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("abcdefghij")
    (tmp_path / "b.txt").write_text("klm")
    prepare([str(tmp_path)], tmp_path / "out" / "tokens")
    return tmp_path / "out" / "tokens"


def test_a25_labels_are_the_next_tokens_of_the_full_sequence(prefix: Path) -> None:
    source = open_data(Data(path=str(prefix)), vocab=257, seq_len=4).train
    assert isinstance(source, Windows)
    assert source.samples == 3
    rows = [pair(source, i) for i in range(3)]
    assert [bytes(tokens.astype(np.uint8)) for tokens, _ in rows[:2]] == [b"abcd", b"efgh"]
    assert rows[2][0].tolist() == [*b"ij", 256, *b"k"]
    assert rows[2][1].tolist() == [*b"j", 256, *b"kl"]
    assert rows[0][1].tolist() == [*b"bcde"]


def test_shapes_and_positions() -> None:
    found = batches(data=2, microbatch=3, microbatches=4).batch(0, 1)
    assert [m.index for m in found] == [0, 1, 2, 3]
    for micro in found:
        assert micro.tokens.shape == micro.labels.shape == (3, 8)
        assert micro.tokens.dtype == micro.labels.dtype == micro.positions.dtype == torch.int64
        assert micro.positions.tolist() == [list(range(8))]
        assert micro.documents is None
        assert torch.equal(micro.tokens[:, 1:], micro.labels[:, :-1])


def test_f05_replicas_share_no_sample_and_b10_rows_belong_to_their_ids() -> None:
    run = batches(data=2, microbatch=2, microbatches=2)
    ids: list[int] = []
    for data_index in range(2):
        for micro in run.batch(3, data_index):
            ids.extend(micro.samples)
            for row, sample in enumerate(micro.samples):
                tokens, labels = pair(SOURCE, sample)
                assert micro.tokens[row].tolist() == tokens.tolist()
                assert micro.labels[row].tolist() == labels.tolist()
    assert len(set(ids)) == 8


def test_every_factorisation_computes_the_same_samples() -> None:
    wanted = sorted(batches(microbatch=8).batch(5, 0)[0].samples)
    for data, microbatch, microbatches in [(2, 2, 2), (4, 1, 2), (1, 1, 8), (8, 1, 1)]:
        run = batches(data=data, microbatch=microbatch, microbatches=microbatches)
        found = [i for d in range(data) for micro in run.batch(5, d) for i in micro.samples]
        assert sorted(found) == wanted


def test_e03_data_smaller_than_a_batch_goes_round() -> None:
    few = Synthetic(seed=0, vocab=9, seq_len=2, samples=5)
    run = batches(few, data=2, microbatch=2)
    seen = [int(i) for step in range(5) for d in range(2) for i in run.sample_ids(step, d).ravel()]
    assert sorted(seen) == sorted(list(range(5)) * 4)


def test_synthetic_depends_on_seed_and_sample_alone() -> None:
    tokens, labels = pair(SOURCE, 17)
    again, _ = pair(Synthetic(seed=0, vocab=50, seq_len=8, samples=10**6, ignored=0.5), 17)
    assert tokens.tolist() == again.tolist() == [30, 13, 2, 30, 0, 24, 18, 17]  # recorded once
    assert labels[:-1].tolist() == tokens[1:].tolist()
    assert tokens.tolist() != SOURCE.sample(18).tokens.tolist()
    assert tokens.tolist() != Synthetic(seed=1, vocab=50, seq_len=8).sample(17).tokens.tolist()


def test_synthetic_covers_the_vocabulary_evenly() -> None:
    source = Synthetic(seed=0, vocab=10, seq_len=10_000)
    counts = np.bincount(source.sample(0).tokens, minlength=10)
    assert len(counts) == 10
    assert 850 < counts.min() < counts.max() < 1150


def test_ignored_labels_vary_by_sample_and_leave_a_target() -> None:
    source = Synthetic(seed=0, vocab=50, seq_len=16, samples=200, ignored=1.0)
    plain = Synthetic(seed=0, vocab=50, seq_len=16, samples=200)
    targets = []
    for i in range(200):
        tokens, labels = pair(source, i)
        kept = labels != IGNORED
        assert (labels[kept] == plain.sample(i).labels[kept]).all()
        assert tokens.min() >= 0
        targets.append(int(kept.sum()))
    assert min(targets) >= 1
    assert len(set(targets)) > 10
    assert 7 < np.mean(targets) < 10


def test_f07_digest_sees_one_changed_token_or_label() -> None:
    micro = batches(microbatch=2).batch(0, 0)[0]
    same = batches(microbatch=2).batch(0, 0)[0]
    assert batch_digest([micro]) == batch_digest([same]) < 2**56
    same.tokens[1, 3] += 1
    assert batch_digest([micro]) != batch_digest([same])
    other = batches(microbatch=2).batch(0, 0)[0]
    other.labels[0, 0] = IGNORED
    assert batch_digest([micro]) != batch_digest([other])


def test_f09_data_beyond_the_model_refused_before_the_run(prefix: Path) -> None:
    with pytest.raises(Refused, match="G205") as refused:
        open_data(Data(path=str(prefix)), vocab=256, seq_len=4)
    assert "256" in refused.value.faults[0].message


def test_data_shorter_than_a_sample_refused(prefix: Path) -> None:
    assert open_data(Data(path=str(prefix)), vocab=257, seq_len=14).train.samples == 1
    with pytest.raises(Refused, match="G301"):
        open_data(Data(path=str(prefix)), vocab=257, seq_len=15)


def test_batches_of_a_setup_follow_its_plan() -> None:
    setup = Setup(
        model=model_named("tiny-llama"),
        workload=Workload(seq_len=8, global_batch=12),
        cluster=cluster_named("local"),
        plan=Plan(data=2, microbatches=2),
    )
    run = batches_of(SOURCE, seed=9, setup=setup)
    assert (run.data, run.microbatch, run.microbatches, run.global_batch) == (2, 3, 2, 12)


def test_e03_last_batch_of_an_evaluation_is_filled_and_counts_each_sample_once() -> None:
    # 5 samples, microbatch 2, data 2: two batches on both ranks, never [[0, 1], [4]] against [[2, 3], []]
    five = Synthetic(seed=0, vocab=9, seq_len=3, samples=5)
    run = HeldOut(source=five, seed=1, data=2, microbatch=2, microbatches=1)
    assert run.batches == 2
    parts = [[m for number in range(2) for m in run.batch(number, d)] for d in range(2)]
    assert all(m.tokens.shape == (2, 3) for part in parts for m in part)
    seen = [i for part in parts for m in part for i in m.samples]
    assert sorted(seen) == [-1, -1, -1, 0, 1, 2, 3, 4]
    # a "loss" that is the label itself: its mean over ranks and batches is that of the five samples
    total = sum(int(m.labels[m.labels != IGNORED].sum()) for part in parts for m in part)
    assert sum(m.targets for part in parts for m in part) == 15
    assert total == sum(int(five.sample(i).labels.sum()) for i in range(5))
    assert HeldOut(source=five, seed=1, data=2, microbatch=2, microbatches=1, most=1).batches == 1
