"""Chat templates give the text and tokens that transformers gives; only what the assistant says is to be learnt."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.data.readers.messages import MARKS
from tidewheel.data.stages import tokens
from tidewheel.data.tokenize.chat import ChatTemplate, Refused, encode, read_template
from tidewheel.data.tokenize.tokenizer import train_bpe
from tidewheel.errors import InputError
from tidewheel.shards.tokenizer import Encoder, load

SHARED = Path(__file__).parents[5] / "shared"
SPECIAL = ("<|bos|>", "<|im_start|>", "<|im_end|>")
TEXTS = [f"the user asks {i} things and the assistant answers \n\nwith {i * 3} words, système «{i}»" for i in range(99)]
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
MARKED = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
TOKENS = {"bos_token": "<|bos|>", "eos_token": {"content": "<|im_end|>"}}


@pytest.fixture(scope="module")
def tokenizer() -> bytes:
    return train_bpe(TEXTS, 600, SPECIAL)


@pytest.fixture(scope="module")
def encoder(tokenizer: bytes) -> Encoder:
    return load(tokenizer)


def template(encoder: Encoder, source: str) -> ChatTemplate:
    config = json.dumps({**TOKENS, "chat_template": source}).encode()
    return ChatTemplate(read_template(config, None, where="t"), tuple(encoder.special))


def oracle(tokenizer: bytes, source: str) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.decode()), chat_template=source,
                                   bos_token="<|bos|>", eos_token="<|im_end|>",
                                   additional_special_tokens=["<|im_start|>"])


SAID = st.one_of(  # the reader refuses our marks
    st.text(st.characters(exclude_characters="".join(MARKS), exclude_categories=["Cs"]), min_size=1, max_size=20)
    .filter(str.strip), st.sampled_from(
    ["\n leading", "trailing \n\n", "世界!", "the assistant's <|im_start|", "  two  spaces", "0123456789", "{{ 7 }}"]))
CONVERSATIONS = st.lists(st.tuples(SAID, SAID), min_size=1, max_size=4).map(lambda turns: [
    {"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn)])


@given(CONVERSATIONS)
@settings(max_examples=60, deadline=None)
def test_marked_template_agrees_with_transformers(tokenizer, encoder, messages):
    known = oracle(tokenizer, MARKED)
    own = template(encoder, MARKED)
    assert own.rendered(messages).text == known.apply_chat_template(messages, tokenize=False)
    wanted = known.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    found, refused = encode(encoder, own, [messages, messages])
    assert not refused
    assert found.tokens.tolist() == wanted["input_ids"] * 2
    assert found.loss_mask.tolist() == wanted["assistant_masks"] * 2
    assert found.offsets.tolist() == [0, len(wanted["input_ids"]), 2 * len(wanted["input_ids"])]


@given(CONVERSATIONS)
@settings(max_examples=60, deadline=None)
def test_without_marks_the_turns_are_what_the_template_adds(tokenizer, encoder, messages):
    own = template(encoder, CHATML)
    rendered = own.rendered(messages)
    known = oracle(tokenizer, CHATML)
    assert rendered.text == known.apply_chat_template(messages, tokenize=False)
    said = [rendered.text[begin:end] for begin, end in rendered.spans]
    assert said == [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    found, _ = encode(encoder, own, [messages])
    assert found.tokens.tolist() == known.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    learnt = encoder.with_control_tokens.decode(found.tokens[found.loss_mask == 1].tolist(), skip_special_tokens=False)
    for text in said:  # a token may begin before the turn, never leave a part of it out
        assert text in learnt


def test_system_tool_and_both_templates_mark_the_same(encoder):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"},
                {"role": "assistant", "content": "calls"}, {"role": "tool", "content": "42"},
                {"role": "assistant", "content": "forty-two"}]
    marked, _ = encode(encoder, template(encoder, MARKED), [messages])
    plain, _ = encode(encoder, template(encoder, "{{ bos_token }}" + CHATML), [messages])
    np.testing.assert_array_equal(marked.tokens, plain.tokens)
    np.testing.assert_array_equal(marked.loss_mask, plain.loss_mask)
    end = encoder.special["<|im_end|>"]
    assert marked.loss_mask[marked.tokens == end].tolist() == [0, 0, 1, 0, 1]


def test_control_tokens_in_a_message_are_text(encoder):
    messages = [{"role": "user", "content": "say <|im_end|> please"},
                {"role": "assistant", "content": "<|im_end|>\n<|im_start|>user\nno 世界"}]
    for source in (CHATML, MARKED):
        own = template(encoder, source)
        found, _ = encode(encoder, own, [messages])
        for name, times in (("<|im_start|>", 2), ("<|im_end|>", 2)):
            assert (found.tokens == encoder.special[name]).sum() == times
        text = encoder.with_control_tokens.decode(found.tokens.tolist(), skip_special_tokens=False)
        assert text.removeprefix("<|bos|>") == (
            "<|im_start|>user\nsay <|im_end|> please<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\n"
            "no 世界<|im_end|>\n")
        learnt = encoder.with_control_tokens.decode(found.tokens[found.loss_mask == 1].tolist(),
                                                    skip_special_tokens=False)
        assert learnt.endswith("<|im_end|>\n<|im_start|>user\nno 世界<|im_end|>")


def test_what_a_template_refuses_is_told_by_conversation(encoder):
    source = ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
              "{{ m.content }}{% endfor %}")
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bb"}]
    bad = [{"role": "system", "content": "s"}, *good]
    found, refused = encode(encoder, template(encoder, source), [good, bad, good])
    assert list(refused) == [1]
    assert "no system" in refused[1]
    assert np.diff(found.offsets)[1] == 0
    assert np.diff(found.offsets)[0] == np.diff(found.offsets)[2] > 0


@pytest.mark.parametrize("source", [
    "{{ messages.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}",
    "{% for x in range(99999999) %}{% endfor %}", "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ messages[7].content }}", "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"])
def test_a_template_runs_in_a_sandbox(encoder, source):
    with pytest.raises(Refused):
        template(encoder, source).text([{"role": "user", "content": "a"}])


def test_a_template_that_changes_earlier_turns_needs_marks(encoder):
    source = "{% for m in messages %}{{ m.content if loop.last else m.content | upper }}{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    with pytest.raises(Refused, match="generation"):
        template(encoder, source).rendered(messages)


@pytest.mark.parametrize(("config", "source", "message"), [
    (None, None, "no chat template"), (b"{}", None, "no chat template"), (b"[]", None, "not a tokenizer_config"),
    (b"{", None, "not a tokenizer_config"), (b"{}", b"{% for %}", "no valid Jinja"), (b"{}", b"\xff", "not a tok"),
    (b'{"chat_template": [{"name": "rag", "template": "x"}]}', None, "no chat template")])
def test_wrong_templates(config, source, message):
    with pytest.raises(InputError, match=message):
        read_template(config, source, where="here")


def test_a_file_goes_before_the_configuration():
    config = b'{"chat_template": [{"name": "default", "template": "d"}], "bos_token": {"content": "<s>"}}'
    assert json.loads(read_template(config, None, where="")) == {"template": "d", "tokens": {"bos_token": "<s>"}}
    assert json.loads(read_template(config, b"f", where=""))["template"] == "f"


def test_other_tokenizers_have_no_chat_templates(encoder):
    import base64

    from tests.unit.shards.test_tokenizer import CL100K

    ranks = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        encode(load(ranks, CL100K), template(encoder, CHATML), [[{"role": "user", "content": "a"}]])


def test_an_edited_conversation_is_not_tokenized_as_it_was(encoder):
    values = read_template(json.dumps({**TOKENS, "chat_template": CHATML}).encode(), None, where="")
    meta = json.dumps({"messages": [{"role": "user", "content": "a@b.example"}, {"role": "assistant", "content": "b"}]})
    table = pa.table({"id": ["x"], "text": pa.array(["<e-mail>\n\nb"], pa.large_string()), "meta": [meta]})
    with pytest.raises(InputError, match="changed the text of a conversation"):
        tokens.encode([table], encoder, values)


@pytest.mark.skipif(not SHARED.exists(), reason="no ../shared")
def test_real_conversations_agree_with_transformers():
    from transformers import AutoTokenizer

    known = AutoTokenizer.from_pretrained(str(SHARED / "tokenizer"))
    own_encoder = load((SHARED / "tokenizer" / "tokenizer.json").read_bytes())
    config = (SHARED / "tokenizer" / "tokenizer_config.json").read_bytes()
    own = ChatTemplate(read_template(config, None, where=""), tuple(own_encoder.special))
    for path in sorted((SHARED / "sft").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            records = [json.loads(line) for line in itertools.islice(lines, 60)]
        conversations = [record.get("messages") or record["prompt"] + record["chosen"] for record in records]
        found, refused = encode(own_encoder, own, conversations)
        assert not refused
        wanted = known.apply_chat_template(conversations, tokenize=True, return_dict=True)["input_ids"]
        assert found.tokens.tolist() == [token for each in wanted for token in each], path.name
        for messages, first, last in zip(conversations, found.offsets, found.offsets[1:], strict=False):
            ids = found.tokens[first:last][found.loss_mask[first:last] == 1].tolist()
            assert own_encoder.with_control_tokens.decode(ids, skip_special_tokens=False) == "".join(
                message["content"] + "<|end|>" for message in messages if message["role"] == "assistant")
