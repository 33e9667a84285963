"""Every refusal comes in under two seconds, imports included: nobody waits for torch to learn of a typing error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from seconds import seconds_of

SHARDSMITH = Path(sys.executable).parent / "shardsmith"
LIMIT_S = 2.0

MODEL = '[model]\npreset = "tiny-llama"\n[workload]\nseq_len = 128\nglobal_batch = 16\n'
FILES = {
    "plan.toml": MODEL + "[plan]\ntensor = 3\ndata = 5\n",
    "job.toml": MODEL + '[plan]\ntensor = 2\n[data]\npath = "no/such/text"\n',
    "words.toml": MODEL.replace("[workload]", "vocab = 128\n[workload]") + '[plan]\n[data]\ntokenizer = "byte"\n',
    "synthetic.toml": MODEL + "[plan]\ntensor = 2\n",
    "typo.toml": MODEL + "[plan]\ntensro = 2\n",
}
REFUSALS = {
    "check a plan": ("check plan.toml", "T204"),
    "check a misspelt key": ("check typo.toml", "F101"),
    "train a plan": ("train plan.toml", "T204"),
    "train on no text": ("train job.toml", "G201"),
    "train with too large a tokenizer": ("train words.toml", "G204"),
    "train a missing file": ("train none.toml", "F110"),
    "train with other ranks": ("train synthetic.toml", "R106"),
    "verify a plan": ("verify plan.toml", "T204"),
    "verify too many ranks": ("verify --plan data=32", "X202"),
    "verify too large a model": ("verify --plan tensor=2 --model llama3-8b", "X203"),
    "verify what is not built": ("verify --plan schedule=pipedream,pipeline=2,microbatches=4", "S009"),
    "prepare nothing": ("prepare none --out text", "G001"),
    "a schedule that does not exist": ("schedule one_f_two_b --pipeline 2 --microbatches 4", "S"),
    "an unknown code": ("explain Q999", "F001"),
}
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29431"}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_takes_under_two_seconds(name, tmp_path):
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    words, code = REFUSALS[name]
    environment = {**os.environ, **(LAUNCHED if code == "R106" else {})}
    command = [SHARDSMITH, *words.split(), "--json"]
    done, seconds = seconds_of(command, LIMIT_S, cwd=tmp_path, env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(error["code"].startswith(code) for error in json.loads(done.stdout)["errors"]), done.stdout
    assert seconds < LIMIT_S


def test_a_message_keeps_its_brackets(tmp_path):
    (tmp_path / "typo.toml").write_text(FILES["typo.toml"])
    done = subprocess.run([SHARDSMITH, "check", "typo.toml"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "error[F101]: [plan] has no key tensro" in done.stdout
