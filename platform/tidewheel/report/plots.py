"""Figures as inline SVG. Colours are the page's CSS variables, so figures follow light and dark mode.

They are written directly rather than by a plotting library: no slow import, a tenth of the bytes, text that stays text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidewheel.report.colours import of_reasons
from tidewheel.report.page import Html, count, join, swatch, tag

WIDTH = 1060.0
CHARACTER = 6.5  # width of an average character of the figure's text, in the figure's units
NEAR_BINS = 3  # a histogram extends to a threshold within this many bins


@dataclass(frozen=True)
class Scale:
    """A linear map from values to coordinates in the figure."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value, clipped to the figure."""
        span = (self.high - self.low) or 1.0
        coordinate = self.start + (value - self.low) / span * (self.end - self.start)
        return round(min(max(coordinate, min(self.start, self.end)), max(self.start, self.end)), 2)


@dataclass
class Svg:
    """A figure. Lengths are in units of 1/1060 of its width."""

    height: float
    label: str
    width: float = WIDTH
    parts: list[Html] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = "var(--grid)", width: float = 1,
             dash: str | None = None) -> None:
        """Draw a line.

        Args:
            x1: start.
            y1: start.
            x2: end.
            y2: end.
            stroke: colour.
            width: width of the stroke.
            dash: pattern of dashes, "4 3"; None: solid.
        """
        self.parts.append(tag("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, stroke_width=width,
                              stroke_dasharray=dash))

    def rect(self, x: float, y: float, width: float, height: float, fill: str, title: str = "", radius: float = 0,
             opacity: float | None = None) -> None:
        """Draw a rectangle.

        Args:
            x: left edge.
            y: upper edge.
            width: its width.
            height: its height.
            fill: colour.
            title: text shown on hover.
            radius: radius of the corners.
            opacity: from 0 to 1.
        """
        tip = (tag("title", title),) if title else ()
        self.parts.append(tag("rect", *tip, x=round(x, 2), y=round(y, 2), width=round(max(width, 0.4), 2),
                              height=round(height, 2), fill=fill, rx=radius or None, opacity=opacity))

    def text(self, x: float, y: float, text: str, anchor: str = "start", fill: str | None = None,
             class_: str | None = None) -> None:
        """Write text.

        Args:
            x: anchor of the text.
            y: its base line.
            text: the text.
            anchor: start, middle or end.
            fill: colour.
            class_: CSS class.
        """
        self.parts.append(tag("text", text, x=round(x, 2), y=round(y, 2), class_=class_,
                              text_anchor=anchor if anchor != "start" else None,
                              style=f"fill:{fill}" if fill else None))

    def curve(self, points: Sequence[tuple[float, float]], stroke: str, width: float = 2,
              opacity: float | None = None) -> None:
        """Draw a curve through points, or a dot for a single point.

        Args:
            points: coordinates (x, y).
            stroke: colour.
            width: width of the stroke.
            opacity: from 0 to 1.
        """
        if len(points) > 1:
            self.parts.append(tag("polyline", points=" ".join(f"{x:g},{y:g}" for x, y in points), fill="none",
                                  stroke=stroke, stroke_width=width, stroke_linejoin="round", opacity=opacity))
        elif points:
            self.dot(*points[0], fill=stroke)

    def dot(self, x: float, y: float, fill: str, radius: float = 3.5, title: str = "") -> None:
        """Draw a dot.

        Args:
            x: centre.
            y: centre.
            fill: colour.
            radius: its radius.
            title: text shown on hover.
        """
        tip = (tag("title", title),) if title else ()
        self.parts.append(tag("circle", *tip, cx=round(x, 2), cy=round(y, 2), r=radius, fill=fill,
                              stroke="var(--panel)", stroke_width=1.5))

    def render(self) -> Html:
        """Return the figure's markup."""
        drawing = tag("svg", *self.parts, viewBox=f"0 0 {self.width:g} {self.height:g}", role="img",
                      aria_label=self.label)
        return tag("div", drawing, class_="scroll") if self.width == WIDTH else drawing


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round values between `low` and `high`.

    Args:
        low: lower end.
        high: upper end.
        count: the most values to return, about.
    """
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    step = 10 ** math.floor(math.log10(span / count))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10, 20) if span / (step * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    return [round((first + index) * step, 10) for index in range(int((high / step) - first + 1e-9) + 1)]


def move_apart(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions apart so that neighbours keep a gap, in the same order.

    Args:
        positions: coordinates of labels.
        gap: least distance of neighbours.
        low: lower limit.
        high: upper limit; both hold if the labels fit.
    """
    order = sorted(range(len(positions)), key=lambda at: positions[at])
    moved = list(positions)
    limit = low
    for at in order:
        moved[at] = limit = max(positions[at], limit)
        limit += gap
    limit = high
    for at in reversed(order):
        moved[at] = limit = min(moved[at], limit)
        limit -= gap
    return moved


