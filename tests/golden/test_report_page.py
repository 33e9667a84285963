"""The HTML report: nothing is loaded from anywhere, and it shows what was computed. A browser looks where one is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from reports import PLANS, gpt3, search, searched, simulated, unpriced

import shardsmith
from shardsmith.cli.simulate import command
from shardsmith.design.planner.result import Neighbour
from shardsmith.design.reports import spans
from shardsmith.design.reports.content import breakdown, memory_bars, report_of_simulation
from shardsmith.design.reports.html import html
from shardsmith.design.reports.sensitivity import sensitivity
from shardsmith.design.simulator.simulation import simulate_plan
from shardsmith.plan.mesh import expert_groups, mesh_of
from shardsmith.units import GIB

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


def data(page: str, name: str) -> dict[str, object]:
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, flags=re.DOTALL)
    assert found
    loaded: dict[str, object] = json.loads(found.group(1))
    return loaded


@pytest.mark.parametrize("report", [searched, simulated, unpriced], ids=lambda f: f.__name__)
def test_a_page_loads_nothing(report: object) -> None:
    page = html(report())  # type: ignore[operator]
    for way in (
        r"\bsrc\s*=",
        r"\bhref\s*=",
        r"@import",
        r"url\(",
        r"\bfetch\(",
        r"XMLHttp",
        r"import\(",
        r"<link",
        r"<iframe",
    ):
        assert not re.search(way, page), way
    assert "{{" not in page
    assert "{%" not in page


def test_a_searched_report_shows_ranking_rules_neighbours_memory_and_assumptions() -> None:
    page, best = html(searched()).replace("<wbr>", ""), search().best
    bubble = best.estimate.breakdown["bubble"] / best.estimate.step_time_s
    assert f"that of the formulas ({bubble:.1%}) the filling and emptying of the pipeline" in page
    rows = re.findall(r'<td class="plan">(.*?)</td>', page)
    assert rows == [str(choice.setup.plan) for choice in search().plans]
    assert (
        "312,345 plans weighed by memory and time, 1,234 of them priced on their own, 1,000,000 more dismissed" in page
    )
    assert f"{best.estimate.tokens_per_s_per_gpu:,.0f}" in page
    assert f"{best.estimate.peak / GIB:.1f} GiB" in page
    for words in ("memory of rank 0", "tensor inside the node", "1.80 &times; its time with tensor=16", "+5.0 %"):
        assert words in page
    for words in (
        "does not fit: 90 GiB",
        "what the search assumes",
        "2 x bandwidth of nvlink",
        "half the microbatches",
    ):
        assert words in page


def test_stragglers_are_in_the_headline() -> None:
    page = html(simulated())
    change = simulated().simulation.seconds / simulated().simulation.undisturbed - 1
    assert f"{change:+.1%}" in page
    assert "rank 70 x 1.2" in page


def test_bars_add_up_and_fit_beside_the_device() -> None:
    bars = memory_bars(simulated())
    assert len(bars["rows"]) == 8
    for row in bars["rows"]:
        assert sum(part["gib"] for part in row["parts"]) == pytest.approx(row["total"])
        assert sum(part["share"] for part in row["parts"]) <= 100
    assert bars["limit_share"] <= 100
    parts = {part["words"]: part["share"] for part in breakdown(simulated())}
    assert sum(parts.values()) == pytest.approx(100)
    assert parts["exchange inside layers"] > 1


def test_the_timeline_of_a_page_is_the_simulated_one() -> None:
    timeline = simulated().simulation.timeline
    columns = spans.timeline_columns(timeline)
    found = set()
    for row in columns["rows"]:
        for lane in row["lanes"]:
            block, n = b64decode(lane["data"]), lane["count"]
            assert len(block) == 13 * n
            start = np.frombuffer(block, "<f4", n)
            microbatch = np.frombuffer(block, "<u2", n, offset=8 * n)
            stage = np.frombuffer(block, "<u2", n, offset=10 * n)
            found |= {(row["rank"], lane["lane"], *map(int, v)) for v in zip(microbatch, stage, strict=True)}
            assert (np.diff(start) >= 0).all()
    wanted = {(s.rank, s.lane, s.microbatch % 65536, s.stage % 65536) for s in timeline.spans}
    assert found == wanted
    assert columns["left"] == 0


def test_too_many_spans_keep_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MOST_SPANS", 100)
    timeline = simulated().simulation.timeline
    columns = spans.timeline_columns(timeline)
    assert {lane["lane"] for row in columns["rows"] for lane in row["lanes"]} == {"compute"}
    assert columns["left"] == len(timeline.spans) - len(timeline.compute())


def test_names_cannot_break_out_of_the_page() -> None:
    setup = gpt3("tensor=8,pipeline=8,data=16")
    named = replace(setup, model=replace(setup.model, name="</script><b>x"), cluster=replace(setup.cluster, name="<i>"))
    page = html(report_of_simulation(simulate_plan(named)))
    assert "<b>x" not in page
    assert "<i> " not in page


def test_a_change_that_is_illegal_says_why_and_more_of_anything_helps() -> None:
    changes = {change.name: change for change in sensitivity(gpt3("tensor=8,pipeline=8,data=16"), "megatron-core")}
    for name in ("2 x bandwidth of nvlink", "2 x bandwidth of infiniband", "2 x memory bandwidth", "2 x peak FLOP/s"):
        step = changes[name].step
        assert step is not None
        assert step <= 1.0
    assert changes["2 x the microbatches"].tokens > 1.0 > changes["half the microbatches"].tokens  # type: ignore[operator]
    longer = changes["2 x the sequence, same tokens"]
    assert longer.step is None
    assert "2048" in longer.reason


def test_simulate_writes_the_page(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.html"
    result = CliRunner().invoke(command, ["--plan", "pipeline=2,microbatches=4", "--html", str(path), "--json"])
    assert json.loads(result.stdout)["files"] == {"html": str(path)}
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert data(path.read_text(encoding="utf-8"), "ranks-data")["world"] == 2


def in_browser(page: str, tmp_path: Path) -> str:
    """The page's document after its scripts have run; an error of any script stands in it as data-error."""
    assert BROWSER
    listen = "<script>onerror = (m) => document.body.dataset.error = m;</script>"
    path = tmp_path / "page.html"
    path.write_text(page.replace("<main>", listen + "<main>"), encoding="utf-8")
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    return subprocess.run([BROWSER, *words, path.as_uri()], capture_output=True, text=True, timeout=120).stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_groups_on_the_map_are_those_of_the_mesh(tmp_path: Path) -> None:
    setup = shardsmith.make_setup(
        plan="data=4,tensor=2,pipeline=2,expert=4,expert_tensor=1,replicate=1",
        model="mixtral-8x7b",
        cluster="h100",
        nodes=2,
        seq_len=4096,
        dtype="bfloat16",
    )
    ask = """<script>{ const select = document.getElementById("axis"), all = {};
      const ranks = [...Array(16).keys()];
      for (const { value } of select.options) { select.value = value; all[value] = ranks.map(report.ranks.group); }
      document.title = JSON.stringify(all); }</script></body>"""
    page = html(report_of_simulation(simulate_plan(setup))).replace("</body>", ask)
    title = re.search(r"<title>(.*?)</title>", in_browser(page, tmp_path))
    assert title
    drawn = json.loads(title.group(1))
    assert set(drawn) == {"stage", "pipeline", "shard", "tensor", "expert"}
    groups = {axis: set(mesh_of(setup.plan).groups(axis)) for axis in ("pipeline", "shard", "tensor")}
    groups["expert"] = {tuple(sorted(g)) for g in expert_groups(setup.plan, "expert")}
    for axis, wanted in groups.items():
        found: dict[int, list[int]] = {}
        for rank, group in enumerate(drawn[axis]):
            found.setdefault(group, []).append(rank)
        assert {tuple(ranks) for ranks in found.values()} == {tuple(sorted(g)) for g in wanted}, axis
    assert drawn["stage"] == [mesh_of(setup.plan).coord(rank).pipeline for rank in range(16)]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("report", [searched, unpriced], ids=lambda f: f.__name__)
