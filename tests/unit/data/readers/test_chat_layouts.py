"""ShareGPT, Alpaca, content parts, tool calls and weights are converted to one form, or refused with a reason."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import REASONS, Bad
from tidewheel.data.readers import Record, read_records, shape_of
from tidewheel.data.readers.conversations import pair_of
from tidewheel.storage import store

USER, BOT = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "tell"}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def read(folder, values, **settings) -> Record | Bad:
    (folder / "a.jsonl").write_text(json.dumps(values) + "\n")
    config = ReadConfig(paths=("*",), **{"kind": "chat", **settings})
    return next(iter(read_records(store(folder), "a.jsonl", config)))


def messages(found: Record | Bad) -> list[dict]:
    assert isinstance(found, Record), found
    return json.loads(found.meta)["messages"]


def turns(*pairs: tuple[str, str]) -> list[dict]:
    return [{"from": speaker, "value": value} for speaker, value in pairs]


def test_sharegpt_speakers_become_roles(tmp_path):
    chat = turns(("system", "be brief"), ("human", "ask"), ("gpt", "tell"), ("observation", "42"), ("gpt", "so"))
    roles = [(item["role"], item["content"]) for item in messages(read(tmp_path, {"conversations": chat}))]
    assert roles == [("system", "be brief"), ("user", "ask"), ("assistant", "tell"), ("tool", "42"),
                     ("assistant", "so")]
    result = read(tmp_path, {"talk": chat[1:3], "sys": "be kind"}, conversations="talk", system="sys")
    assert messages(result) == [{"role": "system", "content": "be kind"}, USER, BOT]
    assert "sys" not in json.loads(result.meta)
    result = read(tmp_path, {"conversations": chat, "system": "unused"})
    assert messages(result)[0]["content"] == "be brief"


def test_sharegpt_may_stand_under_messages_or_as_json_text_and_messages_go_first(tmp_path):
    chat = turns(("human", "ask"), ("gpt", "tell"))
    for values in ({"messages": chat}, {"conversations": json.dumps(chat)}, {"conversations": [USER, BOT]},
                   {"messages": [USER, BOT], "conversations": "other"}):
        assert messages(read(tmp_path, values)) == [USER, BOT]


def test_a_sharegpt_function_call_is_a_tool_call(tmp_path):
    chat = turns(("human", "ask"), ("function_call", '{"name": "add", "arguments": {"a": 1}}'), ("observation", "3"))
    result = read(tmp_path, {"conversations": chat})
    assert messages(result)[1] == {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    assert result.text == 'ask\n\n{"arguments": {"a": 1}, "name": "add"}\n\n3'


@pytest.mark.parametrize("given", [{}, {"input": ""}, {"input": None}, {"input": " \n"}])
def test_alpaca_without_input(tmp_path, given):
    result = read(tmp_path, {"instruction": "Add {x}.", "output": "3", **given})
    assert messages(result) == [{"role": "user", "content": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd {x}.\n\n### Response:")}, {"role": "assistant", "content": "3"}]
    plain = read(tmp_path, {"instruction": "Add {x}.", "output": "3", **given}, alpaca_prompt="plain")
    assert messages(plain)[0]["content"] == "Add {x}."


def test_alpaca_with_input(tmp_path):
    values = {"instruction": "Add.", "input": "1 {2}", "output": "3", "system": "be exact", "id": "x"}
    result = read(tmp_path, values)
    assert [item["content"] for item in messages(result)] == ["be exact", (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 {2}\n\n"
        "### Response:"), "3"]
    assert set(json.loads(result.meta)) == {"messages", "_file", "_line", "_offset"}
    assert messages(read(tmp_path, values, alpaca_prompt="plain"))[1]["content"] == "Add.\n\n1 {2}"


def test_alpaca_in_a_table(tmp_path):
    (tmp_path / "a.csv").write_text("instruction,input,output\nAdd.,,3\nAdd.,1 2,3\n")
    config = ReadConfig(paths=("*",), kind="chat", alpaca_prompt="plain")
    assert shape_of(store(tmp_path), "a.csv", config).problem == ""
    results = [messages(item)[0]["content"] for item in read_records(store(tmp_path), "a.csv", config)]
    assert results == ["Add.", "Add.\n\n1 2"]


def test_text_parts_are_one_text(tmp_path):
    parts = [{"type": "text", "text": "as"}, {"type": "text", "text": "k"}]
    assert messages(read(tmp_path, {"messages": [{"role": "user", "content": parts}, BOT]})) == [USER, BOT]


def test_arguments_as_json_text_become_an_object_and_tools_are_kept(tmp_path):
    written = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]}
    for tools in ([TOOL], json.dumps([TOOL])):
        result = read(tmp_path, {"messages": [USER, written, {"role": "tool", "content": "2"}, BOT], "tools": tools})
        assert messages(result)[1] == {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
        assert json.loads(result.meta)["tools"] == [TOOL]
    assert "tools" not in json.loads(read(tmp_path, {"messages": [USER, BOT], "tools": []}).meta)


def test_tool_schemas_keep_their_key_order(tmp_path):
    call = {"name": "add", "arguments": {"b": 2, "a": {"z": 1, "y": 2}}}
    tool = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}
    record = {"tools": [tool], "messages": [USER, {"role": "assistant", "tool_calls": [call]}], "b": {"d": 1, "c": 2}}
    meta = read(tmp_path, record).meta
    for part in (tool, call):
        assert json.dumps(part) in meta
    assert meta.index('"b": {"c": 2, "d": 1}') < meta.index('"messages"') < meta.index('"tools"')


def test_conversations_that_differ_in_a_call_alone_have_other_ids(tmp_path):
    other = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 2}}]}
    assert read(tmp_path, {"messages": [USER, CALL]}).id != read(tmp_path, {"messages": [USER, other]}).id


def test_weights_are_kept_as_numbers(tmp_path):
    messages_ = [{**USER, "weight": 0}, {**BOT, "weight": 0.0}, {**USER, "weight": None}, {**BOT, "weight": 1.0}, BOT]
    assert [item.get("weight") for item in messages(read(tmp_path, {"messages": messages_}))] == [0, 0, None, 1, None]
    result = read(tmp_path, {"prompt": [{**USER, "weight": 0}], "chosen": [{**BOT, "weight": 1}], "rejected": "no"},
                 kind="preferences")
    assert pair_of(json.loads(result.meta))[:2] == ([USER], [BOT])


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


@pytest.mark.parametrize(("values", "reason", "detail"), [
    ({"conversations": turns(("human", "ask"), ("bard", "tell"))}, "unknown_role", "from 'bard'; known are system"),
    ({"conversations": turns(("human", "ask"), ("function_call", "add(1)"))}, "invalid_tool_call", "tool call 0"),
    ({"conversations": [{"from": "human"}, BOT]}, "invalid_messages", "message 0 of 'conversations' has no content"),
    ({"conversations": "no"}, "invalid_messages", "no list"),
    ({"conversations": turns(("human", "a"), ("gpt", "b")), "system": 3}, "invalid_messages", "'system'"),
    ({"instruction": "Add."}, "missing_messages", "without the text 'output'"),
    ({"instruction": "Add.", "input": 3, "output": "b"}, "invalid_messages", "'input' is no text"),
    ({"instruction": " ", "output": "b"}, "empty_conversation", "'instruction'"),
    ({"instruction": "Add.", "output": " "}, "empty_conversation", "'output'"),
    ({"text": "a"}, "missing_messages", "none of the fields 'messages', 'conversations'"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}, BOT]}, "unsupported_content",
     "part 1 of message 0 of 'messages' is of the type 'image_url'"),
    ({"messages": [{"role": "user", "content": ["a"]}, BOT]}, "unsupported_content", "no object with a type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}, BOT]}, "invalid_messages", "holds no text"),
    ({"messages": [{**CALL, "role": "user"}, BOT]}, "invalid_tool_call", "of the role user"),
    ({"messages": [USER, {**CALL, "tool_calls": "add"}]}, "invalid_tool_call", "no list"),
    ({"messages": [USER, {**CALL, "tool_calls": [{"function": {"name": ""}}]}]}, "invalid_tool_call", "tool call 0"),
    ({"messages": [USER, {**CALL, "tool_calls": [{"name": "add", "arguments": "[1"}]}]}, "invalid_tool_call",
     "arguments"),
    ({"messages": [USER, {**CALL, "tool_calls": [{"name": "add", "arguments": '{"a": NaN}'}]}]}, "invalid_tool_call",
     "arguments"),
    ({"messages": [USER, BOT], "tools": "calculator"}, "invalid_tools", "'tools' is no list"),
    ({"messages": [USER, BOT], "tools": [{"type": "function"}]}, "invalid_tools", "tool 0 of 'tools'"),
    ({"messages": [USER, BOT], "tools": [{"name": "a\ufdd0"}]}, "invalid_unicode", "'tools'"),
    ({"messages": [USER, {**BOT, "weight": 0.5}]}, "invalid_weight", "0.5"),
    ({"messages": [USER, {**BOT, "weight": True}]}, "invalid_weight", "True"),
    ({"messages": [{**USER, "weight": 1}, BOT]}, "invalid_weight", "only what the assistant says"),
    ({"messages": [USER, {**BOT, "weight": 0}]}, "no_assistant_turn", "weight 0"),
])
def test_unusable_records_have_a_reason_and_detail(tmp_path, values, reason, detail):
    result = read(tmp_path, values)
    assert isinstance(result, Bad)
    assert (result.reason, detail in result.detail) == (reason, True), result.detail
    assert reason in REASONS


def test_an_answer_without_weight_is_no_preference(tmp_path):
    result = read(tmp_path, {"prompt": "ask", "chosen": [{**BOT, "weight": 0}], "rejected": "no"}, kind="preferences")
    assert (result.reason, "as a whole" in result.detail) == ("invalid_weight", True)


def test_columns_give_the_same_documents_as_json(tmp_path):
    records = [
        {"id": "a", "messages": [USER, {**CALL, "content": None}], "tools": [TOOL]},
        {"id": "b", "messages": [USER, {"role": "assistant", "tool_calls": [
            {"type": "function", "function": {"name": "sub", "arguments": {"b": 2}}}]}], "tools": None},
        {"id": "c", "messages": None, "tools": None}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = ReadConfig(paths=("*",), kind="chat")
    read_as = [[(item.reason if isinstance(item, Bad) else (item.id, item.text, json.loads(item.meta)["messages"],
                                                            json.loads(item.meta).get("tools")))
                for item in read_records(store(tmp_path), name, config)] for name in ("t.parquet", "t.jsonl")]
    assert read_as[0] == read_as[1]
    assert read_as[0][1][2][1]["tool_calls"][0]["function"]["arguments"] == {"b": 2}
    assert read_as[0][2] == "missing_messages"
