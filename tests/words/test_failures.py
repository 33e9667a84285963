"""Which failure is the cause, and who kept whom waiting (no rank is started here)."""

import pickle

import pytest

from shardsmith.engine.runtime import progress
from shardsmith.engine.runtime.environment import CONTRADICTION
from shardsmith.engine.runtime.failures import (
    Failure,
    RankFailed,
    clear,
    describe,
    explain_here,
    judge,
    kind_of,
    log_path,
    write_failure,
)

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4321"


class DistNetworkError(RuntimeError):
    __module__ = "torch.distributed"


@pytest.mark.parametrize(
    ("exception", "kind"),
    [
        (RuntimeError(GLOO), "consequence"),
        (DistNetworkError("failed to recv, got 0 bytes"), "consequence"),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), "waiting"),
        (RuntimeError("shapes do not match"), "cause"),
        (MemoryError("no room"), "cause"),
        # the library's words in an error that is not the library's
        (ValueError(GLOO), "cause"),
        (BrokenPipeError("Broken pipe"), "cause"),
    ],
)
def test_kinds(exception, kind):
    assert kind_of(exception) == kind


def test_an_error_raised_from_an_echo_is_an_echo():
    wrapped = ValueError("could not save")
    wrapped.__cause__ = RuntimeError(GLOO)
    assert kind_of(wrapped) == "consequence"


def note(folder, rank, *operations, step=None):
    progress.start_notes(folder, rank)
    if step is not None:
        progress.at_step(step)
    for operation, group, ranks in operations:
        progress.joining(operation, group=group, ranks=ranks)
    progress.stop_notes()


def test_notes_are_read_back(tmp_path):
    first, second = ("all_reduce", "data", (0, 2)), ("send", "pipeline", (0, 1))
    note(tmp_path, 0, first, second, ("an operation with a longer name", "data", (0, 2)), step=12)
    found = progress.read_progress(tmp_path, [0, 1])
    assert found[1] == progress.Progress()
    assert found[0].step == 12
    assert found[0].joined == (
        progress.Joined(group="data", ranks=(0, 2), number=2, operation="an operation with a longer name"),
        progress.Joined(group="pipeline", ranks=(0, 1), number=1, operation="send"),
    )
    assert (found[0].count("data", [0, 2]), found[0].count("data", [0, 1])) == (2, 0)


def test_without_a_folder_notes_are_dropped():
    progress.at_step(3)
    progress.joining("all_reduce", group="data", ranks=(0, 1))
    assert progress.current_step() is None


def test_absent_follows_the_chain_to_who_waits_for_nobody(tmp_path):
    # 0 waits for 1 on the data axis, 1 waits for 3 on the tensor axis; 2 is fine
    note(tmp_path, 0, ("all_reduce", "data", (0, 1)), ("all_gather", "tensor", (0, 2)))
    note(tmp_path, 1, ("all_gather", "tensor", (1, 3)))
    note(tmp_path, 2, ("all_gather", "tensor", (0, 2)))
    note(tmp_path, 3)
    found = progress.absent(progress.read_progress(tmp_path, range(4)), 0)
    assert {rank: (j.group, j.number) for rank, j in found.items()} == {3: ("tensor", 1)}
    assert progress.absent(progress.read_progress(tmp_path, range(4)), 2) == {}


def failure(rank, kind, time, **more):
    return Failure(rank=rank, kind=kind, type="E", message=f"of rank {rank}", traceback="tb", time=time, **more)


def test_the_earliest_cause_is_judged_not_the_earliest_failure(tmp_path):
    for one in (
        failure(0, "consequence", 1.0),
        failure(1, "cause", 3.0),
        failure(2, "cause", 2.0, step=7),
        failure(3, "waiting", 0.5),
    ):
        write_failure(one, tmp_path)
    log_path(tmp_path, 2).write_text("\n".join(f"line {n}" for n in range(50)))
    judged = judge(tmp_path, 4, exit_codes={0: 1, 1: 1, 2: 1, 3: -9})
    assert (judged.rank, judged.step, judged.faults[0].code) == (2, 7, "R201")
    assert "rank 2 failed in step 7: E: of rank 2\n  | tb" in str(judged)
    assert "line 49" in str(judged)
    assert "line 39" not in str(judged)


def test_a_signal_comes_before_its_echo(tmp_path):
    write_failure(failure(0, "consequence", 1.0), tmp_path)
    judged = judge(tmp_path, 2, exit_codes={1: -11})
    assert (judged.rank, judged.faults[0].code) == (1, "R202")
    assert "rank 1 was killed by signal 11 (SIGSEGV)" in str(judged)
    assert "rank 1 ended with status 3" in str(judge(tmp_path, 2, exit_codes={1: 3}))


def test_only_echoes_and_nobody_behind(tmp_path):
    for rank in (0, 1):
        write_failure(failure(rank, "waiting", float(rank)), tmp_path)
    assert "all ranks failed in the same way: rank 0, rank 1" in str(judge(tmp_path, 2, exit_codes={}))


def test_an_earlier_run_is_forgotten(tmp_path):
    write_failure(failure(0, "cause", 1.0), tmp_path)
    note(tmp_path, 0, step=3)
    (tmp_path / "metrics.jsonl").touch()
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_refusal_crosses_processes_with_its_faults_and_codes():
    written = describe(4, CONTRADICTION.refuse("no", ("here", "x = 1"), hint="x = 2"))
    assert pickle.loads(pickle.dumps(written)).faults == written.faults
    judged = RankFailed(written.faults, rank=4, step=2)
    again = pickle.loads(pickle.dumps(judged))
    assert (again.faults, again.rank, again.step) == (judged.faults, 4, 2)


def test_under_a_launcher_the_error_itself_says_who_was_absent(tmp_path):
    note(tmp_path, 0, ("all_reduce", "data", (0, 1)))
    note(tmp_path, 1)
    error = RuntimeError(GLOO)
    explain_here(0, 2, tmp_path, error)
    assert error.__notes__ == ["rank 1 did not join all_reduce number 1 of group data [0, 1]"]


def test_every_code_stands_in_one_place() -> None:
    import re
    from collections import Counter
    from pathlib import Path

    import shardsmith

    sources = Path(shardsmith.__file__).parent.rglob("*.py")
    codes = Counter(code for path in sources for code in re.findall(r'code="([A-Z]\d+)"', path.read_text()))
    assert [code for code, count in codes.items() if count > 1] == []
