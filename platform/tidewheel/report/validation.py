"""Validation of a run by domain: loss and bits per byte by step, the last figures, and text samples over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tidewheel.printable import printable
from tidewheel.report.colours import PALETTE
from tidewheel.report.page import Html, shorten, table, tag
from tidewheel.report.plots import Scale, Svg, grid, move_apart, ticks

NOTE = ("Bits per byte: the bits that the predicted tokens cost, over the bytes of text they stand for. It can be "
        "compared between tokenizers; the loss per token cannot.")
LEFT, RIGHT, PANEL = 52.0, 880.0, 170.0
PANELS = {"loss": "loss, nats per token", "bits_per_byte": "bits per byte"}
MAX_SAMPLES = 12


def section(metrics: Sequence[dict[str, Any]]) -> list[Html]:
    """Return the section's blocks; [] if nothing was evaluated."""
    curves = _curves(metrics)
    if not curves:
        return []
    last = {domain: points[max(points)] for domain, points in curves.items()}
    rows = [(domain or "validation", *(_figure(scores.get(name)) for name in ("loss", "perplexity", "bits_per_byte")),
             f"{scores.get('tokens', 0):,}") for domain, scores in last.items()]
    blocks = [table(("domain", "loss", "perplexity", "bits per byte", "tokens"), rows, numeric=range(1, 5))]
    if any(len(points) > 1 for points in curves.values()):
        blocks.insert(0, figure(curves))
    return blocks


def samples(metrics: Sequence[dict[str, Any]]) -> list[Html]:
    """Return the text samples of a run, the oldest first; [] if there are fewer than two."""
    found = [(f"{int(line['step']):,}", tag("code", shorten(printable(str(line["sample"])), 300)))
             for line in metrics if line.get("sample")]
    if len(found) < 2:
        return []
    every = max(1, math.ceil(len(found) / MAX_SAMPLES))
    return [table(("step", "text"), [*found[:-1:every], found[-1]], numeric=(0,))]


def figure(curves: dict[str, dict[int, dict[str, Any]]]) -> Html:
    """Draw a panel for the loss and one for bits per byte, with a curve per domain."""
    shown = [name for name in PANELS if any(_known(scores.get(name)) for points in curves.values()
                                            for scores in points.values())]
    steps = [step for points in curves.values() for step in points]
    x = Scale(min(steps), max(max(steps), min(steps) + 1), LEFT, RIGHT)
    svg = Svg(len(shown) * (PANEL + 50) + 34, "validation loss and bits per byte by step and domain")
    for number, name in enumerate(shown):
        top = 26 + number * (PANEL + 50)
        _panel(svg, x, name, curves, top, top + PANEL)
    bottom = svg.height - 34
    for value in ticks(x.low, x.high, 8):
        svg.text(x(value), bottom + 8, f"{value:g}", "middle")
    svg.text(RIGHT + 22, bottom + 8, "step", class_="label")
    return svg.render()


def _panel(svg: Svg, x: Scale, name: str, curves: dict[str, dict[int, dict[str, Any]]], top: float,
           bottom: float) -> None:
    points = {domain: [(step, float(scores[name])) for step, scores in sorted(found.items())
                       if _known(scores.get(name))] for domain, found in curves.items()}
    values = [value for found in points.values() for _, value in found]
    margin = 0.05 * (max(values) - min(values)) or 0.05
    y = Scale(min(values) - margin, max(values) + margin, bottom, top)
    grid(svg, y, LEFT, RIGHT, PANELS[name], 4)
    ends = []
    for number, (domain, found) in enumerate(points.items()):
        if not found:
            continue
        colour = PALETTE[number % len(PALETTE)]
        svg.curve([(x(step), y(value)) for step, value in found], colour, 1.8)
        for step, value in found:
            svg.dot(x(step), y(value), colour, 2.5, f"{domain or 'validation'} {value:.3f} at step {step}")
        ends.append((y(found[-1][1]), f"{domain or 'validation'} {found[-1][1]:.3f}", colour))
    for place, (_, text, colour) in zip(move_apart([at for at, _, _ in ends], 16, top, bottom), ends):
        svg.text(RIGHT + 14, place + 4, text, "start", colour, "label")


def _curves(metrics: Sequence[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return {domain: {step: scores}}, with the last result of a repeated evaluation."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for line in metrics:
        for domain, scores in (line.get("validation") or {}).items():
            found.setdefault(domain, {})[int(line["step"])] = scores
    return found


def _figure(value: Any) -> str:
    return f"{value:.4g}" if _known(value) else "–"


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
