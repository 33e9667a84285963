"""The planner: CPU-seconds of whole searches, of refusals, and plans priced a CPU-second.

    .venv/bin/python benchmarks/planner.py --write docs/planner.md

Every search runs N times, each in a process of its own: what is loaded and compiled at first is in the figures, the
start of Python and the import of the package are not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from report import machine, write_section


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is asked, and the CPU-seconds aimed at."""

    model: str
    cluster: str
    nodes: int
    global_batch: int
    seq_len: int
    target: float | None = None


SEARCHES = (
    Search(model="llama3-405b", cluster="h100", nodes=2048, global_batch=2048, seq_len=8192, target=3.0),
    Search(model="gpt3-175b", cluster="a100", nodes=128, global_batch=1536, seq_len=2048, target=0.5),
    Search(model="deepseek-v3", cluster="h800", nodes=256, global_batch=15360, seq_len=4096, target=10.0),
    Search(model="deepseek-v3", cluster="h800", nodes=16, global_batch=15360, seq_len=4096),
    Search(model="llama3-405b", cluster="h100", nodes=1, global_batch=16, seq_len=8192),
)

SEARCH = """
import json, sys, time
import shardsmith
from shardsmith.api import search
from shardsmith.design.planner import search as _
from shardsmith.errors import Refused
question = json.loads(sys.argv[1])
start = time.process_time()
try:
    found = search(question.pop("model"), question.pop("cluster"), **question)
    plans = {"searched": found.searched, "dismissed": found.dismissed}
except Refused:
    plans = {"searched": 0, "dismissed": 0}
print(json.dumps({"seconds": time.process_time() - start, **plans}))
"""

EVERY = """
import json, time
from shardsmith.design.cost.subject import make_subject
from shardsmith.design.planner.bounded import Bounded
from shardsmith.design.planner.space import Space
from shardsmith.specs.job import Workload
from shardsmith.specs.library import cluster_named, model_named
cluster = cluster_named("h100").with_nodes(2)
subject = make_subject(model_named("llama3-8b"), Workload(seq_len=8192, global_batch=64, dtype="bfloat16"), cluster)
search = Bounded(space=Space(subject=subject, world=16), limit=79 * 2**30, bound=False)
start = time.process_time()
found = search.run()
assert found.searched == found.total
print(json.dumps({"seconds": time.process_time() - start, "searched": found.searched, "dismissed": 0}))
"""
"""Every plan put together and priced, in time and in memory of each decisive rank; no bound dismisses any."""


def measured(code: str, *arguments: str) -> dict[str, float]:
    """What one process prints."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, timeout=300)
    return dict(json.loads(done.stdout))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="processes a search")
    parser.add_argument("--write", type=Path, help="write the figures into this page, between its markers")
    chosen = parser.parse_args()
    lines = [
        "| search | plans in the space | decided one by one | CPU seconds | aimed at |",
        "|---|---|---|---|---|",
    ]
    for search in SEARCHES:
        asked = asdict(search)
        target = asked.pop("target")
        runs = [measured(SEARCH, json.dumps(asked)) for _ in range(chosen.repeats)]
        nodes = f"{search.nodes} node{"s" * (search.nodes > 1)}"
        name = f"{search.model}, {nodes} of {search.cluster}, {search.global_batch:,} x {search.seq_len:,}"
        lines.append(line(name, runs, "" if target is None else f"{target:g}"))
    runs = [measured(EVERY) for _ in range(chosen.repeats)]
    lines.append(line("llama3-8b, 2 nodes of h100, no bounds: every plan priced", runs, ""))
    rate = max(run["searched"] / run["seconds"] for run in runs) / 1e6
    text = (
        f"Speed: CPU seconds of `shardsmith.search` on one core, least and most of {chosen.repeats} processes, each of "
        f"which runs one search (`benchmarks/planner.py`, {machine()}). Without bounds that is {rate:.1f} million plans "
        "a second, with time and memory of each.\n\n" + "\n".join(lines)
    )
    print(text)
    if chosen.write is not None:
        write_section(chosen.write, "speed", text)
    return 0


def line(name: str, runs: list[dict[str, float]], target: str) -> str:
    """A row of the table."""
    seconds, first = [run["seconds"] for run in runs], runs[0]
    total = first["searched"] + first["dismissed"]
    plans = (f"{total:,.0f}", f"{first['searched']:,.0f}") if total else ("nothing fits: refused", "")
    return f"| {name} | {plans[0]} | {plans[1]} | {min(seconds):.2f} to {max(seconds):.2f} | {target} |"


if __name__ == "__main__":
    sys.exit(main())
