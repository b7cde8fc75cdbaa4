"""Rows as people read them: text, segments, sources, the loss mask; and nothing a document says moves a terminal."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.data.stages.test_pack import packed
from tests.unit.data.tokenize import test_preferences
from tests.unit.data.tokenize.test_chat import CHATML, SPECIAL
from tidewheel import storage
from tidewheel.cli import run_command
from tidewheel.commands.shard_rows import GIVEN, LEARNT, row_lines
from tidewheel.data.document import DOCUMENT_SCHEMA
from tidewheel.data.stage import write_ipc
from tidewheel.data.tokenize.tokenizer import train_bpe
from tidewheel.errors import ShardError
from tidewheel.shards import show
from tidewheel.shards.lineage import Sources
from tidewheel.shards.tokenizer import load

EVIL = "before \x1b[31mred\x1b]0;title\x07 \u202egnp\u202c \x9b2J after"
TEXTS = ["the quick brown fox " * 9, "a lazy dog\nsleeps", EVIL, *(f"document number {n} says so" for n in range(20))]


def sources(folder: Path, names: dict[str, str]) -> None:
    """What a pipeline writes about the sources of documents, in two units."""
    output = storage.store(folder)
    output.write_json("summary.json", {"stages": [], "sources": [
        {"stage": "ingest", "left": {name: [1, 1] for name in set(names.values())}}]})
    ids = sorted(names)
    for number in range(2):
        own = ids[number::2]
        table = pa.table([own, ["x"] * len(own), [names[item] for item in own], ["{}"] * len(own)],
                         schema=DOCUMENT_SCHEMA)
        with output.writer(f"stages/partition/units/{number}/documents") as sink:
            write_ipc(sink, table)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A set of plain documents in its pipeline's output."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "in").mkdir()
    (folder / "in/tokenizer.json").write_bytes(train_bpe(TEXTS, 400, SPECIAL))
    packed(folder, {"file": "tokenizer.json", "eos": "document"}, {"validation_fraction": 0.0}, texts=TEXTS)
    sources(folder / "out", {f"d{n:03d}": ("foxes", "dogs", "evil\x1b[1m")[min(n, 2)] for n in range(len(TEXTS))})
    return str(folder / "out/shards")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A set of conversations that stands alone."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "in").mkdir()
    (folder / "in/tokenizer.json").write_bytes(train_bpe(TEXTS, 400, SPECIAL))
    (folder / "in/chat.jinja").write_text(CHATML)
    chats = [[{"role": "user", "content": f"ask {n}"}, {"role": "assistant", "content": f"answer {n} \x1b[5m"}]
             for n in range(6)]
    packed(folder, {"file": "tokenizer.json", "chat_template": "chat.jinja"}, {"validation_fraction": 0.0}, kind="chat",
           metas=[json.dumps({"messages": item}) for item in chats],
           texts=["\n\n".join(message["content"] for message in item) for item in chats])
    return str(folder / "out/shards")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command(["shards", "inspect", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_every_row_is_its_documents_again(plain: str):
    whole: dict[str, dict[int, str]] = {}
    for row in show.rows(plain):
        assert row.length == sum(segment.tokens for segment in row.segments) <= row.room
        assert not row.masked
        for segment in row.segments:
            assert segment.tokens == sum(part.tokens for part in segment.parts)
            whole.setdefault(segment.document, {})[segment.document_offset] = segment.text
    results = {name: "".join(pieces[at] for at in sorted(pieces)) for name, pieces in whole.items()}
    assert results == {f"d{n:03d}": text for n, text in enumerate(TEXTS)}


def test_the_loss_mask_tells_what_is_learnt(chat: str):
    parts = [part for row in show.rows(chat) for segment in row.segments for part in segment.parts]
    learnt = "".join(part.text for part in parts if part.learnt and not part.special)
    given = "".join(part.text for part in parts if not part.learnt)
    assert "answer 3" in learnt
    assert "ask" not in learnt
    assert "ask 3" in given
    assert "answer" not in given
    assert any(part.special and part.text in SPECIAL for part in parts)


def test_rows_of_a_source(plain: str):
    rows = list(show.rows(plain, source="dogs"))
    assert rows
    assert all(any(segment.source == "dogs" for segment in row.segments) for row in rows)
    every = [row.row for row in show.rows(plain) if any(item.source == "dogs" for item in row.segments)]
    assert [row.row for row in rows] == every
    assert [row.row for row in show.rows(plain, first=every[0] + 1, source="dogs")] == every[1:]
    assert list(show.rows(plain, source="cats")) == []


def test_sources_are_found_in_whatever_order_they_are_asked_for(plain: str):
    known = Sources(storage.store(plain.removesuffix("/shards")))
    assert known.of(["d001", "nobody", "d000"]) == {"d000": "foxes", "d001": "dogs"}
    assert known.of(["d002"]) == {"d002": "evil\x1b[1m"}


def test_a_set_that_stands_alone_has_no_sources(chat: str):
    (row,) = islice(show.rows(chat), 1)
    assert {segment.source for segment in row.segments} == {None}
    with pytest.raises(ShardError, match="not known"):
        next(show.rows(chat, source="dogs"))


def test_no_document_reaches_the_terminal_as_it_is(plain: str, chat: str, capsys: pytest.CaptureFixture[str]):
    for arguments in ((plain, "--limit", "1000"), (plain, "--row", "0", "--limit", "1000"),
                      (chat, "--row", "0", "--limit", "1000"), (plain, "--source", "evil\x1b[1m"),
                      (plain, "--row", "0", "--json")):
        code, out, _ = told(capsys, *arguments)
        assert code == 0
        assert not [character for character in out if (ord(character) < 32 and character != "\n")
                    or 0x7F <= ord(character) < 0xA0 or character in "\u202e\u202c"]
    _, out, _ = told(capsys, plain, "--row", "0", "--limit", "1000")
    assert "before \\x1b[31mred\\x1b]0;title\\x07 \\u202egnp\\u202c \\x9b2J after" in out
    assert "source evil\\x1b[1m" in out


def test_what_the_command_shows(plain: str, chat: str, capsys: pytest.CaptureFixture[str]):
    _, out, _ = told(capsys, plain)
    assert out.count("\nrow ") == 3
    assert "packed sequences in 2 shards" in out
    assert told(capsys, plain, "--limit", "0")[1].count("\nrow ") == 0
    assert told(capsys, plain, "--row", "2")[1].startswith("\nrow 2 ")
    assert told(capsys, plain, "--row", "1", "--limit", "2")[1].count("\nrow ") == 2
    _, out, _ = told(capsys, chat, "--row", "0")
    assert "+ answer" in out
    assert "- <|im_start|>user" in out
    assert "learns to predict" in out


def test_what_it_says_when_there_is_nothing_to_show(plain: str, chat: str, capsys: pytest.CaptureFixture[str]):
    code, _, error_text = told(capsys, plain, "--source", "cats")
    assert code == 2
    assert "'dogs', 'evil\\x1b[1m', 'foxes'" in error_text
    assert told(capsys, plain, "--row", "999")[0] == 2
    assert told(capsys, plain, "--limit", "-1")[0] == 2
    assert "not known" in told(capsys, chat, "--source", "dogs")[2]


def test_json_keeps_what_it_had_and_has_the_text(chat: str, capsys: pytest.CaptureFixture[str]):
    row: dict[str, Any] = json.loads(told(capsys, chat, "--row", "0", "--json")[1])
    assert {"row", "id", "length", "loss_tokens", "tokens", "segments"} <= row.keys()
    assert sum(part["tokens"] for item in row["segments"] for part in item["parts"]) == row["length"]
    assert row["loss_tokens"] == sum(part["tokens"] for item in row["segments"] for part in item["parts"]
                                     if part["learnt"])
    whole = json.loads(told(capsys, chat, "--json", "--limit", "2")[1])
    assert len(whole["rows_shown"]) == 2
    assert whole["num_shards"] == 2


def test_on_a_terminal_the_mask_has_colours_and_lines_fit(chat: str):
    (row,) = islice(show.rows(chat), 1)
    lines = list(row_lines(row, whole=True, width=40))
    headings = 1 + len(row.segments)
    styles = {str(span.style) for line in lines for span in line.spans}
    assert {LEARNT, GIVEN} <= styles
    assert sum(line.cell_len > 40 for line in lines) <= headings
    assert len(list(row_lines(row, whole=False, width=None))) <= len(lines)


def test_a_pair_is_a_prompt_and_two_answers(tmp_path: Path):
    encoder = load(train_bpe(test_preferences.TEXTS, 400, SPECIAL))
    test_preferences.write_set(tmp_path, encoder)
    rows = list(show.rows(str(tmp_path), first=6))
    assert [row.row for row in rows] == [6, 7, 8]
    prompt, chosen, rejected = rows[1].segments
    assert (prompt.name, chosen.name, rejected.name, prompt.document) == ("prompt", "chosen", "rejected", "p7")
    assert not any(part.learnt for part in prompt.parts)
    assert all(part.learnt for part in (*chosen.parts, *rejected.parts))
    assert chosen.text != rejected.text
    assert chosen.start == rejected.start == prompt.tokens
