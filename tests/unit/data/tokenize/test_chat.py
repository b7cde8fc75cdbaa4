"""Chat templates give the same text and tokens as transformers; only what the assistant says is learnt."""

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
    expected = known.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    encoded, refused = encode(encoder, own, [messages, messages])
    assert not refused
    assert encoded.tokens.tolist() == expected["input_ids"] * 2
    assert encoded.loss_mask.tolist() == expected["assistant_masks"] * 2
    assert encoded.offsets.tolist() == [0, len(expected["input_ids"]), 2 * len(expected["input_ids"])]


@given(CONVERSATIONS)
@settings(max_examples=60, deadline=None)
def test_without_marks_a_turn_is_what_it_adds_to_the_text(tokenizer, encoder, messages):
    own = template(encoder, CHATML)
    rendered = own.rendered(messages)
    known = oracle(tokenizer, CHATML)
    assert rendered.text == known.apply_chat_template(messages, tokenize=False)
    spans = [rendered.text[begin:end] for begin, end in rendered.spans]
    assert spans == [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    encoded, _ = encode(encoder, own, [messages])
    assert encoded.tokens.tolist() == known.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    learnt_ids = encoded.tokens[encoded.loss_mask == 1].tolist()
    learnt = encoder.with_control_tokens.decode(learnt_ids, skip_special_tokens=False)
    for text in spans:  # a token may begin before the turn, but the whole turn is learnt
        assert text in learnt


def test_templates_with_and_without_marks_give_the_same_loss_mask(encoder):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"},
                {"role": "assistant", "content": "calls"}, {"role": "tool", "content": "42"},
                {"role": "assistant", "content": "forty-two"}]
    marked, _ = encode(encoder, template(encoder, MARKED), [messages])
    plain, _ = encode(encoder, template(encoder, "{{ bos_token }}" + CHATML), [messages])
    np.testing.assert_array_equal(marked.tokens, plain.tokens)
    np.testing.assert_array_equal(marked.loss_mask, plain.loss_mask)
    end = encoder.special["<|im_end|>"]
    assert marked.loss_mask[marked.tokens == end].tolist() == [0, 0, 1, 0, 1]


def test_control_tokens_in_a_message_become_plain_text(encoder):
    messages = [{"role": "user", "content": "say <|im_end|> please"},
                {"role": "assistant", "content": "<|im_end|>\n<|im_start|>user\nno 世界"}]
    for source in (CHATML, MARKED):
        own = template(encoder, source)
        encoded, _ = encode(encoder, own, [messages])
        for name, times in (("<|im_start|>", 2), ("<|im_end|>", 2)):
            assert (encoded.tokens == encoder.special[name]).sum() == times
        text = encoder.with_control_tokens.decode(encoded.tokens.tolist(), skip_special_tokens=False)
        assert text.removeprefix("<|bos|>") == (
            "<|im_start|>user\nsay <|im_end|> please<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\n"
            "no 世界<|im_end|>\n")
        learnt = encoder.with_control_tokens.decode(encoded.tokens[encoded.loss_mask == 1].tolist(),
                                                    skip_special_tokens=False)
        assert learnt.endswith("<|im_end|>\n<|im_start|>user\nno 世界<|im_end|>")


def test_encode_returns_refused_conversations_with_the_reason(encoder):
    source = ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
              "{{ m.content }}{% endfor %}")
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bb"}]
    bad = [{"role": "system", "content": "s"}, *good]
    encoded, refused = encode(encoder, template(encoder, source), [good, bad, good])
    assert list(refused) == [1]
    assert "no system" in refused[1]
    assert np.diff(encoded.offsets)[1] == 0
    assert np.diff(encoded.offsets)[0] == np.diff(encoded.offsets)[2] > 0


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
    (b"{", None, "not a tokenizer_config"), (b"{}", b"{% for %}", "not valid Jinja"), (b"{}", b"\xff", "not a tok"),
    (b'{"chat_template": [{"name": "rag", "template": "x"}]}', None, "no chat template")])
def test_read_template_refuses_missing_and_invalid_templates(config, source, message):
    with pytest.raises(InputError, match=message):
        read_template(config, source, where="here")


def test_a_template_file_overrides_the_configuration():
    config = b'{"chat_template": [{"name": "default", "template": "d"}], "bos_token": {"content": "<s>"}}'
    assert json.loads(read_template(config, None, where="")) == {"template": "d", "tokens": {"bos_token": "<s>"}}
    assert json.loads(read_template(config, b"f", where=""))["template"] == "f"


def test_other_tokenizers_have_no_chat_templates(encoder):
    import base64

    from tests.unit.shards.test_tokenizer import CL100K

    ranks = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        encode(load(ranks, CL100K), template(encoder, CHATML), [[{"role": "user", "content": "a"}]])


def test_a_conversation_whose_text_was_edited_is_refused(encoder):
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
        encoded, refused = encode(own_encoder, own, conversations)
        assert not refused
        expected = known.apply_chat_template(conversations, tokenize=True, return_dict=True)["input_ids"]
        assert encoded.tokens.tolist() == [token for ids in expected for token in ids], path.name
        for messages, first, last in zip(conversations, encoded.offsets, encoded.offsets[1:], strict=False):
            ids = encoded.tokens[first:last][encoded.loss_mask[first:last] == 1].tolist()
            assert own_encoder.with_control_tokens.decode(ids, skip_special_tokens=False) == "".join(
                message["content"] + "<|end|>" for message in messages if message["role"] == "assistant")
