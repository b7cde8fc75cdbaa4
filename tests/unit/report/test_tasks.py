"""Tests of the report's section on evaluation tasks."""

from __future__ import annotations

from tidewheel.report.tasks import section

LINES = [{"step": step, "tasks": {"<b>quiz": {"acc": step / 10, "acc_stderr": 0.1, "perplexity": 40.0 - step}}}
         for step in (2, 4)]


def test_the_section_has_a_curve_and_the_last_figures():
    figure, table = section([*LINES, {"step": 5, "loss": 1.0}, {**LINES[1], "tasks": {"<b>quiz": {
        "acc": 0.5, "acc_stderr": None, "perplexity": 30.0}}}])
    assert "metrics of evaluation tasks by step" in figure
    assert "perplexity" not in figure, "it would flatten the curve"
    assert "&lt;b&gt;quiz acc" in table
    assert "0.2 ± 0.1" in table
    assert ">0.5<" in table, "the last result of a repeated evaluation"
    assert "<b>quiz" not in figure + table


def test_a_run_without_tasks_has_no_section():
    assert section([{"step": 1, "loss": 2.0}]) == []
    assert len(section(LINES[:1])) == 1, "one evaluation has a table and no curve"
