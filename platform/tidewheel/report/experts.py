"""The report's section about a mixture of experts: the load of each expert, and each layer's balance over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel.report.page import Html, table, tag
from tidewheel.report.plots import Scale, Svg, ticks

NOTE = ("Load: the tokens of an expert over the mean of its layer. 1 is balance; no token is dropped unless experts "
        "choose. The selection bias or the auxiliary loss evens loads out during the first hundreds of steps.")
LEFT, RIGHT = 64.0, 1036.0
MAX_COLUMNS = 256
"""Steps or experts drawn side by side; neighbours beyond are merged into their largest load."""
LAST = 0.1
"""Share of the recorded steps, the last ones, whose loads are added up for the picture of single experts."""
LOADS, LARGEST_LOADS = (0.5, 0.7, 1.0, 1.4, 2.0), (1.0, 1.4, 2.0, 2.8, 4.0)
"""Loads in the key of a figure: of single experts, and the largest ones of layers. The last has the full colour."""
MORE, LESS = "var(--bad)", "var(--accent)"
KEY_WIDTH = 60.0
"""Distance of the entries of the key."""
WRITTEN = 40.0
"""Width of a cell from which its load is written in it."""


def section(metrics: Sequence[Mapping[str, Any]]) -> list[Html]:
    """Return the blocks of the section; [] for a model without experts.

    Args:
        metrics: lines of metrics.jsonl.
    """
    lines = {int(line["step"]): line for line in metrics if line.get("expert_load_by_layer")}
    if not lines:
        return []
    steps = sorted(lines)
    last = lines[steps[-1]]
    blocks = [_figures(last)]
    counts = [lines[step]["expert_tokens"] for step in steps if "expert_tokens" in lines[step]]
    if counts:
        recent = counts[-max(1, round(len(counts) * LAST)):]
        loads = {layer: _loads([line[layer] for line in recent]) for layer in counts[-1]}
        blocks += [tag("h3", "Load of each expert, last tenth of the run"), heat_map(
            loads, ("expert", [0.0, float(max(map(len, loads.values())) - 1)]), "load of each expert by layer")]
    over_time = {layer: [float(lines[step]["expert_load_by_layer"].get(layer, 1.0)) for step in steps]
                 for layer in last["expert_load_by_layer"]}
    blocks += [tag("h3", "Largest load of each layer over time"), heat_map(
        over_time, ("step", [float(steps[0]), float(steps[-1])]), "largest load of each layer by step",
        key=LARGEST_LOADS)]
    return blocks


def _figures(line: Mapping[str, Any]) -> Html:
    """Return the table of the last step's figures."""
    rows = [("largest load over the mean, worst layer", f"{line['expert_load_max']:.2f}"),
            ("largest load over the mean, mean of layers", f"{line['expert_load_mean_max']:.2f}"),
            ("entropy of the router, nats", f"{line['router_entropy']:.3f}"),
            ("dropped tokens", f"{100 * line['dropped_share']:.2f} %")]
    return table((f"step {int(line['step']):,}", ""), rows, numeric=(1,))


def _loads(counts: Sequence[Sequence[int]]) -> list[float]:
    """Return the load over the mean of each expert of a layer, over several steps."""
    totals = [sum(step) for step in zip(*counts, strict=True)]
    mean = sum(totals) / len(totals) or 1.0
    return [total / mean for total in totals]


def heat_map(rows: Mapping[str, Sequence[float]], axis: tuple[str, Sequence[float]], label: str, *,
             key: Sequence[float] = LOADS) -> Html:
    """Draw a row of cells for each layer, coloured by load.

    Args:
        rows: loads by layer.
        axis: name of the horizontal axis, and its first and last value.
        label: what the figure shows, for screen readers.
        key: loads whose colours are shown below the figure; the last one has the full colour.
    """
    name, (first, final) = axis
    height = max(6.0, min(22.0, 480.0 / len(rows)))
    top = 8.0
    bottom = top + height * len(rows)
    svg = Svg(bottom + 40, label)
    for number, (layer, values) in enumerate(rows.items()):
        y = top + number * height
        if height > 11 or number % math.ceil(11 / height) == 0:
            svg.text(LEFT - 8, y + height / 2 + 4, layer, "end")
        cells = _merged(values)
        width = (RIGHT - LEFT) / len(cells)
        for at, (begin, end, value) in enumerate(cells):
            place = f"{begin}" if end == begin else f"{begin} to {end}"
            tip = f"layer {layer}, {name} {place}: {value:.2f}" if name == "expert" else f"layer {layer}: {value:.2f}"
            fill, opacity = colour(value, key[-1])
            svg.rect(LEFT + at * width, y, width - (1 if width > 6 else 0), height - 1, fill, tip, opacity=opacity)
            if width >= WRITTEN and height > 15:
                svg.text(LEFT + (at + 0.5) * width, y + height / 2 + 4, f"{value:.2f}", "middle", "var(--ink)")
    centre = (RIGHT - LEFT) / (2 * max(len(_merged(values)) for values in rows.values()))
    x = Scale(first, max(final, first + 1), LEFT + centre, RIGHT - centre)
    for value in ticks(first, final, 8):
        if value == int(value):
            svg.text(x(value), bottom + 16, f"{value:g}", "middle")
    svg.text(LEFT - 8, bottom + 34, "layer", "end", class_="label")
    svg.text(RIGHT, bottom + 34, name, "end", class_="label")
    svg.text(LEFT + KEY_WIDTH - 8, bottom + 34, "load", "end", class_="label")
    for at, load in enumerate(key, start=1):
        left = LEFT + at * KEY_WIDTH
        fill, opacity = colour(load, key[-1])
        svg.rect(left, bottom + 24, 16, 12, fill, opacity=opacity)
        svg.text(left + 22, bottom + 34, f"{load:g}")
    return svg.render()


def _merged(values: Sequence[float]) -> list[tuple[int, int, float]]:
    """Return (first index, last index, largest value) of at most MAX_COLUMNS runs of neighbours."""
    size = -(-len(values) // MAX_COLUMNS)
    starts = range(0, len(values), size)
    return [(start, min(start + size, len(values)) - 1, max(values[start:start + size])) for start in starts]


def colour(load: float, full: float = LOADS[-1]) -> tuple[str, float]:
    """Return the fill and the opacity of a cell: faint at the mean, full at `full` times it or one over that.

    Args:
        load: over the mean.
        full: load with the full colour.
    """
    distance = abs(math.log(max(load, 1e-6))) / math.log(full)
    return (MORE if load > 1 else LESS), round(0.06 + 0.94 * min(1.0, distance), 3)
