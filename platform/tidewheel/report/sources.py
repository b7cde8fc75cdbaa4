"""The training loss of each domain of a mixture, by step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from tidewheel.report.colours import PALETTE
from tidewheel.report.page import Html, table
from tidewheel.report.plots import Scale, Svg, grid, move_apart, ticks

NOTE = ("Training loss of each domain of the mixture, smoothed. Each point covers the steps since the last line of "
        "metrics.")
LEFT, RIGHT, TOP, BOTTOM = 52.0, 880.0, 26.0, 256.0
Curve = list[tuple[int, float]]


def section(metrics: Sequence[dict[str, Any]]) -> list[Html]:
    """Return the section's blocks; [] if no losses were reported by source."""
    curves, tokens = _curves(metrics)
    if not curves:
        return []
    rows = [(name, f"{curve[0][1]:.3f}", f"{_smooth(curve)[-1][1]:.3f}", f"{tokens[name]:,}")
            for name, curve in curves.items()]
    blocks = [table(("domain", "first loss", "last loss", "tokens"), rows, numeric=(1, 2, 3))]
    if any(len(curve) > 1 for curve in curves.values()):
        blocks.insert(0, _figure({name: _smooth(curve) for name, curve in curves.items()}))
    return blocks


def _curves(metrics: Sequence[dict[str, Any]]) -> tuple[dict[str, Curve], dict[str, int]]:
    """Return {domain: (step, loss)} and {domain: predicted tokens}, with the last line of a repeated step."""
    lines = {int(line["step"]): line["sources"] for line in metrics if line.get("sources")}
    names = sorted({name for sources in lines.values() for name in sources})
    curves: dict[str, Curve] = {}
    tokens: dict[str, int] = {}
    for name in names:
        known = [(step, lines[step][name]) for step in sorted(lines) if name in lines[step]]
        curve = [(step, float(figures["loss"])) for step, figures in known if figures["loss"] is not None]
        if curve:
            curves[name] = curve
            tokens[name] = sum(figures["tokens"] for _, figures in known)
    return curves, tokens


def _smooth(curve: Curve) -> Curve:
    """Return the mean over a centred window of about 3 % of the points."""
    reach = max(1, len(curve) // 60)
    sums = list(itertools.accumulate((loss for _, loss in curve), initial=0.0))
    smoothed = []
    for index, (step, _) in enumerate(curve):
        span = min(reach, index, len(curve) - 1 - index)
        smoothed.append((step, (sums[index + span + 1] - sums[index - span]) / (2 * span + 1)))
    return smoothed


def _figure(curves: dict[str, Curve]) -> Html:
    steps = [step for curve in curves.values() for step, _ in curve]
    losses = [loss for curve in curves.values() for _, loss in curve if math.isfinite(loss)]
    x = Scale(min(steps), max(max(steps), min(steps) + 1), LEFT, RIGHT)
    margin = 0.05 * (max(losses) - min(losses)) or 0.05
    y = Scale(min(losses) - margin, max(losses) + margin, BOTTOM, TOP)
    svg = Svg(BOTTOM + 34, "training loss by step and domain")
    grid(svg, y, LEFT, RIGHT, "loss, nats per token", 4)
    ends = []
    for index, (name, curve) in enumerate(curves.items()):
        colour = PALETTE[index % len(PALETTE)]
        svg.curve([(x(step), y(loss)) for step, loss in curve], colour, 1.8)
        ends.append((y(curve[-1][1]), f"{name} {curve[-1][1]:.3f}", colour))
    for label_y, (_, text, colour) in zip(move_apart([at for at, _, _ in ends], 16, TOP, BOTTOM), ends):
        svg.text(RIGHT + 14, label_y + 4, text, "start", colour, "label")
    for value in ticks(x.low, x.high, 8):
        svg.text(x(value), BOTTOM + 18, f"{value:g}", "middle")
    svg.text(RIGHT + 22, BOTTOM + 18, "step", class_="label")
    return svg.render()
