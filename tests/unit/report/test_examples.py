"""What a pipeline's report shows of documents: kept beside dropped, packed rows, records set aside, tokens by source.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.report import runs
from tests.unit.shards.test_show import EVIL, chat, plain
from tidewheel.report import colours, packed_rows
from tidewheel.report.examples import quarantined, side_by_side
from tidewheel.report.pipeline import write_pipeline_report
from tidewheel.storage import Store, store

__all__ = ["chat", "plain"]
STAGES = [{"name": "filter", "documents_in": 90, "documents_out": 60, "dropped": {"too_short": 20, "too_long": 10}},
          {"name": "dedup_exact", "documents_in": 60, "documents_out": 55, "dropped": {"exact_duplicate": 5}}]


@pytest.fixture
def output(tmp_path: Path) -> Store:
    """A pipeline's output without sets, with hostile documents."""
    folder_store = store(tmp_path)
    runs.write_pipeline(folder_store)
    summary = folder_store.read_json("summary.json")
    summary["kept"] = [{"id": "good\x1b[1m", "text": EVIL, "source": "<b>web</b>"}]
    summary["source_tokens"] = {"<i>web</i>": [2, 3000], "books\x07": [1, 1000]}
    folder_store.write_json("summary.json", summary)
    records = [{"file": f"a\x1b{n}.jsonl", "line": n + 1, "offset": 10 * n, "reason": "invalid_json", "detail": "no {",
                "head": '{"text": "<script>\x1b[31m\\xff'} for n in range(5)]
    records.append({"file": "b.jsonl", "line": 0, "offset": 77, "reason": "missing_text", "detail": "", "head": "{}"})
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    folder_store.write("quarantine/0.jsonl", lines + b"{torn")
    return folder_store


def html_of(place: Store) -> str:
    folder, name = write_pipeline_report(place.uri).rsplit("/", 1)
    return store(folder).read(name).decode()


def test_the_page_shows_documents_and_none_of_their_controls(output: Store):
    html = html_of(output)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", html)
    assert "Kept and dropped, side by side" in html
    assert "before \\x1b[31mred" in html
    assert "<b>web" not in html
    assert "<script>" not in html
    assert "Tokens by source" in html
    assert "75.0 %" in html
    assert "books\\x07" in html


def test_quarantined_records_are_shown_by_reason(output: Store):
    result = str(quarantined(output, {"invalid_json": 5, "missing_text": 1, "no_such": 2}))
    assert result.count("<details") == 2
    assert "3 of 5" in result
    assert "line 3" in result
    assert "line 4" not in result
    assert "from byte 77" in result
    assert "&lt;script&gt;\\x1b[31m" in result
    assert quarantined(output, {}) is None
    assert quarantined(store(output.at("nowhere")), {"invalid_json": 1}) is None


def test_a_reason_has_one_colour_wherever_it_is(output: Store):
    html = html_of(output)
    stages = output.read_json("summary.json")["stages"]
    expected = colours.of_reasons(stages)
    assert len(set(expected.values())) == len(expected) > 5
    for reason, colour in expected.items():
        spelled = reason.replace("_", " ")
        drawn = set(re.findall(rf'fill="([^"]*)"[^>]*><title>[\d,]+ dropped: {reason}</title>', html))
        named = set(re.findall(rf'style="background:([^"]*)"></span>(?:<b>)?{spelled}\b', html))
        assert drawn == {colour}, reason
        assert named == {colour}, reason
    of_one_reason = {stage["name"]: expected[next(iter(stage["dropped"]))] for stage in stages
                     if len(stage["dropped"]) == 1}
    for stage, colour in of_one_reason.items():
        assert set(re.findall(rf'fill="([^"]*)"[^>]*><title>[\d,]+ dropped by {stage}</title>', html)) == {colour}


def test_colours_stay_when_other_reasons_come_and_go():
    before = colours.of_reasons(STAGES)
    more = colours.of_reasons([*STAGES, {"name": "x", "dropped": {"contaminated": 1}}])
    assert before.items() <= more.items()
    of_stages = colours.of_stages(STAGES)
    assert of_stages["dedup_exact"] == before["exact_duplicate"]
    assert of_stages["filter"] not in before.values()
    many = colours.of_reasons([{"name": "x", "dropped": {f"reason_{n}": 1 for n in range(40)}}])
    assert sorted(many.values()).count(colours.PALETTE[-1]) == 40 - len(colours.PALETTE) + 1


def test_kept_and_dropped_take_reasons_in_turn():
    samples: dict[str, Any] = {"filter": {"too_short": [{"id": f"s{n}", "text": "s"} for n in range(3)],
                                          "too_long": [{"id": "l0", "text": "l"}], "edited": [{"id": "e", "text": ""}]}}
    dropped = {stage["name"]: stage["dropped"] for stage in STAGES}
    result = str(side_by_side([{"id": "k", "text": "kept"}], samples, dropped, colours.of_reasons(STAGES)))
    assert re.findall(r"<code>(\w+)</code>", result) == ["k", "s0", "l0", "s1", "s2"]
    assert side_by_side([], samples, dropped, {}) is None
    assert side_by_side([{"id": "k", "text": ""}], {}, dropped, {}) is None


def test_packed_rows_are_text_again(plain: str, chat: str):
    result = "".join(map(str, packed_rows.section(store(plain.removesuffix("/shards")))))
    assert result.count('class="packed"') == packed_rows.SHOWN_ROWS
    assert "<mark>" not in result
    assert "the quick brown fox" in result
    assert "\x1b" not in result
    marked = "".join(map(str, packed_rows.section(store(chat.removesuffix("/shards")))))
    assert "answer" in re.sub(r"<(?!/?mark).*?>", "", "".join(re.findall(r"<mark>.*?</mark>", marked, re.S)))
    assert not re.search(r"<mark>[^<]*ask", marked)
    assert '<span class="special learnt">&lt;|im_end|&gt;</span>' in marked
    assert '<span class="special">&lt;|im_start|&gt;</span>' in marked


def test_a_set_that_is_damaged_or_not_there(tmp_path: Path, plain: str):
    assert packed_rows.section(store(tmp_path)) == []
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/manifest.json").write_bytes(Path(plain, "manifest.json").read_bytes())
    assert "cannot be shown" in str(packed_rows.section(store(tmp_path))[0])
