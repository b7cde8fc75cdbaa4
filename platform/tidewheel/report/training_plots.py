"""Figures of a run: loss by step with the world size below it, and the run by the clock, worker by worker."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tidewheel.report.page import Html, join, seconds
from tidewheel.report.plots import CHARACTER, Scale, Svg, grid, lanes, legend, move_apart, stacked, ticks

CATEGORIES = ("productive", "communication", "redone", "data_wait", "save_stall", "detection", "restart", "idle")
COUNTED = ("productive", "communication")
"""Categories of the time in steps that count, as in `train.time_ledger`."""
COLOURS = {name: f"var(--{name})" for name in CATEGORIES}
TONES = {"node_lost": "var(--bad)", "failure": "var(--bad)", "rollback": "var(--bad)", "hang": "var(--bad)",
         "corruption": "var(--bad)",
         "checkpoint_refused": "var(--bad)", "worker_left_out": "var(--bad)", "worker_readmitted": "var(--good)",
         "node_joined": "var(--good)", "finish": "var(--soft)", "start": "var(--soft)"}
LEFT, RIGHT = 52.0, 880.0
LANE = 17.0
MAX_WORKERS_DRAWN = 16
MAX_LANES = 6  # of labels above a figure; further events are lines without a label
NOT_TRAINING = frozenset({"restart", "detection", "idle"})


@dataclass(frozen=True)
class Mark:
    """An event, as figures show it."""

    time: float
    step: int
    kind: str
    label: str


def loss_figure(metrics: Sequence[dict], marks: Sequence[Mark], references: dict[str, float],
                bad_steps: Sequence[Mark] = ()) -> Html:
    """Draw training and validation loss by step, reference entropies, tokens/s, world size and events.

    Args:
        metrics: lines of metrics.jsonl.
        marks: events.
        references: entropies by name.
        bad_steps: steps that a guard noticed, drawn as dots.

    A step done again after a failure counts as it was done last; the clock figure shows both.
    """
    steps = {int(line["step"]): line for line in metrics if _finite(line.get("loss"))}
    valid = {int(line["step"]): float(line["validation_loss"]) for line in metrics
             if _finite(line.get("validation_loss"))}
    if not steps:
        return Html("")
    order = sorted(steps)
    losses = [float(steps[step]["loss"]) for step in order]
    x = Scale(min(order[0], 1), max(order[-1], 2), LEFT, RIGHT)
    labels = [(x(mark.step), mark.label) for mark in marks]
    label_places = lanes(labels, RIGHT + 150)
    top = 26 + LANE * (1 + _last_lane(label_places))
    loss_end, speed_start = top + 250, top + 290
    speed_end, size_start = speed_start + 64, speed_start + 98
    bottom = size_start + 40
    svg = Svg(bottom + 34, "loss by step, with tokens per second, world size and events")
    values = [*losses, *valid.values(), *references.values()]
    y = Scale(min(values) - 0.04 * (max(values) - min(values)), max(values), loss_end, top)
    _marks(svg, marks, labels, label_places, bottom)
    grid(svg, y, LEFT, RIGHT, "loss, nats per token", 6)
    _references(svg, y, references, losses, valid, (top, loss_end))
    smooth = _smooth(losses)
    svg.curve([(x(step), y(loss)) for step, loss in zip(order, losses)], "var(--accent)", 1, 0.35)
    svg.curve([(x(step), y(loss)) for step, loss in zip(order, smooth)], "var(--accent)", 2.2)
    svg.curve([(x(step), y(valid[step])) for step in sorted(valid)], "var(--second)", 1.6)
    for step in sorted(valid):
        svg.dot(x(step), y(valid[step]), "var(--second)", title=f"validation loss {valid[step]:.3f} at step {step}")
    for mark in bad_steps:  # a loss that is no number is drawn at the top
        loss = steps.get(mark.step, {}).get("loss", y.high)
        svg.dot(x(min(max(mark.step, x.low), x.high)), y(loss), "var(--bad)", title=mark.label)
    _speed(svg, [(x(step), steps[step].get("tokens_per_second")) for step in order], speed_start, speed_end)
    _sizes(svg, [(step, int(steps[step].get("world_size", 1))) for step in order], x, size_start, bottom)
    for value in ticks(x.low, x.high, 8):
        svg.text(x(value), bottom + 18, f"{value:g}", "middle")
    svg.text(RIGHT + 22, bottom + 18, "step", class_="label")
    return svg.render()


def clock_figure(metrics: Sequence[dict], marks: Sequence[Mark], saves: Sequence[float],
                 ledger: Sequence[dict]) -> Html:
    """Draw steps, checkpoints and what every worker did, by seconds since the run started.

    Args:
        metrics: lines of metrics.jsonl.
        marks: events.
        saves: times of checkpoints, Unix seconds.
        ledger: records of the time ledger.
    """
    times = [*(float(line["time"]) for line in metrics if "time" in line), *(mark.time for mark in marks),
             *(float(part[edge]) for part in ledger for edge in ("start", "end"))]
    if len(times) < 2:
        return Html("")
    begin = min(times)
    x = Scale(0, max(times) - begin, LEFT, RIGHT)
    labels = [(x(mark.time - begin), mark.label) for mark in marks]
    label_places = lanes(labels, RIGHT + 150)
    top = 26 + LANE * (1 + _last_lane(label_places))
    rows = _workers(ledger)
    step_end, size_end = top + 110, top + 182
    save_at = size_end + 22
    rows_start = save_at + 26
    bottom = rows_start + 22 * len(rows)
    svg = Svg(bottom + 34, "steps, checkpoints and workers by the clock")
    _marks(svg, marks, labels, label_places, bottom)
    done = [(float(line["time"]) - begin, int(line["step"])) for line in metrics if "loss" in line and "time" in line]
    if done:
        y = Scale(0, max(step for _, step in done), step_end, top)
        grid(svg, y, LEFT, RIGHT, "step reached", 3)
        for run in _runs(done):
            svg.curve([(x(at), y(step)) for at, step in run], "var(--accent)", 2)
    _sizes_by_clock(svg, ledger, x, begin, size_end - 36, size_end)
    svg.text(RIGHT + 14, save_at + 4, f"{len(saves)} checkpoints", class_="label")
    svg.line(LEFT, save_at, RIGHT, save_at)
    for at in saves:
        svg.dot(x(at - begin), save_at, "var(--save_stall)", 4, f"checkpoint at {seconds(at - begin)}")
    for index, (name, parts) in enumerate(rows):
        row_y = rows_start + 22 * index
        svg.text(RIGHT + 14, row_y + 13, name, class_="label")
        for category, start, end in _merged(parts, x, begin):
            svg.rect(start, row_y, end - start, 16, COLOURS.get(category, "var(--idle)"), f"{name}: {category}")
    for value in ticks(0, x.high, 8):
        svg.text(x(value), bottom + 18, f"{value:g}", "middle")
    svg.text(RIGHT + 22, bottom + 18, "seconds", class_="label")
    seen = [name for name in CATEGORIES if any(part.get("category") == name for part in ledger)]
    return join([svg.render(), legend([(COLOURS[name], name.replace("_", " ")) for name in seen])])


def _sizes_by_clock(svg: Svg, ledger: Sequence[dict], x: Scale, begin: float, top: float, bottom: float) -> None:
    """Draw the number of training workers, a band per generation."""
    spans: dict[int, tuple[float, float, int]] = {}
    for part in ledger:
        if part["category"] not in NOT_TRAINING:
            start, end, size = spans.get(part["generation"], (math.inf, -math.inf, 0))
            spans[part["generation"]] = (min(start, part["start"]), max(end, part["end"]), max(size, part["rank"] + 1))
    if not spans:
        return
    svg.text(LEFT, top - 7, "workers that train", class_="label")
    high = max(size for _, _, size in spans.values())
    for start, end, size in spans.values():
        left, right = x(start - begin), x(end - begin)
        height = (bottom - top) * size / high
        svg.rect(left, bottom - height, right - left, height, "var(--band)", f"{size} workers")
        svg.line(left, bottom - height, right, bottom - height, "var(--accent)", 1.5)
        if right - left > 2 * CHARACTER:
            svg.text((left + right) / 2, bottom - height / 2 + 4, str(size), "middle", class_="strong")
    svg.line(LEFT, bottom, RIGHT, bottom, "var(--rule)")


def time_bar(parts: dict[str, float]) -> Html:
    """Draw where the worker time went, as one bar."""
    known = [(name.replace("_", " "), parts.get(name, 0.0), COLOURS[name]) for name in CATEGORIES]
    return join([stacked(known, seconds), legend([(colour, f"{name} {seconds(amount)}")
                                                  for name, amount, colour in known if amount > 0])])


def worker_names(ledger: Sequence[dict]) -> dict[str, str]:
    """Return short names of nodes, "node 1", "node 2", in order of appearance: their ids are long and random."""
    nodes = dict.fromkeys(str(part.get("node", "")) for part in sorted(ledger, key=lambda part: part.get("start", 0)))
    nodes.pop("", None)
    return {**{node: f"node {number}" for number, node in enumerate(nodes, 1)}, "": "not placed"}


def _last_lane(label_places: Sequence[tuple[float, str, int]]) -> int:
    return min(MAX_LANES - 1, max((lane for _, _, lane in label_places), default=-1))


def _marks(svg: Svg, marks: Sequence[Mark], labels: Sequence[tuple[float, str]],
           label_places: Sequence[tuple[float, str, int]], bottom: float) -> None:
    for mark, (at, _), (_, _, lane) in zip(marks, labels, label_places):
        svg.line(at, 4 + min(lane, MAX_LANES) * LANE, at, bottom, TONES.get(mark.kind, "var(--warm)"), 1.2, "2 3")
    for mark, (at, text), (_, anchor, lane) in zip(marks, labels, label_places):  # after all lines: none crosses it
        if lane >= MAX_LANES:
            continue
        colour = TONES.get(mark.kind, "var(--warm)")
        label_y = 12 + lane * LANE
        svg.text(at + (5 if anchor == "start" else -5), label_y, text, anchor, colour, "label")


def _references(svg: Svg, y: Scale, references: dict[str, float], losses: Sequence[float], valid: dict[int, float],
                panel: tuple[float, float]) -> None:
    """Draw dashed lines of the entropies, and the names of all lines at the right, moved apart."""
    names = [(y(value), f"{name} {value:.2f}", "var(--soft)") for name, value in references.items()]
    for value in references.values():
        svg.line(LEFT, y(value), RIGHT, y(value), "var(--faint)", 1.2, "6 4")
    names.append((y(_smooth(losses)[-1]), f"training {_smooth(losses)[-1]:.2f}", "var(--accent)"))
    if valid:
        last = valid[max(valid)]
        names.append((y(last), f"validation {last:.2f}", "var(--second)"))
    for label_y, (_, text, colour) in zip(move_apart([at for at, _, _ in names], 16, *panel), names):
        svg.text(RIGHT + 14, label_y + 4, text, "start", colour, "label")


def _speed(svg: Svg, points: Sequence[tuple[float, float | None]], top: float, bottom: float) -> None:
    known = [(at, float(value)) for at, value in points if value is not None and _finite(value)]
    if known:
        high = sorted(value for _, value in known)[int(0.98 * (len(known) - 1))] * 1.1
        y = Scale(0, high or 1.0, bottom, top)
        grid(svg, y, LEFT, RIGHT, "tokens per second", 2, "{:,.0f}")
        svg.curve([(at, y(value)) for at, value in known], "var(--good)", 1.3)


def _sizes(svg: Svg, points: Sequence[tuple[int, int]], x: Scale, top: float, bottom: float) -> None:
    """Draw the world size as a filled step band, with its value in each stretch that is wide enough."""
    svg.text(LEFT, top - 7, "workers", class_="label")
    high = max(size for _, size in points)
    begin, current = points[0]
    for step, size in [*points[1:], (points[-1][0] + 1, -1)]:
        if size == current:
            continue
        height = (bottom - top) * current / high
        svg.rect(x(begin), bottom - height, x(step) - x(begin), height, "var(--band)",
                 f"{current} workers, steps {begin} to {step - 1}")
        svg.line(x(begin), bottom - height, x(step), bottom - height, "var(--accent)", 1.5)
        if x(step) - x(begin) > 2 * CHARACTER:
            svg.text((x(begin) + x(step)) / 2, bottom - height / 2 + 4, str(current), "middle", class_="strong")
        begin, current = step, size
    svg.line(LEFT, bottom, RIGHT, bottom, "var(--rule)")


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the mean over a centred window of about 3 % of the steps, which does not lag like a running average."""
    reach = max(1, len(values) // 60)
    sums = list(itertools.accumulate(values, initial=0.0))
    spans = [min(reach, at, len(values) - 1 - at) for at in range(len(values))]
    return [(sums[at + span + 1] - sums[at - span]) / (2 * span + 1) for at, span in enumerate(spans)]


def _runs(done: Sequence[tuple[float, int]]) -> list[list[tuple[float, int]]]:
    """Cut the steps where they go back: each piece is one generation."""
    runs: list[list[tuple[float, int]]] = [[]]
    for at, step in sorted(done):
        if runs[-1] and step <= runs[-1][-1][1]:
            runs.append([])
        runs[-1].append((at, step))
    return runs


def _workers(ledger: Sequence[dict]) -> list[tuple[str, list[dict]]]:
    """Return a row per node, or per worker of a node with several workers."""
    names = worker_names(ledger)
    ranks: dict[tuple[str, int], set[int]] = {}
    for part in ledger:
        life = str(part.get("node", "")), int(part.get("generation", 0))
        ranks.setdefault(life, set()).add(int(part.get("rank", 0)))
    shared = {node for (node, _), members in ranks.items() if len(members) > 1}
    rows: dict[str, list[dict]] = {}
    for part in sorted(ledger, key=lambda part: part.get("start", 0)):
        node = str(part.get("node", ""))
        name = f"{names[node]}, rank {part.get('rank', 0)}" if node in shared else names[node]
        rows.setdefault(name, []).append(part)
    return sorted(rows.items(), key=lambda row: (len(row[0].split(",")[0]), row[0]))[:MAX_WORKERS_DRAWN]


def _merged(parts: Sequence[dict], x: Scale, begin: float) -> list[tuple[str, float, float]]:
    """Return rectangles of the main category in each unit of the figure's width, with equal neighbours merged."""
    columns: dict[int, dict[str, float]] = {}
    for part in parts:
        start, end = x(float(part["start"]) - begin), x(float(part["end"]) - begin)
        for column in range(math.floor(start), math.ceil(end)):
            inside, category = min(end, column + 1) - max(start, column), str(part["category"])
            spent = columns.setdefault(column, {})
            spent[category] = spent.get(category, 0.0) + inside
    merged: list[tuple[str, float, float]] = []
    for column in sorted(columns):
        category = max(columns[column], key=columns[column].__getitem__)
        if merged and merged[-1][0] == category and merged[-1][2] == column:
            merged[-1] = (category, merged[-1][1], column + 1)
        else:
            merged.append((category, column, column + 1))
    return merged


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
