"""Parity is proven in float64 or float32, whatever a plan computes in; ranks of a launcher say a thing once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from click.testing import CliRunner

from shardsmith.cli.main import main
from shardsmith.plan.file import dumps, make_setup

pytestmark = pytest.mark.ranks

MAIN = "from shardsmith.cli.main import main; main()"


def said(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_dtype_that_is_asked_for_is_refused_at_once(dtype: str) -> None:
    code, text = said("verify", "--plan", "data=2", "--dtype", dtype)
    assert code == 1
    assert f"error[X204]: a plan cannot be proven in {dtype}" in text
    assert "hint: --dtype float64" in text


def test_a_plan_file_in_bfloat16_is_proven_in_float32_and_told(tmp_path: Path) -> None:
    setup = make_setup(plan="data=2,zero=1,param_dtype=bfloat16", seq_len=8, global_batch=2, dtype="bfloat16")
    (tmp_path / "plan.toml").write_text(dumps(setup))
    code, text = said("verify", tmp_path / "plan.toml", "--steps", 1)
    assert code == 0, text
    assert "float32: bfloat16, as asked, rounds too much to judge by" in text
    assert "shrunk" not in text


def test_ranks_of_a_launcher_say_a_refusal_and_the_result_once(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        '[model]\npreset = "tiny-llama"\n[workload]\nseq_len = 8\nglobal_batch = 2\n[plan]\ndata = 2\n'
        "[run]\nsteps = 1\ntensorboard = false\n"
    )

    def launched(*words: str) -> tuple[list[int], str]:
        ranks = []
        for rank in range(2):
            shared = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            master = {"SHARDSMITH_MASTER": f"file://{tmp_path}/meet", "OMP_NUM_THREADS": "1"}
            command = [
                sys.executable,
                "-c",
                "from shardsmith.cli.main import main; main()",
                "train",
                "job.toml",
                *words,
            ]
            environment = {**os.environ, **shared, **master}
            ranks.append(Popen(command, cwd=tmp_path, env=environment, stdout=PIPE, stderr=PIPE, text=True))
        told = [rank.communicate(timeout=120) for rank in ranks]
        return [rank.returncode for rank in ranks], "".join(part for parts in told for part in parts)

    codes, text = launched("--set", "run.resume=none")
    assert codes == [1, 1]
    assert text.count("error[F506]") == 1
    codes, text = launched()
    assert codes == [0, 0], text
    assert text.count("step 1: loss") == 1
