"""Runs the code blocks of a Markdown file, in order, in one folder.

A block tagged `bash` or `python` runs. A block tagged `text` that follows one directly is what that
block prints; a line `...` in it stands for any lines. The comment `<!-- no-test -->` on the line
before a block leaves that block alone: for what takes minutes (`make`, `demo`, `train`) or differs
from run to run.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SKIP = "<!-- no-test -->"
LONG = re.compile(r"^\s*(make\b|shardsmith (demo|train)\b)", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its tag, its text, the line where it begins, and the text block it must print."""

    tag: str
    text: str
    line: int
    output: str | None


def blocks(markdown: str) -> list[Block]:
    """The blocks to run. Raises AssertionError for a long one that does not carry the skip comment."""
    found: list[Block] = []
    end_of_last = -1
    for match in FENCE.finditer(markdown):
        tag, text = match.groups()
        before = markdown[: match.start()].rstrip()
        line = markdown.count("\n", 0, match.start()) + 1
        if before.endswith(SKIP):
            end_of_last = -1
        elif tag in ("bash", "python"):
            assert not LONG.search(text), f"line {line}: this block takes minutes, so it needs {SKIP} above it"
            found.append(Block(tag=tag, text=text, line=line, output=None))
            end_of_last = match.end()
        elif tag == "text" and len(before) == end_of_last:
            last = found.pop()
            found.append(Block(tag=last.tag, text=last.text, line=last.line, output=text))
            end_of_last = -1
    return found


def run(block: Block, folder: Path, timeout: float = 120) -> None:
    """Run one block in `folder`; AssertionError with its output where it fails or prints something else."""
    shell = ["bash", "-euo", "pipefail", "-c"] if block.tag == "bash" else [sys.executable, "-c"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        [*shell, block.text], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"the block on line {block.line} failed:\n{block.text}\n{done.stdout}{done.stderr}"
    if block.output is not None:
        assert prints(done.stdout, block.output), (
            f"the block on line {block.line} prints:\n{done.stdout}\ninstead of:\n{block.output}"
        )


def prints(output: str, wanted: str) -> bool:
    """Whether `output` is `wanted`, apart from space at the ends of lines; `...` stands for any lines."""
    lines = [
        "(?:[^\n]*\n)*?" if w.strip() == "..." else re.escape(w.rstrip()) + "\n" for w in wanted.strip("\n").split("\n")
    ]
    shown = "".join(f"{line.rstrip()}\n" for line in output.strip("\n").split("\n"))
    return re.fullmatch("".join(lines), shown) is not None
