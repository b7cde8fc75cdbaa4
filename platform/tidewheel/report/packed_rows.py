"""The report's section about packed rows: a few rows as text, with their segments and the loss mask."""

from __future__ import annotations

from itertools import islice

from tidewheel.errors import InputError, ShardError
from tidewheel.printable import printable, printable_lines
from tidewheel.report.page import Html, join, note, tag
from tidewheel.report.plots import WIDTH, Svg
from tidewheel.shards.show import Row, Segment, rows
from tidewheel.storage import Store

NOTE = ("The first rows of the training set, decoded. Bars and frames of one colour are one segment, a piece of one "
        "document that attends to itself alone. `tidewheel shards inspect` shows any row, also by source.")
MASK_NOTE = "The model learns the marked text; it only reads the rest."
SHOWN_ROWS, SHOWN_SEGMENTS, SHOWN_CHARACTERS = 3, 6, 500
SEGMENTS = 6
"""Number of segment colours in page.css; neighbours differ."""


def section(output: Store, name: str = "shards") -> list[Html]:
    """Return the blocks of the section; [] if the pipeline packed nothing."""
    if not output.exists(f"{name}/manifest.json"):
        return []
    try:
        shown_rows = list(islice(rows(output.at(name)), SHOWN_ROWS))
    except (ShardError, InputError) as error:
        return [note(f"The set cannot be shown: {printable(error.what)}")]
    masked = any(row.masked for row in shown_rows)
    return [*([note(MASK_NOTE)] if masked else []), *(_row(row) for row in shown_rows)]


def _row(row: Row) -> Html:
    shown = row.segments[:SHOWN_SEGMENTS]
    head = tag("h3", f"Row {row.row}", tag("span", f" · {row.length:,} of {row.room:,} tokens, "
                                                   f"{len(row.segments)} segments", class_="count"))
    more = len(row.segments) - len(shown)
    return tag("div", head, _bar(row), *(_segment(index, segment, row.masked) for index, segment in enumerate(shown)),
               note(f"and {more} more segments") if more else None, class_="packed")


def _bar(row: Row) -> Html:
    """Draw a row, segment by segment. Segments with loss are filled."""
    svg = Svg(16, f"segments of row {row.row}")
    scale = WIDTH / max(row.room, 1)
    svg.rect(0, 2, WIDTH, 12, "var(--grid)", "padding", radius=3)
    at = 0
    for index, segment in enumerate(row.segments):
        colour = f"var(--s{index % SEGMENTS})"
        tip = f"{segment.name}: {segment.tokens:,} tokens of {printable(segment.document)}"
        svg.rect(at * scale, 2, segment.tokens * scale - 1, 12, colour, tip, 3, 0.3 if row.masked else None)
        begin = at
        for part in segment.parts if row.masked else ():
            if part.learnt:
                svg.rect(begin * scale, 2, part.tokens * scale, 12, colour, tip)
            begin += part.tokens
        at += segment.tokens
    return svg.render()


def _segment(index: int, segment: Segment, masked: bool) -> Html:
    source = tag("span", f" · {printable(segment.source)}", class_="count") if segment.source else None
    head = tag("div", tag("b", segment.name), " ", tag("code", printable(segment.document)), source,
               tag("span", f" · {segment.tokens:,} tokens" + (f" from its token {segment.document_offset:,}"
                                                              if segment.document_offset else ""), class_="count"))
    left, pieces = SHOWN_CHARACTERS, list[Html]()
    for part in segment.parts:
        if left <= 0:
            pieces.append(Html("…"))
            break
        if part.special:
            learnt = " learnt" if masked and part.learnt else ""
            pieces.append(tag("span", printable(part.text), class_=f"special{learnt}"))
            continue
        text = printable_lines(part.text)
        shown = text[:left] + ("…" if len(text) > left else "")
        left -= len(text)
        pieces.append(tag("mark", shown) if masked and part.learnt else join([shown]))
        if left < 0:
            break
    return tag("div", head, tag("div", *pieces, class_="text"), class_=f"segment s{index % SEGMENTS}")
