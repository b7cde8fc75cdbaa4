"""Quarantine rows identify the record, in an order that depends only on the rows."""

from __future__ import annotations

import json
import random

from tidewheel.data.quarantine import REASONS, Bad, bad_record, count, encode
from tidewheel.storage import content_hash


def test_a_row_has_position_reason_and_head():
    raw = b'{"text": "caf\xe9 ' + b"x" * 500
    row = bad_record("corpus/a.jsonl", 7, 1234, "wrong_encoding", raw, "byte 13: invalid continuation byte")
    value = json.loads(encode([row]))
    assert value["file"] == "corpus/a.jsonl"
    assert (value["line"], value["offset"], value["bytes"]) == (7, 1234, len(raw))
    assert value["hash"] == content_hash(raw)
    assert value["head"].startswith('{"text": "caf\\xe9 xxx')
    assert len(value["head"]) < 250


def test_encoding_does_not_depend_on_order():
    rows = [bad_record(f"f{number % 3}", number, number * 10, "invalid_json", b"{") for number in range(50)]
    shuffled = rows[:]
    random.Random(1).shuffle(shuffled)
    assert encode(rows) == encode(shuffled)
    assert encode(rows).count(b"\n") == 50


def test_hostile_bytes_stay_on_one_line():
    row = bad_record("f", 1, 0, "invalid_json", "\u2028\r\n\x00\x1b[31m\ud7ff".encode())
    assert encode([row]).count(b"\n") == 1
    assert encode([row]).isascii()


def test_a_whole_file_counts_for_all_its_records():
    rows = [Bad("f", 0, 0, "unreadable_file", records=40), bad_record("g", 1, 0, "empty_text", b"{}"),
            bad_record("g", 2, 3, "empty_text", b"{}")]
    assert count(rows) == {"empty_text": 2, "unreadable_file": 40}


def test_every_reason_is_explained():
    assert all(REASONS.values())
