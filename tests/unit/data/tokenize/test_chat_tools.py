"""Templates get tools, calls, dates and special tokens as in transformers; weights decide what is learnt."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from transformers.utils import chat_template_utils

from tests.unit.data.tokenize.test_chat import CHATML, MARKED, SPECIAL, TEXTS, TOKENS, oracle
from tidewheel.config import build
from tidewheel.data.config import PipelineConfig, ReadConfig
from tidewheel.data.document import DOCUMENT_SCHEMA
from tidewheel.data.readers import read_records
from tidewheel.data.stages import tokens
from tidewheel.data.stages.resolve import chat_template
from tidewheel.data.tokenize.chat import ChatTemplate, Refused, encode, read_template
from tidewheel.data.tokenize.preferences import encode_pairs
from tidewheel.data.tokenize.tokenizer import train_bpe
from tidewheel.errors import ConfigError, InputError
from tidewheel.shards.tokenizer import Encoder, load
from tidewheel.storage import store

DAY = datetime(2026, 7, 1, 9, 30)
TOOLS_FIRST = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "You may call functions.\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
        {%- for call in m.tool_calls %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
DATED = """
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y, %H:%M') %}{%- endif %}
{%- if tools is not none %}{{- 'Environment: tools\\n' + (tools | tojson(indent=4)) }}{%- endif %}
{{- 'Today Date: ' + date_string + '\\n\\n' }}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|im_start|>assistant ' + call.name + '(' }}
        {%- for name, value in call.arguments | items %}{{- name + '=' + value | string + ', ' }}{%- endfor %}
        {{- ')' + eos_token }}
    {%- elif m.role in ['tool', 'ipython'] %}
        {{- '<|im_start|>ipython ' + (m.content | tojson if m.content is mapping else m.content) + eos_token }}
    {%- else %}
        {{- '<|im_start|>' + m.role + ' ' + m.content | trim }}
        {%- if m.reasoning_content is defined %}{{- ' (' + m.reasoning_content + '|' + m.thinking + ')' }}{%- endif %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant ' }}{%- endif %}
"""
PARTS = """
{%- for m in messages %}
    {{- '<|im_start|>' + m['role'] + '\\n' }}
    {%- if m['content'] is string %}{{- m['content'] }}
    {%- else %}{%- for part in m['content'] %}{{- part['text'] }}{%- endfor %}{%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "Tell the weather, naïvely.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2, "raw": None}}}
PLAIN = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "words and things"},
         {"role": "assistant", "content": "the answer"}]
CALLING = [{"role": "user", "content": "asks"}, {"role": "assistant", "tool_calls": [CALL]},
           {"role": "tool", "content": "{\"sunny\": true}", "name": "weather"},
           {"role": "assistant", "content": "sunny", "reasoning": "it says so"},
           {"role": "user", "content": "thanks"}, {"role": "assistant", "content": "with pleasure"}]


@pytest.fixture(scope="module")
def tokenizer() -> bytes:
    return train_bpe(TEXTS, 400, SPECIAL)


@pytest.fixture(scope="module")
def encoder(tokenizer: bytes) -> Encoder:
    return load(tokenizer)


def template(encoder: Encoder, source: Any, date: datetime | None = DAY) -> ChatTemplate:
    config = json.dumps({**TOKENS, "chat_template": source}).encode()
    return ChatTemplate(read_template(config, None, where="t", date=date), tuple(encoder.special))


@pytest.fixture(autouse=True)
def _today(monkeypatch):
    """Set the clock that transformers reads to `DAY`."""
    class Fixed(datetime):
        @classmethod
        def now(cls, tz=None):
            return DAY

    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)


@pytest.mark.parametrize("tools", [None, TOOLS, [TOOLS[0]["function"], *TOOLS]], ids=["none", "one", "two"])
@pytest.mark.parametrize("messages", [PLAIN, CALLING], ids=["plain", "calling"])
@pytest.mark.parametrize("source", [TOOLS_FIRST, DATED, CHATML, MARKED], ids=["tools", "dated", "chatml", "marked"])
def test_text_and_tokens_equal_those_of_transformers(tokenizer, encoder, source, messages, tools):
    if messages is CALLING and source in (CHATML, MARKED):
        messages = [{"content": "calls", **message} for message in messages]
    known, own = oracle(tokenizer, source), template(encoder, source)
    for prompted in (False, True):
        expected = known.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompted)
        text = own.text(messages, tools, add_generation_prompt=prompted)
        assert text.replace("\ufdd1", "").replace("\ufdd2", "") == expected
    found, refused = encode(encoder, own, [messages], [tools])
    assert not refused
    assert found.tokens.tolist() == known.apply_chat_template(messages, tools=tools, return_dict=True)["input_ids"]


def test_a_record_of_a_file_gives_the_same_tokens_as_transformers(tokenizer, encoder, tmp_path):
    """Reading must not change anything that a template renders, such as the order of fields."""
    spoken = [{**message, "content": message.get("content")} for message in CALLING]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": spoken, "tools": TOOLS, "source": "s"}) + "\n")
    record, = read_records(store(tmp_path), "a.jsonl", ReadConfig(paths=("*",), kind="chat"))
    rows = {"id": [record.id], "text": [record.text], "source": [record.source], "meta": [record.meta]}
    for source in (TOOLS_FIRST, DATED):
        config = json.dumps({**TOKENS, "chat_template": source}).encode()
        template = read_template(config, None, where="t", date=DAY)
        encoded = tokens.encode([pa.table(rows, schema=DOCUMENT_SCHEMA)], encoder, template)
        expected = oracle(tokenizer, source).apply_chat_template(spoken, tools=TOOLS, return_dict=True)["input_ids"]
        assert (encoded.tokens.tolist(), len(encoded.dropped)) == (expected, 0)


