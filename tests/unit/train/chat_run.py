"""A small chat set, made by the pipeline's own functions, and a run on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.data.stages.test_pack import packed
from tests.unit.data.tokenize.test_chat import SPECIAL
from tests.unit.train.helpers import config
from tidewheel.data.stage import Published
from tidewheel.data.tokenize.tokenizer import train_bpe
from tidewheel.train.config import TrainConfig

TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' "
            "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
WORDS = ["harbour", "lantern", "meadow", "river", "window", "garden", "copper", "violet", "market", "winter"]


def chats(count: int) -> list[list[dict[str, Any]]]:
    """Return conversations of two turns."""
    return [[{"role": "user", "content": f"ask {number}"}, {"role": "assistant", "content": WORDS[number % 10]}]
            for number in range(count)]


def write_chats(folder: Path, messages: list[list[dict[str, Any]]], pack: dict[str, Any] | None = None,
                **tokenize: Any) -> list[Published]:
    """Write a shard set of conversations to folder/out/shards and folder/out/validation; return the units of `pack`.

    Args:
        folder: empty, or not there.
        messages: the conversations.
        pack: settings of the step.
        tokenize: settings of the step.
    """
    (folder / "in").mkdir(parents=True, exist_ok=True)
    texts = ["\n\n".join(message["content"] for message in chat) for chat in messages]
    (folder / "in" / "tokenizer.json").write_bytes(train_bpe(texts, 300, SPECIAL))
    (folder / "in" / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": "<|bos|>", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}))
    return packed(folder, {"file": "tokenizer.json", **tokenize}, pack or {}, kind="chat", texts=texts,
                  metas=[json.dumps({"messages": chat}) for chat in messages])


def chat_config(folder: Path, run: str, *overrides: str) -> TrainConfig:
    """Return a configuration of 2 steps over the set of `write_chats`."""
    return config(folder, run, f"data.uri={folder}/out/shards", "data.validation=''", "steps=2",
                  "evaluation.sample_tokens=0", *overrides)
