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
    of_pairs = any(_of_pairs(scores) for scores in last.values())
    names = ["loss", "perplexity", "bits_per_byte"]
    if of_pairs:
        names = ["loss", *sorted({name for scores in last.values() for name in scores} - {*names, "tokens"})]
    rows = [(domain or "validation", *(_figure(scores.get(name)) for name in names), f"{scores.get('tokens', 0):,}")
            for domain, scores in last.items()]
    head = ("domain", *(name.replace("_", " ") for name in names), "pairs" if of_pairs else "tokens")
    blocks = [table(head, rows, numeric=range(1, len(head)))]
    if any(len(points) > 1 for points in curves.values()):
        blocks.insert(0, figure(curves))
    return blocks


def samples(metrics: Sequence[dict[str, Any]]) -> list[Html]:
    """Return the text samples of a run, the oldest first; [] if there are fewer than two."""
    rows = [(f"{int(line['step']):,}", tag("code", shorten(printable(str(line["sample"])), 300)))
            for line in metrics if line.get("sample")]
    if len(rows) < 2:
        return []
    every = max(1, math.ceil(len(rows) / MAX_SAMPLES))
    return [table(("step", "text"), [*rows[:-1:every], rows[-1]], numeric=(0,))]


def figure(curves: dict[str, dict[int, dict[str, Any]]]) -> Html:
    """Draw a panel for the loss and one for bits per byte, with a curve per domain."""
    shown = [name for name in PANELS if any(_known(scores.get(name)) for points in curves.values()
                                            for scores in points.values())]
    steps = [step for points in curves.values() for step in points]
    x = Scale(min(steps), max(max(steps), min(steps) + 1), LEFT, RIGHT)
    svg = Svg(len(shown) * (PANEL + 50) + 34, "validation loss and bits per byte by step and domain")
    for index, name in enumerate(shown):
        top = 26 + index * (PANEL + 50)
        title = PANELS[name]
        if name == "loss" and any(_of_pairs(scores) for points in curves.values() for scores in points.values()):
            title = "loss per pair"
        _panel(svg, x, name, title, curves, top, top + PANEL)
    bottom = svg.height - 34
    for value in ticks(x.low, x.high, 8):
        svg.text(x(value), bottom + 8, f"{value:g}", "middle")
    svg.text(RIGHT + 22, bottom + 8, "step", class_="label")
    return svg.render()


def _of_pairs(scores: dict[str, Any]) -> bool:
    """Return whether these are scores of preference pairs, which have no perplexity."""
    return "perplexity" in scores and scores["perplexity"] is None


def _panel(svg: Svg, x: Scale, name: str, title: str, curves: dict[str, dict[int, dict[str, Any]]], top: float,
           bottom: float) -> None:
    points = {domain: [(step, float(scores[name])) for step, scores in sorted(curve.items())
                       if _known(scores.get(name))] for domain, curve in curves.items()}
    values = [value for curve in points.values() for _, value in curve]
    margin = 0.05 * (max(values) - min(values)) or 0.05
    y = Scale(min(values) - margin, max(values) + margin, bottom, top)
    grid(svg, y, LEFT, RIGHT, title, 4)
    ends = []
    for index, (domain, curve) in enumerate(points.items()):
        if not curve:
            continue
        colour = PALETTE[index % len(PALETTE)]
        svg.curve([(x(step), y(value)) for step, value in curve], colour, 1.8)
        for step, value in curve:
            svg.dot(x(step), y(value), colour, 2.5, f"{domain or 'validation'} {value:.3f} at step {step}")
        ends.append((y(curve[-1][1]), f"{domain or 'validation'} {curve[-1][1]:.3f}", colour))
    for label_y, (_, text, colour) in zip(move_apart([at for at, _, _ in ends], 16, top, bottom), ends):
        svg.text(RIGHT + 14, label_y + 4, text, "start", colour, "label")


def _curves(metrics: Sequence[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return {domain: {step: scores}}, with the last result of a repeated evaluation."""
    curves: dict[str, dict[int, dict[str, Any]]] = {}
    for line in metrics:
        for domain, scores in (line.get("validation") or {}).items():
            curves.setdefault(domain, {})[int(line["step"])] = scores
    return curves


def _figure(value: Any) -> str:
    return f"{value:.4g}" if _known(value) else "–"


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