def test_a_tool_call_is_learnt_and_its_result_is_not(encoder):
    found, _ = encode(encoder, template(encoder, TOOLS_FIRST), [CALLING], [TOOLS])
    learnt = encoder.with_control_tokens.decode(found.tokens[found.loss_mask == 1].tolist(), skip_special_tokens=False)
    assert learnt == ('\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2, "raw": null}}\n'
                      "</tool_call><|im_end|>sunny<|im_end|>with pleasure<|im_end|>").removeprefix("\n")


def test_joined_parts_give_the_same_text_as_parts_in_transformers(tokenizer, encoder):
    parts = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}]
    joined = [{"role": "user", "content": "one two"}]
    assert template(encoder, PARTS).text(joined) == oracle(tokenizer, PARTS).apply_chat_template(parts, tokenize=False)


def test_conversations_with_tools_use_the_tool_template(encoder):
    own = template(encoder, [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOLS_FIRST}])
    assert own.text(PLAIN) == template(encoder, CHATML).text(PLAIN)
    assert own.text(PLAIN, TOOLS) == template(encoder, TOOLS_FIRST).text(PLAIN, TOOLS)


def test_special_tokens_spelled_out_in_tools_and_arguments_are_text(encoder):
    tools = [{"name": "<|im_end|>", "role": "<|im_start|>"}]
    call = {"name": "f", "arguments": {"role": "<|im_end|>"}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    for source in (TOOLS_FIRST, TOOLS_FIRST.replace("tojson", "tojson(ensure_ascii=True)")):
        found, refused = encode(encoder, template(encoder, source), [messages], [tools])
        assert not refused
        assert (found.tokens == encoder.special["<|im_start|>"]).sum() == 3
        text = encoder.with_control_tokens.decode(found.tokens.tolist(), skip_special_tokens=False)
        assert '{"name": "<|im_end|>", "role": "<|im_start|>"}' in text


@pytest.mark.parametrize("source", [CHATML, MARKED], ids=["by turns", "by marks"])
def test_a_message_with_weight_0_is_not_learnt(encoder, source):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bad", "weight": 0},
                {"role": "user", "content": "b", "weight": 0}, {"role": "assistant", "content": "good", "weight": 1}]
    without = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
    own = template(encoder, source)
    found, _ = encode(encoder, own, [messages])
    every, _ = encode(encoder, own, [without])
    assert found.tokens.tolist() == every.tokens.tolist()
    learnt = encoder.with_control_tokens.decode(found.tokens[found.loss_mask == 1].tolist(), skip_special_tokens=False)
    assert learnt == "good<|im_end|>"
    assert every.loss_mask.sum() > found.loss_mask.sum() > 0


def test_ambiguous_weights_are_refused(encoder):
    source = MARKED.replace("{% endgeneration %}", "{% endgeneration %}{% generation %}!{% endgeneration %}")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0},
                {"role": "assistant", "content": "c"}]
    with pytest.raises(Refused, match=r"4 \{% generation %\} blocks for 2 messages"):
        template(encoder, source).rendered(messages)


def test_a_date_is_required_only_if_the_template_reads_it():
    with pytest.raises(InputError, match=r"t: .*change every day(.|\n)*template_date: 2026"):
        read_template(None, b"{{ strftime_now('%Y') }}", where="t")
    guarded = b"{% if tools %}{{ strftime_now('%Y') }}{% endif %}x"
    late = ChatTemplate(read_template(None, guarded, where="t"), ())
    assert late.text(PLAIN) == "x"
    with pytest.raises(InputError, match="would change every day"):
        late.text(PLAIN, TOOLS)


def test_a_template_file_beside_the_tokenizer_overrides_its_configuration(tmp_path):
    def found(**settings):
        recipe = {"read": {"paths": ["a"], "kind": "chat"},
                  "steps": [{"tokenize": {"file": "model/tokenizer.json", **settings}}, {"pack": {}}]}
        return json.loads(chat_template(build(PipelineConfig, recipe), str(tmp_path)))

    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer_config.json").write_text('{"chat_template": "old {{ messages }}", "bos_token": "<s>"}')
    assert found() == {"template": "old {{ messages }}", "tokens": {"bos_token": "<s>"}}
    (tmp_path / "model/chat_template.jinja").write_text("new {{ messages }}")
    assert found() == {"template": "new {{ messages }}", "tokens": {"bos_token": "<s>"}}
    (tmp_path / "own.jinja").write_text("{{ messages }} {{ strftime_now('%Y') }}")
    assert found(chat_template="own.jinja", template_date="2026-07-01")["date"] == "2026-07-01T00:00:00"
    with pytest.raises(ConfigError, match="without a time zone"):
        found(template_date="2026-07-01T00:00:00Z")


@pytest.mark.parametrize("form", ["%s", "%99999999d", "%", "%Q", "x" * 201])
def test_formats_that_depend_on_the_machine_or_allocate_are_refused(form):
    source = "{{ strftime_now('" + form + "') }}"
    own = ChatTemplate(read_template(None, source.encode(), where="t", date=DAY), ())
    with pytest.raises(Refused, match="does not accept the format"):
        own.text(PLAIN)


def test_templates_get_the_tools_of_pairs(encoder):
    prompt, chosen, rejected = CALLING[:1], [{"role": "assistant", "tool_calls": [CALL]}], PLAIN[-1:]
    both = [encode_pairs(encoder, template(encoder, TOOLS_FIRST), ["a"], [(prompt, chosen, rejected)], tools,
                         sequence_length=500, token_dtype="uint16").table for tools in (None, [TOOLS])]
    assert both[1]["prompt_length"][0].as_py() > both[0]["prompt_length"][0].as_py()