def lanes(labels: Sequence[tuple[float, str]], right: float) -> list[tuple[float, str, int]]:
    """Assign labels to lanes so that no two texts of a lane overlap.

    Args:
        labels: (x, text), sorted by x.
        right: right edge of the figure.

    Returns:
        (x, anchor, lane) of each label.
    """
    taken: list[list[tuple[float, float]]] = []
    placed = []
    for at, text in labels:
        width = len(text) * CHARACTER + 12
        anchor, begin = ("start", at) if at + width <= right else ("end", at - width)
        lane = next((lane_index for lane_index, intervals in enumerate(taken)
                     if all(begin + width <= a or begin >= b for a, b in intervals)), len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append((begin, begin + width))
        placed.append((at, anchor, lane))
    return placed


def grid(svg: Svg, scale: Scale, left: float, right: float, name: str, count: int = 4, form: str = "{:g}") -> None:
    """Draw horizontal rules with their values, and the panel's name above.

    Args:
        svg: the figure.
        scale: vertical scale.
        left: left edge.
        right: right edge.
        name: name of the panel.
        count: number of rules, about.
        form: format of the values.
    """
    for value in ticks(scale.low, scale.high, count):
        svg.line(left, scale(value), right, scale(value))
        svg.text(left - 8, scale(value) + 4, form.format(value), "end")
    svg.text(left, min(scale.start, scale.end) - 7, name, class_="label")


def legend(items: Sequence[tuple[str, str]]) -> Html:
    """Return a row of (colour, text) below a figure."""
    return tag("div", *(tag("span", swatch(colour), text) for colour, text in items), class_="legend")


def funnel(stages: Sequence[dict]) -> Html:
    """Draw what each stage kept, and why it dropped the rest. A stage is as in summary.json."""
    left, right, row = 150.0, 800.0, 34.0
    svg = Svg(len(stages) * row + 6, "documents kept and dropped by each stage")
    whole = max([stage.get("documents_in", 0) for stage in stages], default=0) or 1
    scale = Scale(0, whole, left, right)
    colours = of_reasons(stages)
    for index, stage in enumerate(stages):
        top = index * row + 4
        num_in, num_out = stage.get("documents_in", 0), stage.get("documents_out", 0)
        svg.text(left - 12, top + 17, stage["name"], "end", class_="strong")
        svg.rect(left, top, right - left, 24, "var(--grid)", radius=4)
        svg.rect(left, top, scale(num_out) - left, 24, "var(--kept)", f"{num_out:,} kept", radius=4, opacity=0.85)
        at = scale(num_out)
        for reason, dropped in sorted(stage.get("dropped", {}).items(), key=lambda item: (-item[1], item[0])):
            if not dropped:
                continue
            width = dropped / whole * (right - left)
            svg.rect(at, top, max(width, 1.2), 24, colours[reason], f"{dropped:,} dropped: {reason}")
            at += width
        lost = num_in - num_out
        svg.text(right + 14, top + 17, f"{count(num_in)} → {count(num_out)}", class_="label")
        if lost > 0:
            svg.text(WIDTH, top + 17, f"−{count(lost)} ({100 * lost / max(num_in, 1):.1f} %)", "end")
    marks = [("var(--kept)", "kept"), *((colour, reason.replace("_", " ")) for reason, colour in colours.items())]
    return join([svg.render(), legend(marks)])


def histogram(name: str, edges: Sequence[float], counts: Sequence[float], threshold: object) -> Html:
    """Draw counts between edges, with the thresholds as dashed lines.

    Args:
        name: name of the statistic.
        edges: edges of the bins.
        counts: a count per bin.
        threshold: a number, several, or None.

    Bins are drawn equally wide whatever their edges, so that edges in powers of ten read as a logarithmic axis.
    """
    svg = Svg(150, f"histogram of {name}", width=330)
    limits = _numbers(threshold)
    first, last = _drawn(edges, counts, limits)
    x, y = Scale(first, last, 10, 320), Scale(0, max([*counts, 1]), 118, 24)
    svg.text(10, 13, name.replace("_", " "), class_="strong")
    for at in range(first, last):
        if counts[at]:
            svg.rect(x(at), y(counts[at]), x(at + 1) - x(at) - 1, 118 - y(counts[at]), "var(--accent)",
                     f"{edges[at]:g} to {edges[at + 1]:g}: {counts[at]:,}", opacity=0.75)
    svg.line(10, 118, 320, 118, "var(--rule)")
    for at in range(first, last + 1, max(1, -(-(last - first) // 6))):
        svg.text(x(at), 133, short(edges[at]), "middle")
    inside = [value for value in limits if edges[first] <= value <= edges[last]]
    for value in inside:
        at = max(index for index in range(first, last + 1) if edges[index] <= value)
        width = edges[at + 1] - edges[at] if at < len(edges) - 1 else 1.0
        threshold_x = x(at + (value - edges[at]) / width)
        svg.line(threshold_x, 22, threshold_x, 122, "var(--bad)", 1.5, "4 3")
    if limits:
        svg.text(320, 148, "threshold " + " and ".join(f"{value:,g}" for value in limits), "end", "var(--bad)")
    return svg.render()


def shorten_middle(text: str, limit: int) -> str:
    """Return at most `limit` characters, with an ellipsis in the middle: the ends of a path say most."""
    half = (limit - 1) // 2
    return text if len(text) <= limit else f"{text[:half]}…{text[-half:]}"


def short(value: float) -> str:
    """Format the edge of a bin: 0.25, 50, 2k, 1M."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"


def _drawn(edges: Sequence[float], counts: Sequence[float], limits: Sequence[float]) -> tuple[int, int]:
    """Return the first and the last edge to draw: all bins with counts, and thresholds near them."""
    full = [at for at, size in enumerate(counts) if size] or [0]
    first, last = full[0], full[-1] + 1
    for value in limits:
        before = max((at for at in range(len(edges)) if edges[at] <= value), default=0)
        after = min((at for at in range(len(edges)) if edges[at] >= value), default=len(edges) - 1)
        first = before if 0 < first - before <= NEAR_BINS else first
        last = after if 0 < after - last <= NEAR_BINS else last
    return first, last


def _numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    given = value if isinstance(value, list | tuple) else [value]
    return [float(v) for v in given if isinstance(v, int | float) and math.isfinite(v)]


def stacked(parts: Sequence[tuple[str, float, str]], form) -> Html:
    """Draw one bar of (name, amount, colour), with the shares written in it where they fit.

    Args:
        parts: name, amount and colour of each part.
        form: formats an amount.
    """
    svg = Svg(40, "shares of " + ", ".join(name for name, _, _ in parts))
    whole = sum(amount for _, amount, _ in parts) or 1.0
    at = 0.0
    for name, amount, colour in parts:
        width = amount / whole * WIDTH
        if amount > 0:
            svg.rect(at, 4, width - 1, 30, colour, f"{name}: {form(amount)}", radius=3)
            words = f"{name} {100 * amount / whole:.0f} %"
            if width > len(words) * CHARACTER + 16:
                svg.text(at + width / 2, 24, words, "middle", "#fff", class_="bold")
        at += width
    return svg.render()
