"""The report's section about sources: the share of each that is kept, the stage that took most, and an alarm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel.printable import printable
from tidewheel.report.colours import PALETTE, of_stages
from tidewheel.report.page import Html, badge, count, join, percent, swatch, table, tag
from tidewheel.report.plots import WIDTH, Scale, Svg, legend, shorten_middle

ALARM_SHARE = 0.8
ALARM_DOCUMENTS = 20
RULE = (f"A source is marked when it loses at least {ALARM_SHARE:.0%} of its documents (of {ALARM_DOCUMENTS} or more) "
        "and keeps less than half of the overall share: a rule may not suit it, or its reader may be wrong.")
TOKENS_NOTE = "Tokens of the training set by the source of their document."
_BARS = 16


def alarming(num_read: int, num_kept: int, usual: float) -> bool:
    """Return whether a source lost so much that someone should look.

    Args:
        num_read: documents read.
        num_kept: documents kept.
        usual: share that all sources together keep.
    """
    many_dropped = num_read >= ALARM_DOCUMENTS and num_read - num_kept >= ALARM_SHARE * num_read
    return many_dropped and num_kept < usual / 2 * num_read


def section(by_stage: Sequence[Mapping[str, Any]], drops: Sequence[Mapping[str, Any]]) -> list[Html]:
    """Return the blocks of the section; [] with fewer than two sources.

    Args:
        by_stage: `sources` of summary.json: for each stage in order {"stage", "left": {source: [documents, bytes]}}.
        drops: `stages` of it: a stage that drops for one reason has that one's colour.
    """
    stages = [entry["stage"] for entry in by_stage]
    sources = {entry["stage"]: entry["left"] for entry in by_stage}
    if len(stages) < 2 or len(sources[stages[0]]) < 2:
        return []
    first = sources[stages[0]]
    names = sorted(first, key=lambda name: (-first[name][0], name))
    colours = of_stages(drops)
    return [_bars(sources, stages, names[:_BARS], colours), _table(sources, stages, names, colours)]


def tokens_section(by_source: Mapping[str, Sequence[int]]) -> list[Html]:
    """Return the blocks of the section about tokens; [] if nothing was packed.

    Args:
        by_source: `source_tokens` of summary.json: {source: [documents, tokens]}.
    """
    if not by_source:
        return []
    names = sorted(by_source, key=lambda name: (-by_source[name][1], name))
    whole = sum(by_source[name][1] for name in names)
    most = max(by_source[name][1] for name in names) or 1
    left, right, row = 270.0, 900.0, 24.0
    svg = Svg(len(names[:_BARS]) * row + 4, "tokens of each source in the training set")
    scale = Scale(0, most, left, right)
    for index, name in enumerate(names[:_BARS]):
        top = index * row + 3
        documents, tokens = by_source[name]
        svg.text(left - 12, top + 13, shorten_middle(printable(name), 34), "end", class_="label")
        svg.rect(left, top, scale(tokens) - left, 17, "var(--accent)", f"{tokens:,} tokens of {documents:,} documents",
                 radius=3, opacity=0.8)
        svg.text(WIDTH, top + 13, f"{percent(tokens, whole)} · {count(tokens)}", "end")
    rows = []
    for name in names:
        documents, tokens = by_source[name]
        rows.append((tag("code", printable(name)), f"{documents:,}", f"{tokens:,}", percent(tokens, whole),
                     f"{tokens / documents:,.0f}" if documents else "–"))
    return [svg.render(), table(("source", "documents", "tokens", "share", "tokens a document"), rows,
                                numeric=(1, 2, 3, 4))]


def _usual(sources: Mapping[str, Mapping[str, Sequence[int]]], stages: Sequence[str]) -> float:
    """Return the share of all documents that is kept."""
    num_read, num_kept = (sum(entry[0] for entry in sources[stage].values()) for stage in (stages[0], stages[-1]))
    return num_kept / num_read if num_read else 1.0


def _documents(sources: Mapping[str, Mapping[str, Sequence[int]]], stage: str, name: str) -> int:
    return sources[stage].get(name, [0, 0])[0]


def _taken(sources: Mapping[str, Mapping[str, Sequence[int]]], stages: Sequence[str], name: str) -> dict[str, int]:
    """Return how many documents of a source each stage took."""
    left = [_documents(sources, stage, name) for stage in stages]
    return {stage: before - after for stage, before, after in zip(stages[1:], left, left[1:], strict=False)}


def _bars(sources: Mapping[str, Any], stages: Sequence[str], names: Sequence[str], colours: Mapping[str, str]) -> Html:
    """Draw a bar of 100 % for each source: the share kept, and the shares that stages took."""
    left, right, row = 270.0, 940.0, 26.0
    svg = Svg(len(names) * row + 4, "share of each source that is kept, and the shares that each stage dropped")
    scale = Scale(0, 1, left, right)
    takers = [stage for stage in stages[1:] if any(_taken(sources, stages, name)[stage] > 0 for name in names)]
    usual = _usual(sources, stages)
    for index, name in enumerate(names):
        top, num_read = index * row + 3, _documents(sources, stages[0], name) or 1
        num_kept = _documents(sources, stages[-1], name)
        svg.text(left - 12, top + 14, shorten_middle(printable(name), 34), "end", class_="label")
        at = scale(num_kept / num_read)
        svg.rect(left, top, right - left, 19, "var(--grid)", radius=3)
        svg.rect(left, top, at - left, 19, "var(--kept)", f"{num_kept:,} of {num_read:,} kept", radius=3, opacity=0.85)
        for stage, num_dropped in _taken(sources, stages, name).items():
            if num_dropped > 0:
                width = num_dropped / num_read * (right - left)
                svg.rect(at, top, width, 19, colours.get(stage, PALETTE[-1]), f"{num_dropped:,} dropped by {stage}")
                at += width
        tone = "var(--bad)" if alarming(num_read, num_kept, usual) else None
        svg.text(WIDTH, top + 14, f"{percent(num_kept, num_read)} of {count(num_read)}", "end", tone)
    marks = [("var(--kept)", "kept"), *((colours.get(stage, PALETTE[-1]), stage.replace("_", " ")) for stage in takers)]
    return join([svg.render(), legend(marks)])


def _table(sources: Mapping[str, Any], stages: Sequence[str], names: Sequence[str], colours: Mapping[str, str]) -> Html:
    rows, usual = [], _usual(sources, stages)
    for name in names:
        (num_read, size), (num_kept, rest) = sources[stages[0]][name], sources[stages[-1]].get(name, [0, 0])
        dropped = _taken(sources, stages, name)
        worst = max(dropped, key=lambda stage: dropped[stage])
        most: Any = "–"
        if dropped[worst] > 0:
            most = join([swatch(colours.get(worst, PALETTE[-1])), f"{worst.replace('_', ' ')} ({dropped[worst]:,})"])
        mark = badge("look here", "bad") if alarming(num_read, num_kept, usual) else ""
        rows.append((join([tag("code", printable(name)), " ", mark]),
                     f"{num_read:,}", f"{num_kept:,}", percent(num_kept, num_read), f"{size / 1e6:,.2f}",
                     f"{rest / 1e6:,.2f}", most))
    return table(("source", "documents read", "kept", "share", "MB read", "MB kept", "most dropped by"), rows,
                 numeric=(1, 2, 3, 4, 5))
