"""Records that cannot be used: their position, the reason, and enough of their bytes to recognise them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from tidewheel.storage import content_hash
from tidewheel.versions import Version

VERSION = Version("quarantine")
HEAD_BYTES = 200

REASONS = {
    "unreadable_file": "the file cannot be read, or its decompressed content does not match its checksum",
    "truncated_file": "the file is cut off here; the records before are kept",
    "damaged_file": "the file is damaged from here on; the records before are kept",
    "damaged_rows": "a part of the file is damaged, and the rows in it cannot be read",
    "empty_file": "the file has no record",
    "record_too_long": "the line is longer than the maximum size of a record",
    "wrong_encoding": "the line is not UTF-8",
    "invalid_json": "the line is not JSON",
    "invalid_csv": "a quote is not closed, so the end of the row is unknown",
    "wrong_fields": "the row has more or fewer fields than the header",
    "not_an_object": "the line is JSON, but not an object with fields",
    "missing_text": "the record has no text field",
    "text_not_string": "the text is not a string",
    "empty_text": "the text is empty or white space",
    "null_bytes": "the text contains null bytes: it is binary data or UTF-16",
    "invalid_unicode": "the text contains lone surrogates, which are not characters",
    "invalid_id": "the id is not a string or whole number, is empty, or contains lone surrogates or null bytes",
    "invalid_source": "the source is not a string",
    "invalid_field": "the url, language or license is not a string",
    "no_main_text": "the page has no main text, or cannot be decompressed",
    "page_too_complex": "the page has more tags, attributes in a tag, or elements side by side than any real page",
    "page_too_slow": "finding the page's main text takes too long",
    "page_breaks_parser": "the HTML parser crashes on this page",
    "missing_messages": "the record has no field with messages",
    "invalid_messages": "the messages are not a list of objects with a role and text as content",
    "unsupported_content": "a part of a message is not text: an image, sound, a file or a refusal",
    "invalid_tools": "the tools are not a list of JSON schemas with names",
    "invalid_tool_call": "a tool call has no name, has arguments that are not a JSON object, or is not the assistant's",
    "invalid_weight":
        "the weight of a message is neither 0 nor 1, or asks to learn a message that is not the assistant's",
    "unknown_role": "a message has an unknown role",
    "empty_conversation": "there is no message, all messages are empty, or an assistant's turn is empty",
    "no_assistant_turn": "the assistant says nothing, or another role speaks in the assistant's place",
    "no_preference": "the better and the worse answer are the same",
    "invalid_label": "the label of an answer is not true or false",
    "invalid_steps": "an answer is no list of steps, or its labels are not true or false for each",
    "invalid_margin": "the margin of a pair is not a finite number",
    "duplicate_id": "another document has the same id and a different text",
}
"""Reasons for which a record cannot be used, each with an explanation for its owner."""


@dataclass(frozen=True)
class Bad:
    """A record in quarantine.

    Args:
        file: URI or key of the file, as the pipeline names it.
        line: number of the line, from 1; 0 for a whole file, or if reading started inside the file.
        offset: offset of the line's first byte in the decompressed file; of a row, its number from 0.
        reason: one of `REASONS`.
        detail: message of the parser, or the id that the record repeats.
        bytes: length of the raw record.
        hash: content hash of the raw record; of a whole file, its fingerprint.
        head: the first 200 bytes, undecodable ones escaped.
        records: number of records that it stands for: all records of a whole file or row group, else 1.
    """

    file: str
    line: int
    offset: int
    reason: str
    detail: str = ""
    bytes: int = 0
    hash: str = ""
    head: str = ""
    records: int = 1


def bad_record(file: str, line: int, offset: int, reason: str, raw: bytes, detail: str = "") -> Bad:
    """Return the entry for one record.

    Args:
        file: name of the file.
        line: number of the line, from 1; 0 if unknown.
        offset: offset of the record.
        reason: one of `REASONS`.
        raw: the record's bytes.
        detail: message of the parser.
    """
    return Bad(file, line, offset, reason, detail[:HEAD_BYTES], len(raw), content_hash(raw),
               raw[:HEAD_BYTES].decode("utf-8", "backslashreplace"))


def encode(rows: Iterable[Bad]) -> bytes:
    """Return JSON lines, in order of file and offset."""
    ordered = sorted(rows, key=lambda row: (row.file, row.offset, row.line, row.reason, row.detail))
    return b"".join(json.dumps(asdict(row), ensure_ascii=True, sort_keys=True).encode() + b"\n" for row in ordered)


def count(rows: Iterable[Bad]) -> dict[str, int]:
    """Return the number of quarantined records, by reason."""
    totals: Counter[str] = Counter()
    for row in rows:
        totals[row.reason] += row.records
    return dict(sorted(totals.items()))
