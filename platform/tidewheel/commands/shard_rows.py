"""Rows of a shard set on a terminal: segments, text and the loss mask, in colour or in words.

Control characters of documents are spelled out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.text import Text

from tidewheel.console import Output
from tidewheel.printable import printable, printable_lines
from tidewheel.shards.manifest import PACKED
from tidewheel.shards.opened import ROWS
from tidewheel.shards.show import Part, Row, Segment

SEGMENT_COLOURS = ("cyan", "magenta", "yellow", "blue", "bright_cyan", "bright_magenta")
LEARNT, GIVEN, SPECIAL = "green", "dim", "reverse"
BAR = "  ┃ "
SHOWN_SEGMENTS, SHOWN_CHARACTERS = 4, 300
"""What is shown of a row that was not asked for by its number."""


def print_summary(uri: str, summary: dict[str, Any]) -> None:
    """Print the result of `verify.inspect` for a set."""
    packed = summary["kind"] == PACKED
    lines = [
        ("rows", f"{summary['rows']:,} {ROWS[summary['kind']]} in {summary['num_shards']:,} shards, "
                 f"{summary['bytes'] / 1e6:,.1f} MB"),
        ("tokens", f"{summary['tokens']:,} of {summary['documents']:,} documents" + (
            "" if not packed else f", {summary['utilisation']:.2%} of {summary['sequence_length']:,} a row")),
        ("tokenizer", f"{summary['tokenizer']['file']}, vocabulary {summary['vocabulary_size']:,} "
                      f"({summary['token_dtype']})"),
        ("loss mask", _mask(packed, summary["loss_mask"])),
        ("cleaned "
         "against", ", ".join(evaluation_set["name"] for evaluation_set in summary["evaluation_sets"]) or "nothing"),
        ("recipe", f"{summary['recipe_hash']}; hash of the set {summary['hash']}")]
    print(printable(uri))
    for name, value in lines:
        print(f"  {name:<16}{printable(value)}")


def _mask(packed: bool, in_rows: bool) -> str:
    """Return what the loss mask of a set marks."""
    if not packed:
        return "on the answers"
    return "in each row" if in_rows else "none: every token is learnt"


def print_rows(rows: Sequence[Row], *, whole: bool) -> None:
    """Print rows; `whole`: all of their text."""
    console = _console()
    masked = [row.masked for row in rows]
    for row in rows:
        console.print()
        for line in row_lines(row, whole=whole, width=console.width if console.is_terminal else None):
            console.print(line)
    if masked:
        console.print()
        console.print(_legend(any(masked)))


def _console() -> Output:
    return Output(file=sys.stdout, highlight=False, soft_wrap=True)


def _legend(masked: bool) -> Text:
    example = Text.assemble(("<|name|>", SPECIAL), " a control token")
    if masked:
        example = Text.assemble(("+ a model learns to predict these tokens", LEARNT), "   ",
                                ("- it only reads these", GIVEN), "   ", example)
    return example


def row_lines(row: Row, *, whole: bool, width: int | None) -> Iterator[Text]:
    """Yield the lines of a row.

    Args:
        row: the row.
        whole: show all of its text.
        width: columns to fold the text to; None: do not fold.
    """
    filled = "" if row.length == row.room else f" of {row.room:,}"
    learnt = sum(part.tokens for segment in row.segments for part in segment.parts if part.learnt)
    mask = f", {learnt:,} learnt" if row.masked else ""
    count = f"{len(row.segments)} segment{'s' * (len(row.segments) != 1)}"
    yield Text(f"row {row.row}  {row.length:,}{filled} tokens{mask}, {count}  {row.id}", "bold")
    shown = row.segments if whole else row.segments[:SHOWN_SEGMENTS]
    for index, segment in enumerate(shown):
        colour = SEGMENT_COLOURS[index % len(SEGMENT_COLOURS)]
        yield Text(_heading(segment), f"bold {colour}")
        yield from _text_lines(segment, colour, row.masked, whole=whole, width=width)
    if len(shown) < len(row.segments):
        yield Text(f"  and {len(row.segments) - len(shown)} more segments: --row {row.row} shows them", "dim")


def _heading(segment: Segment) -> str:
    source = f"  source {printable(segment.source)}" if segment.source else ""
    begun = f" from its token {segment.document_offset:,}" if segment.document_offset else ""
    last = segment.start + segment.tokens - 1
    return (f"  {segment.name}  tokens {segment.start:,} to {last:,}  document {printable(segment.document)}{begun}"
            f"{source}")


def _text_lines(segment: Segment, colour: str, masked: bool, *, whole: bool, width: int | None) -> Iterator[Text]:
    """Yield lines of text, each after a bar in the segment's colour and a sign that says whether it is learnt."""
    left = None if whole else SHOWN_CHARACTERS
    for learnt, parts in _runs(segment.parts):
        style = "" if not masked else LEARNT if learnt else GIVEN
        sign = "" if not masked else "+ " if learnt else "- "
        text = Text()
        for part in parts:
            shown_text = printable(part.text) if part.special else printable_lines(part.text)
            clipped = shown_text if left is None or part.special else shown_text[:left]
            text.append(clipped, SPECIAL if part.special else style)
            left = None if left is None else max(left - len(shown_text), 0)
            if left == 0:
                break
        text.expand_tabs(4)
        room = width - len(BAR) - len(sign) if width else None
        for line in text.split("\n"):
            pieces = line.wrap(_console(), max(room, 20)) if room and line.cell_len > room else [line]
            yield from (Text.assemble((BAR, colour), (sign, style), piece) for piece in pieces)
        if left == 0:
            yield Text.assemble((BAR, colour), ("…", "dim"))
            return


def _runs(parts: Iterable[Part]) -> Iterator[tuple[bool, list[Part]]]:
    """Yield groups of neighbouring parts that are equal in the loss mask."""
    run: list[Part] = []
    for part in parts:
        if run and run[0].learnt != part.learnt:
            yield run[0].learnt, run
            run = []
        run.append(part)
    if run:
        yield run[0].learnt, run
