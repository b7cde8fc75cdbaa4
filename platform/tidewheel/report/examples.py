"""The report's examples: documents that were kept beside documents that were dropped, and records set aside."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tidewheel.printable import printable
from tidewheel.report.page import Html, details, join, shorten, swatch, table, tag
from tidewheel.storage import Store

SIDE_BY_SIDE = 6
CHARACTERS = 260
QUARANTINE_EXAMPLES, QUARANTINE_FILES, QUARANTINE_BYTES = 3, 32, 1 << 20
"""Largest numbers of examples per reason, of files to read them from, and of bytes per file."""


def side_by_side(kept: Sequence[Mapping[str, Any]], samples: Mapping[str, Mapping[str, list[Mapping[str, Any]]]],
                 dropped: Mapping[str, Mapping[str, int]], colours: Mapping[str, str]) -> Html | None:
    """Return two columns, kept and dropped documents; None without examples of both.

    Args:
        kept: `kept` of summary.json.
        samples: `samples` of it.
        dropped: {stage: {reason: documents}}; other entries of `samples` are edits.
        colours: colours of reasons.
    """
    dropped_examples = _taken_in_turn([(stage, reason, samples.get(stage, {}).get(reason, []))
                                       for stage, counted in dropped.items()
                                       for reason, _ in sorted(counted.items(), key=lambda item: (-item[1], item[0]))])
    if not kept or not dropped_examples:
        return None
    left = [_card(example, "var(--kept)", "kept") for example in kept[:SIDE_BY_SIDE]]
    right = [_card(example, colours.get(reason, "var(--faint)"), f"{reason.replace('_', ' ')} · {stage}")
             for stage, reason, example in dropped_examples[:SIDE_BY_SIDE]]
    return join([tag("h3", "Kept and dropped, side by side"), tag("div", tag("div", *left), tag("div", *right),
                                                                class_="sides")])


def _taken_in_turn(by_reason: Sequence[tuple[str, str, Sequence[Mapping[str, Any]]]]
                   ) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return the first example of each reason, then the second of each, and so on."""
    longest = max((len(examples) for _, _, examples in by_reason), default=0)
    return [(stage, reason, examples[at]) for at in range(longest) for stage, reason, examples in by_reason
            if at < len(examples)]


def _card(example: Mapping[str, Any], colour: str, why: str) -> Html:
    source = example.get("source")
    name = shorten(printable(str(example.get("id", ""))), 60)
    head = tag("div", swatch(colour), tag("b", why), " ", tag("code", name),
               tag("span", f" · {printable(source)}", class_="count") if source else None)
    return tag("div", head, tag("div", one_line(example.get("text", ""), CHARACTERS), class_="text"), class_="example",
               style=f"border-left-color:{colour}")


def one_line(text: Any, limit: int) -> str:
    """Return the beginning of a text in one line, with control characters spelled out."""
    return shorten(printable(" ".join(str(text).split())), limit)


def quarantined(output: Store, reasons: Mapping[str, int]) -> Html | None:
    """Return a folded table of examples per reason; None without examples.

    Args:
        output: the pipeline's output.
        reasons: `quarantine` of summary.json, with the number of records.
    """
    by_reason: dict[str, list[dict[str, Any]]] = {reason: [] for reason, count in reasons.items() if count}
    for record in _records(output):
        examples = by_reason.get(str(record.get("reason")))
        if examples is not None and len(examples) < QUARANTINE_EXAMPLES:
            examples.append(record)
        if all(len(examples) >= min(QUARANTINE_EXAMPLES, reasons[reason]) for reason, examples in by_reason.items()):
            break
    blocks: list[Html] = []
    for reason, examples in sorted(by_reason.items(), key=lambda item: (-reasons[item[0]], item[0])):
        if examples:
            head = tag("span", reason.replace("_", " "), " ",
                       tag("span", f"· {len(examples)} of {reasons[reason]:,}", class_="count"))
            blocks.append(details(head, table(("where", "what is there", "what the reader says"),
                                              [_place(example) for example in examples]), open_=not blocks))
    return join(blocks) if blocks else None


def _place(record: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    line, offset = record.get("line") or 0, record.get("offset") or 0
    position = f" line {line:,}" if line else f" from byte {offset:,}" if offset else ""
    return (join([tag("code", shorten(printable(str(record.get("file", ""))), 90)), position]),
            tag("code", one_line(record.get("head", ""), 160) or "–"), one_line(record.get("detail", ""), 160) or "–")


def _records(output: Store) -> Iterator[dict[str, Any]]:
    """Yield the records of the first quarantine files."""
    files = [stamp.key for stamp in output.list("quarantine") if stamp.key.endswith(".jsonl")]
    for key in files[:QUARANTINE_FILES]:
        with output.open(key) as stream:
            data = bytes(stream.read(QUARANTINE_BYTES))
        for line in data.splitlines()[: None if len(data) < QUARANTINE_BYTES else -1]:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # cut off, or not the pipeline's
            if isinstance(record, dict):
                yield record
