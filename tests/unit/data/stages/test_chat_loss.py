"""Which tokens of packed conversations are learnt."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.tokenize.test_chat import CHATML, MARKED, encoder, template, tokenizer
from tests.unit.train.chat_run import chats, write_chats
from tidewheel.data.tokenize.chat import encode
from tidewheel.errors import InputError
from tidewheel.shards.reader import ShardSet
from tidewheel.shards.tokenizer import of_manifest
from tidewheel.storage import store

__all__ = ["encoder", "tokenizer"]
CHAT = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "bad", "weight": 0},
        {"role": "user", "content": "again"}, {"role": "assistant", "content": "good"}]


def learnt(folder: Path, chat: list[dict[str, Any]], **tokenize: Any) -> set[str]:
    """Pack six conversations like `chat`, and return the texts that are learnt of each."""
    chats = [[{**chat[0], "content": f"{chat[0]['content']} {'abcdef'[number]}"}, *chat[1:]] for number in range(6)]
    write_chats(folder, chats, {"method": "one_per_row", "sequence_length": 128}, **tokenize)
    found: set[str] = set()
    for name in ("shards", "validation"):
        uri = str(folder / "out" / name)
        shards = ShardSet.open(uri)
        decode = of_manifest(store(uri), shards.manifest.tokenizer).with_control_tokens.decode
        for index in range(len(shards.manifest.shards)):
            for row in shards.shard(index).batch.to_pylist():
                ids = [token for token, mask in zip(row["tokens"], row["loss_mask"]) if mask]
                found.add(decode(ids, skip_special_tokens=False))
    return found


def test_a_message_of_weight_0_is_not_learnt(tmp_path: Path):
    assert learnt(tmp_path, CHAT) == {"good<|im_end|>"}


@pytest.mark.parametrize(("loss", "expected"), [
    ("assistant", "first<|im_end|>good<|im_end|>"), ("last_turn", "good<|im_end|>"),
    ("all", "<|bos|><|im_start|>user\nask <|im_end|>\n<|im_start|>assistant\nfirst<|im_end|>\n<|im_start|>user\n"
            "again<|im_end|>\n<|im_start|>assistant\ngood<|im_end|>\n")])
def test_the_loss_is_on_what_the_setting_says(tmp_path: Path, loss: str, expected: str):
    chat = [CHAT[0], {"role": "assistant", "content": "first"}, *CHAT[2:]]
    found = learnt(tmp_path, chat, loss=loss)
    assert {re.sub("ask [a-f]", "ask ", text) for text in found} == {expected}


def test_a_weight_of_0_leaves_out_the_whole_message_where_all_is_learnt(tmp_path: Path):
    found = learnt(tmp_path, [*CHAT[:2], {**CHAT[2], "weight": 0}, CHAT[3]], loss="all")
    assert {re.sub("ask [a-f]", "ask ", text) for text in found} == {
        "<|bos|><|im_start|>user\nask <|im_end|>\n<|im_start|>assistant\ngood<|im_end|>\n"}


def test_last_turn_counts_every_answer_after_the_users_last_message(encoder):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "old"},
            {"role": "user", "content": "b"}, {"role": "assistant", "content": "call"},
            {"role": "tool", "content": "result"}, {"role": "assistant", "content": "new"}]
    for source in (CHATML, MARKED):
        found, refused = encode(encoder, template(encoder, source), [chat], loss="last_turn")
        assert not refused
        text = encoder.with_control_tokens.decode(found.tokens[found.loss_mask == 1].tolist(),
                                                  skip_special_tokens=False)
        assert text == "call<|im_end|>new<|im_end|>"


def test_a_conversation_without_a_learnt_token_is_dropped_with_its_reason(tmp_path: Path):
    silent = MARKED.replace("{{ m.content + '<|im_end|>' }}", "{{ '' if m.content == 'hush' else m.content }}")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "own.jinja").write_text(silent)
    units = write_chats(tmp_path, [*chats(4), [{"role": "user", "content": "ask"},
                                              {"role": "assistant", "content": "hush"}]], chat_template="own.jinja")
    assert sum((Counter(unit.summary["dropped"]) for unit in units), Counter()) == {"nothing_learnt": 1}


@pytest.mark.parametrize("source", [
    CHATML.replace("m['content']", "(m['content'] if m['role'] == 'user' else '')"),
    MARKED.replace("{% generation %}{{ m.content + '<|im_end|>' }}", "{{ m.content }}{% generation %}")],
    ids=["leaves the answer out", "marks nothing"])
def test_a_template_that_trains_on_no_token_is_refused(tmp_path: Path, source: str):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "own.jinja").write_text(source)
    with pytest.raises(InputError, match=r"nothing that the assistant says(.|\n)*own.jinja|own.jinja: nothing that"):
        write_chats(tmp_path, chats(4), chat_template="own.jinja")
    if "{% generation" in source:
        write_chats(tmp_path, chats(4), chat_template="own.jinja", loss="all")
