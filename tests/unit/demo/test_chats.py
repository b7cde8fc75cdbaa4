"""Tests of the data of `tidewheel demo --posttrain`."""

from __future__ import annotations

import json
from pathlib import Path

from tidewheel import storage
from tidewheel.data.tokenize.chat_template import ChatTemplate, read_template
from tidewheel.demo import chats


def test_conversations_pairs_and_prompts(tmp_path: Path):
    def records(key: str) -> list[dict]:
        return [json.loads(line) for line in (tmp_path / key).read_text().splitlines()]

    count = chats.write_chats(storage.store(tmp_path), b"{}", "<|end|>")
    talks, pairs, prompts = (records(key) for key in (chats.CHATS, chats.PAIRS, chats.PROMPTS))
    assert len(talks) == len(pairs) == count == len(chats.MODULES) * len(chats.QUESTIONS)
    better = {pair["prompt"]: pair["chosen"] for pair in pairs}
    short = sum(talk["completion"] == better[talk["prompt"]] for talk in talks)
    assert short == count / 2
    assert all(len(pair["chosen"]) < len(pair["rejected"]) / 3 for pair in pairs)
    asked = {prompt["messages"][0]["content"] for prompt in prompts}
    assert not asked & better.keys(), "nobody has seen the questions of validation"
    values = read_template((tmp_path / "tokenizer_config.json").read_bytes(),
                           (tmp_path / "chat_template.jinja").read_bytes(), where="test")
    template = ChatTemplate(values, ("<|end|>",))
    assert template.turn_token() == "<|end|>"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rendered = template.rendered(messages)
    assert rendered.text == "Question: a\nAnswer: b<|end|>"
    assert [rendered.text[start:end] for start, end in rendered.spans] == [" b<|end|>"]
