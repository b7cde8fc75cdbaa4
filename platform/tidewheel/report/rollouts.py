"""The report's section about reinforcement learning: rewards and answers over time, and the newest rollouts to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tidewheel.post.reading import Sampled, SampledGroup
from tidewheel.printable import printable, printable_lines
from tidewheel.report.page import Html, details, join, note, percent, table, tag
from tidewheel.report.plots import WIDTH, Scale, Svg, grid, ticks

NOTE = ("A step's rollouts: mean reward, tokens of an answer, entropy of the policy, and the gap, "
        "|log p(training) - log p(sampling)| of the sampled tokens: 0 when the sampling policy was the "
        "present one and computed the same.")
LEFT, RIGHT = 64.0, 1048.0
PLOT, SPACE = 90.0, 46.0
SHOWN_GROUPS, SHOWN_ANSWERS, SHOWN_CHARACTERS = 6, 4, 600
ALWAYS = ("entropy", "gap", "clipped")
"""Metrics whose curve is shown also if it is 0 throughout."""
SURPRISING = 5.0
"""Nats of a token's surprise that have the full colour."""


def section(log: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]],
            newest: Sequence[SampledGroup]) -> list[Html]:
    """Return the blocks of the section; [] for a run without rollouts.

    Args:
        log: lines of rollouts.jsonl.
        metrics: lines of metrics.jsonl.
        newest: groups of the last step with rollouts.
    """
    steps = {int(line["step"]): line for line in log if line.get("kind") == "step"}
    if not steps:
        return []
    trained = {int(line["step"]): line["objective"] for line in metrics if line.get("objective")}
    order = sorted(steps)
    blocks = [_figures(steps, log)]
    series = [("mean reward", order, [float(steps[step]["reward"]) for step in order]),
              ("tokens of an answer", order, [float(steps[step]["answer_tokens"]) for step in order])]
    if any(steps[step].get("lag") for step in order):
        series.append(("versions that the sampling policy is behind", order,
                       [float(steps[step].get("lag", 0)) for step in order]))
    for name, title in (("entropy", "entropy, nats"), ("gap", "gap, nats"), ("clipped", "share of tokens clipped"),
                        ("reference_kl", "KL to the reference, nats"), ("value_loss", "loss of the values")):
        known = [step for step in sorted(trained) if name in trained[step]]
        if any(name in ALWAYS or trained[step][name] for step in known):
            series.append((title, known, [float(trained[step][name]) for step in known]))
    blocks.append(_plots(series))
    if newest:
        blocks += [tag("h3", "Rollouts of the newest step"),
                   *(_group(group) for group in newest[:SHOWN_GROUPS]),
                   note("The darker a token, the less likely it was when it was sampled. An environment's text is in "
                        "italics.")]
    return blocks


def _figures(steps: Mapping[int, Mapping[str, Any]], log: Sequence[Mapping[str, Any]]) -> Html:
    """Return the table of the figures of all steps."""
    dropped: Counter[str] = Counter()
    for line in steps.values():
        dropped.update(line["dropped"])
    groups = sum(line["groups"] for line in steps.values())
    tokens = sum(line["tokens"] for line in steps.values())
    processor = sum(line["processor_seconds"] for line in steps.values())
    rows = [("groups sampled", f"{groups:,}"),
            *((f"dropped: {reason}", f"{number:,} ({percent(number, groups)})")
              for reason, number in dropped.most_common()),
            ("tokens sampled", f"{tokens:,}"),
            ("tokens per processor second", f"{tokens / processor:,.0f}" if processor else "–"),
            *_weights(steps.values()),
            ("generators lost", f"{sum(line.get('kind') == 'generator_lost' for line in log):,}")]
    return table(("rollouts", ""), rows, numeric=(1,))


def _weights(lines: Collection[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return rows of the bytes of weights that generators have read; [] for runs of earlier releases."""
    fetched = [line["fetched"] for line in lines if "fetched" in line]
    if not fetched:
        return []
    whole, delta, damaged = (sum(one[name] for one in fetched) for name in ("whole", "deltas", "damaged"))
    rows = [("weights read by generators", f"{whole / 1e6:,.1f} MB whole, {delta / 1e6:,.1f} MB as deltas")]
    return [*rows, *([("damaged deltas", f"{damaged:,}")] if damaged else [])]


def _plots(series: Sequence[tuple[str, Sequence[int], Sequence[float]]]) -> Html:
    """Draw a small plot for each series, one below the other, over the same steps."""
    first = min(steps[0] for _, steps, _ in series)
    last = max(steps[-1] for _, steps, _ in series)
    x = Scale(first, max(last, first + 1), LEFT, RIGHT)
    svg = Svg(24 + len(series) * (PLOT + SPACE), "rollouts by step")
    bottom = 0.0
    for number, (title, steps, values) in enumerate(series):
        top = 24 + number * (PLOT + SPACE)
        bottom = top + PLOT
        low, high = min(values), max(values)
        y = Scale(low, high if high > low else low + 1, bottom, top)
        grid(svg, y, LEFT, RIGHT, title, 3)
        svg.curve([(x(step), y(value)) for step, value in zip(steps, values)], "var(--accent)", 1.8)
        svg.dot(x(steps[-1]), y(values[-1]), "var(--accent)", title=f"{title}: {values[-1]:.4g} at step {steps[-1]}")
    for value in ticks(x.low, x.high, 8):
        svg.text(x(value), bottom + 18, f"{value:g}", "middle")
    svg.text(WIDTH - 12, bottom + 18, "step", "end", class_="label")
    return svg.render()


def _group(group: SampledGroup) -> Html:
    """Return a group's prompt and some of its answers: the best and the worst."""
    ranked = sorted(group.answers, key=lambda answer: -answer.reward)
    half = SHOWN_ANSWERS // 2
    shown = ranked if len(ranked) <= SHOWN_ANSWERS else [*ranked[:half], *ranked[-half:]]
    summary = join([tag("b", printable(group.prompt_id)), f"  mean reward {group.reward:.3f}"])
    return details(summary, tag("blockquote", printable_lines(group.prompt[-SHOWN_CHARACTERS:])),
                   table(("reward", "advantage", "answer"), [
                       (f"{answer.reward:.3f}", f"{answer.advantage:+.3f}", _answer(answer)) for answer in shown],
                       numeric=(0, 1)))


def _answer(answer: Sampled) -> Html:
    """Return an answer's text, its tokens coloured by how surprising they were."""
    spans, length = [], 0
    for text, value in answer.pieces:
        length += len(text)
        if length > SHOWN_CHARACTERS:
            spans.append(tag("span", "…"))
            break
        if value is None:
            spans.append(tag("i", printable(text), title="the environment's"))
            continue
        strength = round(100 * min(1.0, -value / SURPRISING) * 0.6)
        spans.append(tag("span", printable(text), title=f"log p {value:.3f}",
                         style=f"background:color-mix(in srgb, var(--bad) {strength}%, transparent)"))
    return join(spans)
