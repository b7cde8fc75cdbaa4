"""Console output: bars on a terminal, a few plain lines in a log, and aligned tables."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from tidewheel import console as module
from tidewheel.console import Bars, Output, bars, print_table
from tidewheel.data.progress import stage_bars
from tidewheel.train.progress import LINES, describe, training_bar


@pytest.fixture
def log(monkeypatch):
    """Return the console of a job's log, which is no terminal."""
    sink = io.StringIO()
    monkeypatch.setattr(module, "console", Console(file=sink, highlight=False, soft_wrap=True))
    return sink


def test_a_log_gets_the_first_and_the_last_state(log):
    with bars() as group, group.bar("reading", 1000, unit="files") as bar:
        for _ in range(1000):
            bar.advance(note="fine")
    output = log.getvalue().splitlines()
    assert len(output) <= 3
    assert output[0].startswith("reading: 1/1000 files")
    assert output[-1].startswith("reading: 1000/1000 files  fine")


def test_a_terminal_gets_a_bar(monkeypatch):
    sink = io.StringIO()
    monkeypatch.setattr(module, "console", Console(file=sink, force_terminal=True, width=120))
    with bars() as group, group.bar("reading", 3, unit="files") as bar:
        bar.update(2, note="so far")
    assert "2/3 files" in sink.getvalue()
    assert "━" in sink.getvalue()


def test_a_bar_that_fails_still_says_where_it_stopped(log):
    def read() -> None:
        with Bars(None).bar("reading", 10) as bar:
            bar.update(4)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        read()
    assert "reading: 4/10" in log.getvalue().splitlines()[-1]


def test_stages_follow_each_other(log):
    with stage_bars() as on_progress:
        on_progress("ingest", 0, 2, "")
        on_progress("ingest", 2, 2, "")
        on_progress("pack", 1, 1, "done")
    output = log.getvalue()
    assert output.index("ingest: 2/2") < output.index("pack: 1/1")


def test_table_lines_up_and_takes_numbers_and_text():
    sink = io.StringIO()
    print_table([{"stage": "ingest", "in": "2,991", "n": 5}, {"stage": "x", "in": "7", "n": 12345}], title="kept",
                to=Console(file=sink, width=80))
    lines = [line.rstrip() for line in sink.getvalue().splitlines()]
    assert lines[0] == "kept"
    assert lines[2].split() == ["ingest", "2,991", "5"]
    assert lines[3].endswith("12,345")
    assert len(lines[2]) == len(lines[3])


def test_an_empty_table_says_so():
    sink = io.StringIO()
    print_table([], to=Console(file=sink, width=80))
    assert "nothing" in sink.getvalue()


@pytest.mark.parametrize("kind", LINES)
def test_events_without_some_details_can_be_shown(kind):
    assert describe({"kind": kind, "detail": {}})


def test_an_event_is_one_short_line():
    event = {"kind": "failure", "detail": {"error": "x" * 1000 + "\nsecond line"}}
    assert len(describe(event)) < 250
    assert describe({"kind": "brand_new", "detail": {}}) == "brand new"


def test_the_training_bar_shows_events_and_speed(log, monkeypatch):
    monkeypatch.setattr("tidewheel.train.progress.console", module.console)
    with training_bar(10) as on_progress:
        on_progress({"step": 3, "loss": 2.5, "tokens_per_second": 1234.5, "world_size": 1,
                     "events": [{"kind": "node_lost", "detail": {"host": "10.0.0.7"}}]})
    assert "node 10.0.0.7 is gone" in log.getvalue()
    assert "3/10 steps  loss 2.500, 1,234 tokens/s, 1 worker" in log.getvalue()


def test_stages_show_their_number_and_total(log):
    with stage_bars(["ingest", "partition", "dedup_near", "pack"]) as on_progress:
        for stage in ("ingest", "partition", "dedup_near_edges", "near_index", "pack", "decontaminate_packed"):
            on_progress(stage, 1, 1)
    output = [line.partition(":")[0] for line in log.getvalue().splitlines()]
    assert list(dict.fromkeys(output)) == [
        "stage 1 of 4, ingest", "stage 2 of 4, partition", "stage 3 of 4, dedup_near_edges", "stage 3 of 4, near_index",
        "stage 4 of 4, pack", "stage 4 of 4, decontaminate_packed"]


