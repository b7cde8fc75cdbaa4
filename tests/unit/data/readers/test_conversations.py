"""Chat and preference records become documents; unusable records have a reason."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidewheel.config import build
from tidewheel.data.config import PipelineConfig, ReadConfig
from tidewheel.data.quarantine import REASONS, Bad
from tidewheel.data.readers import Record, read_records
from tidewheel.data.readers.conversations import pair_of
from tidewheel.data.readers.messages import text_of
from tidewheel.errors import ConfigError
from tidewheel.storage import store

USER, BOT = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "tell"}
CHAT = ReadConfig(paths=("*",), kind="chat")
PAIRS = ReadConfig(paths=("*",), kind="preferences")


def read(folder, values, config) -> Record | Bad:
    (folder / "a.jsonl").write_text(json.dumps(values) + "\n")
    return next(iter(read_records(store(folder), "a.jsonl", config)))


@pytest.mark.parametrize("values", [
    {"messages": [USER, BOT]}, {"prompt": "ask", "completion": "tell"}, {"prompt": [USER], "completion": [BOT]}])
def test_a_conversation(tmp_path, values):
    result = read(tmp_path, {"id": "x", "license": "MIT", **values}, CHAT)
    assert (result.id, result.text) == ("x", "ask\n\ntell")
    meta = json.loads(result.meta)
    assert meta["messages"] == [USER, BOT]
    assert meta["license"] == "MIT"
    assert text_of(meta["messages"]) == result.text


def test_tool_calls_need_no_content(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
    messages = [USER, call, {"role": "tool", "content": "42"}, BOT]
    assert read(tmp_path, {"messages": messages}, CHAT).text == (
        'ask\n\n{"arguments": {}, "name": "f"}\n\n42\n\ntell')


@pytest.mark.parametrize(("values", "reason"), [
    ({}, "missing_messages"), ({"messages": None}, "missing_messages"), ({"messages": "hi"}, "invalid_messages"),
    ({"messages": ["hi"]}, "invalid_messages"), ({"messages": []}, "empty_conversation"),
    ({"messages": [{"role": "bot", "content": "a"}]}, "unknown_role"),
    ({"messages": [{"content": "a"}, BOT]}, "unknown_role"),
    ({"messages": [{"role": "user", "content": 3}, BOT]}, "invalid_messages"),
    ({"messages": [{"role": "user"}, BOT]}, "invalid_messages"),
    ({"messages": [USER, {"role": "assistant", "content": " "}]}, "empty_conversation"),
    ({"messages": [USER]}, "no_assistant_turn"),
    ({"messages": [{"role": "user", "content": "a\ufdd0"}, BOT]}, "invalid_unicode"),
    ({"messages": [{"role": "user", "content": "a\ud800"}, BOT]}, "invalid_unicode"),
    ({"messages": [{"role": "user", "content": "a\x00"}, BOT]}, "null_bytes"),
])
def test_bad_conversations(tmp_path, values, reason):
    result = read(tmp_path, {"id": "x", **values}, CHAT)
    assert isinstance(result, Bad)
    assert result.reason == reason
    assert reason in REASONS


@pytest.mark.parametrize("values", [
    {"prompt": [USER], "chosen": [BOT], "rejected": [{**BOT, "content": "no"}]},
    {"prompt": "ask", "chosen": "tell", "rejected": "no"},
    {"chosen": [USER, BOT], "rejected": [USER, {**BOT, "content": "no"}]}])
def test_a_pair(tmp_path, values):
    result = read(tmp_path, values, PAIRS)
    assert result.text == "ask\n\ntell\n\nno"
    assert pair_of(json.loads(result.meta)) == ([USER], [BOT], [{**BOT, "content": "no"}])


@pytest.mark.parametrize(("values", "reason"), [
    ({"prompt": "a", "chosen": "b"}, "empty_conversation"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "no_preference"),
    ({"prompt": "a", "chosen": "b", "rejected": [USER]}, "no_assistant_turn"),
    ({"chosen": "b", "rejected": "c"}, "empty_conversation"),
    ({"prompt": [{"role": "x", "content": "a"}], "chosen": "b", "rejected": "c"}, "unknown_role"),
    ({"prompt": 7, "chosen": "b", "rejected": "c"}, "invalid_messages"),
])
def test_bad_pairs(tmp_path, values, reason):
    result = read(tmp_path, values, PAIRS)
    assert isinstance(result, Bad)
    assert result.reason == reason


@pytest.mark.parametrize(("steps", "message"), [
    ([{"filter": {"pii": {}, "gopher_quality": {}}}], "pii would change the text"),
    ([{"dedup_lines": {}}], "dedup_lines would change the text"),
    ([{"filter": {"pii": {}, "annotate": True}}], None), ([{"filter": {"gopher_quality": {}}}], None)])
def test_steps_that_edit_are_for_documents(steps, message):
    recipe = {"read": {"paths": ["a"], "kind": "chat"}, "steps": [*steps, {"tokenize": {"file": "t"}}, {"pack": {}}]}
    if message is None:
        build(PipelineConfig, recipe)
        return
    with pytest.raises(ConfigError, match=message):
        build(PipelineConfig, recipe)
    build(PipelineConfig, {**recipe, "read": {"paths": ["a"]}})


def test_a_trained_tokenizer_needs_a_template_of_its_own():
    recipe = {"read": {"paths": ["a"], "kind": "chat"}, "steps": [{"tokenize": {"train": {}}}, {"pack": {}}]}
    with pytest.raises(ConfigError, match=r"tokenize\.chat_template"):
        build(PipelineConfig, recipe)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_columns_give_the_same_documents_as_json(tmp_path, ending):
    records = [{"id": "a", "messages": [USER, BOT]},
               {"id": "b", "messages": [{**USER, "name": "me"}, {**BOT, "weight": 1}]},
               {"id": "c", "messages": [USER]}]
    table = pa.Table.from_pylist(records, schema=pa.schema([("id", pa.string()), ("messages", pa.list_(pa.struct(
        [("role", pa.string()), ("content", pa.string()), ("name", pa.string()), ("weight", pa.int64())])))]))
    if ending == "parquet":
        pq.write_table(table, tmp_path / "t.parquet")
    else:
        with pa.ipc.new_file(str(tmp_path / "t.arrow"), table.schema) as sink:
            sink.write_table(table)
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    read_as = [list(read_records(store(tmp_path), name, CHAT)) for name in (f"t.{ending}", "t.jsonl")]
    assert [[item.reason if isinstance(item, Bad) else (item.id, item.text, json.loads(item.meta)["messages"])
             for item in found] for found in read_as] == [[
        ("a", "ask\n\ntell", [USER, BOT]),
        ("b", "ask\n\ntell", [{**USER, "name": "me"}, {**BOT, "weight": 1}]), "no_assistant_turn"]] * 2


@pytest.mark.parametrize(("given", "expected"), [(2, 2.0), (0.5, 0.5), (-1, -1.0), (None, None), ("2", None),
                                                 (True, None)])
def test_a_pair_has_the_margin_of_its_field(tmp_path, given, expected):
    config = ReadConfig(paths=("*",), kind="preferences", margin="score_difference")
    result = read(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c", "score_difference": given}, config)
    if expected is None:
        assert (type(result), result.reason) == (Bad, "invalid_margin")
        return
    meta = json.loads(result.meta)
    assert meta["_margin"] == expected
    assert "score_difference" not in meta
    assert pair_of(meta)[1] == [{"role": "assistant", "content": "b"}]


def test_margins_are_of_pairs():
    with pytest.raises(ConfigError, match="records of kind chat have none"):
        build(ReadConfig, {"paths": ["*"], "kind": "chat", "margin": "m"})


def test_a_single_answer_has_the_label_of_its_field(tmp_path):
    config = ReadConfig(paths=("*",), kind="preferences", label="label")
    for label, pair in ((True, ([BOT], [])), (False, ([], [BOT]))):
        result = read(tmp_path, {"prompt": "ask", "completion": "tell", "label": label}, config)
        assert result.text == "ask\n\ntell"
        assert pair_of(json.loads(result.meta)) == ([USER], *pair)
    for label in (1, "true", None):
        result = read(tmp_path, {"prompt": "ask", "completion": "tell", "label": label}, config)
        assert (type(result), result.reason) == (Bad, "invalid_label")
    silent = read(tmp_path, {"prompt": "ask", "completion": " ", "label": True}, config)
    assert (type(silent), silent.reason) == (Bad, "empty_conversation")
    with pytest.raises(ConfigError, match="one answer with a label"):
        build(ReadConfig, {"paths": ["*"], "kind": "chat", "label": "label"})


def test_an_answer_has_the_labels_of_its_steps(tmp_path):
    config = ReadConfig(paths=("*",), kind="preferences", completion="completions", step_labels="labels",
                        step_separator=" / ")
    record = {"prompt": "ask", "completions": ["one", "two, too", "three"], "labels": [True, False, True]}
    result = read(tmp_path, record, config)
    answer = "one / two, too / three"
    assert pair_of(json.loads(result.meta)) == ([USER], [{**BOT, "content": answer}], [])
    assert [(answer[:end], label) for end, label in json.loads(result.meta)["_steps"]] == [
        ("one / ", True), ("one / two, too / ", False), (answer, True)]
    for changed in ({"labels": [True]}, {"labels": [True, False, 1]}, {"labels": None}, {"completions": "one"},
                    {"completions": [], "labels": []}, {"completions": ["one", " ", "three"]}):
        result = read(tmp_path, {**record, **changed}, config)
        assert (type(result), result.reason) == (Bad, "invalid_steps"), changed
    with pytest.raises(ConfigError, match="neither label nor margin"):
        build(ReadConfig, {"paths": ["*"], "kind": "preferences", "step_labels": "labels", "margin": "m"})
