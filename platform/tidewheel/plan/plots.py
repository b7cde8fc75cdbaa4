"""Plot of the time lost to failures over the interval between checkpoints, with a panel per size of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tidewheel.plan.recovery import Goodput
from tidewheel.report.plots import Scale, Svg

COLOURS = ("#17936a", "#0f6fc5", "#c2410c", "#8b5cf6", "#64748b")
PANELS = 3
TOP, BOTTOM, LEFT, RIGHT, GAP = 58.0, 300.0, 46.0, 16.0, 56.0
MARKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def lost_figure(rows: Sequence[Goodput]) -> str:
    """Return an SVG file on white. Of many sizes, the smallest, the middle and the largest are drawn."""
    sizes = sorted({row.gpus for row in rows})
    sizes = [sizes[round(at * (len(sizes) - 1) / (PANELS - 1))] for at in range(PANELS)] if len(
        sizes) > PANELS else sizes
    tiers = list(dict.fromkeys(row.tier for row in rows))
    svg = Svg(BOTTOM + 50, "share of the time lost to failures, against the interval between checkpoints")
    lost = [max(1e-4, 1 - row.goodput) for row in rows]
    y = Scale(math.log(min(lost) * 0.8), math.log(max(lost) * 1.1), BOTTOM, TOP)
    width = (svg.width - LEFT - RIGHT - GAP * (len(sizes) - 1)) / len(sizes)
    minutes = [row.interval_seconds / 60 for row in rows]
    for panel, gpus in enumerate(sizes):
        left = LEFT + panel * (width + GAP)
        x = Scale(math.log(min(minutes)), math.log(max(minutes)), left, left + width)
        for percent in MARKS:
            if y.low <= math.log(percent / 100) <= y.high:
                svg.line(left, y(math.log(percent / 100)), left + width, y(math.log(percent / 100)), "#e3e7ec")
                svg.text(left - 7, y(math.log(percent / 100)) + 4, f"{percent:g}", "end")
        svg.text(left, TOP - 12, f"{gpus:,} GPUs, a failure every {_hours(rows, gpus):.1f} h: % lost", fill="#16202c")
        for minute in sorted({round(value, 3) for value in minutes}):
            svg.text(x(math.log(minute)), BOTTOM + 18, f"{minute:g}", "middle")
        svg.text(left + width / 2, BOTTOM + 38, "minutes between checkpoints", "middle")
        for index, tier in enumerate(tiers):
            line = sorted((row.interval_seconds / 60, max(1e-4, 1 - row.goodput)) for row in rows
                          if (row.gpus, row.tier) == (gpus, tier))
            colour = COLOURS[index % len(COLOURS)]
            svg.curve([(x(math.log(at)), y(math.log(value))) for at, value in line], colour)
            at, value = min(line, key=lambda point: point[1])
            svg.dot(x(math.log(at)), y(math.log(value)), colour,
                    title=f"{tier}: least {100 * value:.2f} % at {at:g} min")
    at_x = LEFT
    for index, tier in enumerate(tiers):
        svg.rect(at_x, 8, 12, 12, COLOURS[index % len(COLOURS)])
        svg.text(at_x + 18, 18, tier)
        at_x += 40 + 7 * len(tier)
    svg.text(at_x, 18, "dots: the best interval")
    body = "".join(map(str, svg.parts)).replace("var(--panel)", "#fff")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {svg.width:g} {svg.height:g}" '
            f'font-family="sans-serif" font-size="12" fill="#5b6876"><rect width="{svg.width:g}" '
            f'height="{svg.height:g}" fill="white"/>{body}</svg>\n')


def _hours(rows: Sequence[Goodput], gpus: int) -> float:
    return next(row.mtbf_seconds for row in rows if row.gpus == gpus) / 3600