def test_a_log_says_at_once_that_another_part_of_the_work_begins(log):
    """Kernels compile for a minute, during which the log once showed `ingest: 0/1 units`."""
    with stage_bars(["ingest"]) as on_progress:
        on_progress("ingest", 0, 3, "")
        on_progress("ingest", 0, 3, "compiling text kernels")
        on_progress("ingest", 1, 3, "5 documents")
        on_progress("ingest", 2, 3, "9 documents")
    output = log.getvalue().splitlines()
    assert output[1] == "stage 1 of 1, ingest: 0/3 units  compiling text kernels"
    assert len(output) == 3  # an update of the count alone waits for the interval


def test_a_log_says_how_long_the_rest_takes(log, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with bars() as group, group.bar("pack", 1_000_000, unit="units") as bar:
        bar.update(400_000, note="there already")  # an earlier run's units say nothing about the speed of this one
        now[0] += 60
        bar.update(500_000, note="")
        now[0] += 60
        bar.update(600_000)
    assert log.getvalue().splitlines()[:3] == [
        "pack: 400000/1000000 units  there already", "pack: 500000/1000000 units  5 min left",
        "pack: 600000/1000000 units  4 min left"]


def test_the_time_left_is_that_of_steps_and_not_of_what_came_before(log, monkeypatch):
    """On a busy machine workers took three minutes to start, and five steps later the bar said "27.4 h left"."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with training_bar(1000) as on_progress:
        on_progress({"step": 0, "state": "starting"})
        now[0] += 200
        on_progress({"step": 400, "loss": 7.0})  # a resumed run
        now[0] += 60
        on_progress({"step": 460, "loss": 6.0})
    output = log.getvalue().splitlines()
    assert output[1:3] == ["training: 400/1000 steps  loss 7.000", "training: 460/1000 steps  loss 6.000, 9 min left"]
    assert output[-1].endswith(", 260.0 s")  # the whole time


@pytest.mark.parametrize(("seconds", "output"), [(7.4, "7 s"), (99, "99 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations_have_a_fitting_unit(seconds, output):
    assert module.duration(seconds) == output


@pytest.mark.parametrize("terminal", [True, False])
def test_a_title_that_is_wider_than_its_table_stays_in_one_piece(terminal):
    """The path of a checkpoint was once cut in the middle."""
    sink = io.StringIO()
    title = "step 8 of /somewhere/runs/articles/checkpoints/step_00000008"
    print_table([{"set": "validation", "loss": 3.9}], title=title,
                to=Console(file=sink, width=40, force_terminal=terminal, color_system=None))
    assert title in sink.getvalue()


WIDE = {"format": "jsonl", "files": "16", "MB": "3.2", "such as": "corpus/part-00000.jsonl",
        "first record": "words " * 40}


def table(width: int, *, terminal: bool) -> list[str]:
    sink = io.StringIO()
    print_table([WIDE, {**WIDE, "files": "7"}], title="what would be read",
                to=Console(file=sink, width=width, force_terminal=terminal, color_system=None))
    return re.sub(r"\x1b\[[0-9;]*m", "", sink.getvalue()).splitlines()


def test_a_row_is_a_line_outside_a_terminal(monkeypatch):
    lines = table(80, terminal=False)
    assert len(lines) == 4
    assert lines[2].rstrip().endswith("words words")


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_folds_text_and_squashes_nothing(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = table(width, terminal=True)
    text = "\n".join(lines)
    for word in ("format", "files", "jsonl", "16", "3.2", "such as"):
        assert word in text, text
    assert len(lines) > 4
    assert max(map(len, lines)) <= 90


def test_unknown_values_are_dashes():
    sink = io.StringIO()
    print_table([{"set": "validation", "bits per byte": None}], to=Console(file=sink))
    assert "None" not in sink.getvalue()


def test_a_closed_pipe_raises_as_print_does():
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Output(file=Closed()).print("a line that nobody reads")


def test_tables_show_no_control_characters(capsys):
    print_table([{"name": "\x1b[31mred\u202e", "count": 3}])
    assert "\\x1b[31mred\\u202e" in capsys.readouterr().out
