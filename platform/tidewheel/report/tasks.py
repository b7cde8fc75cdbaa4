"""Evaluation tasks of a run: each metric by step, and the last figures with their standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tidewheel.printable import printable
from tidewheel.report.colours import PALETTE
from tidewheel.report.page import Html, table
from tidewheel.report.plots import Scale, Svg, grid, move_apart, ticks

NOTE = ("Answers to evaluation tasks by the model in training. ± is one standard error; a bar in the figure spans one "
        "on each side.")
LEFT, RIGHT, TOP, PANEL = 52.0, 880.0, 26.0, 240.0
ERROR = "_stderr"
ONE = 1.0
"""Metrics whose values are all in 0 to 1 are drawn; a perplexity would flatten the others."""
Curves = dict[str, dict[int, tuple[float, float | None]]]
"""{"task metric": {step: (value, standard error)}}."""


def section(metrics: Sequence[dict[str, Any]]) -> list[Html]:
    """Return the section's blocks; [] if no task was evaluated."""
    curves = _curves(metrics)
    if not curves:
        return []
    rows = []
    for name, points in curves.items():
        first, last = min(points), max(points)
        rows.append((name, _figure(*points[first]), _figure(*points[last]), f"{last:,}"))
    blocks = [table(("task and metric", "first", "last", "step"), rows, numeric=(1, 2, 3))]
    drawn = {name: points for name, points in curves.items()
             if len(points) > 1 and all(0 <= value <= ONE for value, _ in points.values())}
    return [figure(drawn), *blocks] if drawn else blocks


def figure(curves: Curves) -> Html:
    """Draw a curve for each metric of each task."""
    steps = [step for points in curves.values() for step in points]
    x = Scale(min(steps), max(max(steps), min(steps) + 1), LEFT, RIGHT)
    y = Scale(0.0, ONE, TOP + PANEL, TOP)
    svg = Svg(TOP + PANEL + 84, "metrics of evaluation tasks by step")
    grid(svg, y, LEFT, RIGHT, "metric", 4)
    ends = []
    for index, (name, points) in enumerate(curves.items()):
        colour = PALETTE[index % len(PALETTE)]
        svg.curve([(x(step), y(value)) for step, (value, _) in sorted(points.items())], colour, 1.8)
        for step, (value, error) in points.items():
            if error:
                svg.curve([(x(step), y(max(0.0, value - error))), (x(step), y(min(ONE, value + error)))], colour, 1.0)
            svg.dot(x(step), y(value), colour, 2.5, f"{name} {_figure(value, error)} at step {step}")
        ends.append((y(points[max(points)][0]), f"{name} {points[max(points)][0]:.3f}", colour))
    for label_y, (_, text, colour) in zip(move_apart([at for at, _, _ in ends], 16, TOP, TOP + PANEL), ends):
        svg.text(RIGHT + 14, label_y + 4, text, "start", colour, "label")
    for value in ticks(x.low, x.high, 8):
        svg.text(x(value), TOP + PANEL + 24, f"{value:g}", "middle")
    svg.text(RIGHT + 22, TOP + PANEL + 24, "step", class_="label")
    return svg.render()


def _curves(metrics: Sequence[dict[str, Any]]) -> Curves:
    """Return the figures by step, with the last result of a repeated evaluation."""
    curves: Curves = {}
    for line in metrics:
        for task, figures in (line.get("tasks") or {}).items():
            for name, value in figures.items():
                if not name.endswith(ERROR) and isinstance(value, int | float) and math.isfinite(value):
                    points = curves.setdefault(printable(f"{task} {name}"), {})
                    points[int(line["step"])] = (float(value), figures.get(f"{name}{ERROR}"))
    return curves


def _figure(value: float, error: float | None) -> str:
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"
