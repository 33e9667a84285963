"""The picture and the terminal form of a timeline, on a simulated 1F1B step."""

import subprocess
import sys

import pytest

from shardsmith.design.reports.timeline_picture import (
    LANE_TONES,
    MOST_RANKS,
    draw_timeline,
    groups_of,
    kind_of,
    timeline_figure,
    timeline_text,
)
from shardsmith.errors import Refused
from shardsmith.timeline import Span, Timeline


def one_f_one_b(*, pipeline, microbatches, copies=1, tensor=False, notes=()):
    """A 1F1B step with F = 1 ms and B = 2 ms on `copies` identical pipelines; ranks pipeline-major."""
    done, spans = {}, []
    todo, clock = [], [0.0] * pipeline
    for p in range(pipeline):
        warm = min(pipeline - p, microbatches)
        actions = [("F", m) for m in range(warm)]
        for m in range(microbatches):
            actions += [("B", m)] + ([("F", m + warm)] if m + warm < microbatches else [])
        todo.append(actions)
    while any(todo):
        for p, actions in enumerate(todo):
            if not actions:
                continue
            kind, m = actions[0]
            wanted = [("F", p - 1, m)] if kind == "F" and p else []
            wanted += [("B", p + 1, m)] if kind == "B" and p < pipeline - 1 else []
            if any(w not in done for w in wanted):
                continue
            start = max([clock[p], *(done[w] for w in wanted)])
            end = start + (0.001 if kind == "F" else 0.002)
            clock[p] = done[kind, p, m] = end
            actions.pop(0)
            spans += rank_spans(kind, p, m, start, end, pipeline, copies, tensor)
    return Timeline(origin="simulated", spans=tuple(spans), notes=notes)


def rank_spans(kind, p, m, start, end, pipeline, copies, tensor):
    for copy in range(copies):
        rank = p * copies + copy
        yield Span(rank=rank, lane="compute", name=f"{kind}{p}.{m}", start=start, end=end, stage=p, microbatch=m)
        if p + 1 < pipeline if kind == "F" else p:
            yield Span(rank=rank, lane="pipeline", name="send", start=end, end=end + 0.0001, stage=p, microbatch=m)
        if tensor:
            for at in (start + 0.3 * (end - start), start + 0.8 * (end - start)):
                yield Span(rank=rank, lane="tensor", name="all_reduce", start=at, end=at + 0.00015)


def bars(figure, gid):
    return sum(len(c.get_paths()) for c in figure.axes[0].collections if c.get_gid() == gid)


def test_a_bar_for_every_span_and_a_number_for_every_microbatch():
    timeline = one_f_one_b(pipeline=4, microbatches=8, tensor=True)
    figure = timeline_figure(timeline)
    assert bars(figure, "compute") == 4 * 8 * 2
    assert bars(figure, "pipeline") == 3 * 8 * 2
    assert bars(figure, "tensor") == 4 * 8 * 2 * 2
    assert bars(figure, "data") == 0
    numbers = [t.get_text() for t in figure.axes[0].texts if t.get_text().isdigit()]
    assert sorted(numbers) == sorted(str(m) for m in range(8) for _ in range(4 * 2))


def test_bars_stand_where_the_spans_are():
    timeline = one_f_one_b(pipeline=2, microbatches=3)
    figure = timeline_figure(timeline)
    drawn = {
        (round(p.get_extents().x0, 6), round(p.get_extents().x1, 6))
        for c in figure.axes[0].collections
        if c.get_gid() == "compute"
        for p in c.get_paths()
    }
    assert drawn == {(round(s.start * 1e3, 6), round(s.end * 1e3, 6)) for s in timeline.compute()}


def test_title_tells_origin_makespan_idle_share_and_notes():
    timeline = one_f_one_b(pipeline=4, microbatches=8, notes=("paced F=1ms B=2ms",))
    words = " ".join(t.get_text() for t in timeline_figure(timeline, title="1F1B").texts)
    assert "1F1B" in words
    assert "simulated" in words
    assert "paced F=1ms B=2ms" in words
    assert "makespan 33.00 ms" in words  # (m + P - 1)(F + B)
    assert "idle 27.3%" in words  # (P - 1) / (m + P - 1)