def test_a_browser_draws_the_page(report: object, tmp_path: Path) -> None:
    drawn = in_browser(html(report()), tmp_path)  # type: ignore[operator]
    assert "data-error" not in drawn
    assert re.search(r'id="where">0 s to [\d.]+ m?s of', drawn)
    legend = re.search(r'id="timeline-legend">(.*?)</p>', drawn)
    assert legend
    assert "forward" in legend.group(1)
    assert '<option value="stage">' in drawn


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_on_a_telephone_figures_of_neighbours_and_communication_are_seen(tmp_path: Path) -> None:
    """400 pixels: a long change leaves room for its figures, and short messages colour their lane at full zoom."""
    orders = [f"tensor-context-{rest}" for rest in ("data-pipeline", "pipeline-data")]
    long = Neighbour(axis="order", before=orders[0], after=orders[1], plan=PLANS[0], ratio=1.01, peak_gib=60.0)
    best = replace(search().best, neighbours=(long,))
    page = html(replace(searched(), search=replace(search(), plans=(best, *search().plans[1:]))))
    look = """<script>const frame = document.querySelector("iframe"); frame.onload = () => {
      const inner = frame.contentDocument, cell = inner.querySelector("td.change").parentElement.cells[2];
      const canvas = inner.getElementById("timeline-canvas"), pen = canvas.getContext("2d");
      const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
      let tensor = 0;
      for (let at = 0; at < data.length; at += 4) {
        const [red, green, blue] = data.slice(at, at + 3);
        if (blue - green > 30 && red - green > 15) tensor++; }
      document.title = JSON.stringify({ right: cell.getBoundingClientRect().right, tensor }); };
      frame.srcdoc = PAGE;</script>"""
    shown = look.replace("PAGE", json.dumps(page).replace("<", "\\u003c"))
    drawn = in_browser(f'<main></main><iframe width="400" height="900"></iframe>{shown}', tmp_path)
    found = json.loads(re.search(r"<title>(.*?)</title>", drawn).group(1))  # type: ignore[union-attr]
    assert found["right"] <= 400
    assert found["tensor"] > 300