def test_legend_names_what_is_drawn_and_nothing_else():
    legend = timeline_figure(one_f_one_b(pipeline=2, microbatches=2)).legends[0]
    words = [t.get_text() for t in legend.get_texts()]
    assert words == ["forward", "backward", "idle", "pipeline communication"]


def test_numbers_that_do_not_fit_are_left_out():
    timeline = one_f_one_b(pipeline=2, microbatches=400)
    assert not [t for t in timeline_figure(timeline).axes[0].texts if t.get_text().isdigit()]


def test_ranks_are_grouped_by_stage():
    timeline = one_f_one_b(pipeline=2, microbatches=2, copies=2)
    assert [(g.stages, g.ranks) for g in groups_of(timeline)] == [((0,), (0, 1)), ((1,), (2, 3))]
    labels = [t.get_text() for t in timeline_figure(timeline).axes[0].get_yticklabels()]
    assert labels == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_many_ranks_show_one_of_each_group_and_say_so():
    timeline = one_f_one_b(pipeline=4, microbatches=4, copies=16)
    assert len(timeline.ranks) > MOST_RANKS
    figure = timeline_figure(timeline)
    assert len(figure.axes[0].get_yticklabels()) == 4
    assert any("64 ranks, the first of each group shown" in t.get_text() for t in figure.texts)


@pytest.mark.parametrize(("name", "kind"), [("F2.5", "F"), ("B", "B"), ("W0.1", "W"), ("I3.0", "I"), ("Wait", "other")])
def test_kind_comes_from_the_name(name, kind):
    assert kind_of(Span(rank=0, lane="compute", name=name, start=0.0, end=1.0)) == kind


def test_every_communication_lane_has_a_tone_of_its_own():
    assert len(set(LANE_TONES.values())) == 5


def test_files_are_written_and_equal_timelines_give_equal_files(tmp_path):
    timeline = one_f_one_b(pipeline=2, microbatches=4)
    png = draw_timeline(timeline, tmp_path / "new" / "t.png")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    first, second = (draw_timeline(timeline, tmp_path / name) for name in ("a.svg", "b.svg"))
    assert first.read_text().lstrip().startswith("<?xml")
    assert first.read_bytes() == second.read_bytes()


def test_unknown_format_is_refused_with_a_legal_neighbour(tmp_path):
    with pytest.raises(Refused) as refused:
        draw_timeline(one_f_one_b(pipeline=2, microbatches=1), tmp_path / "t.bmp")
    (fault,) = refused.value.faults
    assert fault.code == "F601"
    assert fault.hint.endswith("t.png")


def test_reading_the_module_does_not_load_matplotlib():
    code = "import sys, shardsmith.design.reports.timeline_picture; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_text_form():
    timeline = one_f_one_b(pipeline=4, microbatches=4)
    assert timeline_text(timeline, width=72) == "\n".join(
        [
            "simulated  ·  makespan 21.00 ms  ·  idle 42.9% of the step",
            "rank 0 ▕0██1██2██3██··················0▒▒▒▒▒···1▒▒▒▒▒···2▒▒▒▒▒···3▒▒▒▒▒▏",
            "rank 1 ▕···0██1██2██············0▒▒▒▒▒3██1▒▒▒▒▒···2▒▒▒▒▒···3▒▒▒▒▒······▏",
            "rank 2 ▕······0██1██······0▒▒▒▒▒2██1▒▒▒▒▒3██2▒▒▒▒▒···3▒▒▒▒▒············▏",
            "rank 3 ▕·········0██0▒▒▒▒▒1██1▒▒▒▒▒2██2▒▒▒▒▒3██3▒▒▒▒▒··················▏",
            "        █ forward   ▒ backward   · idle   a column is 333.33 us",
        ]
    )


def test_text_form_keeps_its_width():
    lines = timeline_text(one_f_one_b(pipeline=4, microbatches=13), width=60).splitlines()
    assert {len(line) for line in lines[1:5]} == {60}
