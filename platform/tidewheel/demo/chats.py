"""Conversations and preferences about modules of Python's standard library, for `tidewheel demo --posttrain`.

Half of the conversations have a short answer and half a long one, so that a model that is tuned on them gives either.
The pairs prefer the short one. The prompts of validation ask in words that no conversation has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tidewheel.storage import Store

MODULES = {
    "bisect": "keeps a list sorted", "calendar": "prints months and years", "glob": "finds files by their names",
    "heapq": "finds the smallest item", "logging": "writes messages to a log", "math": "computes sines and roots",
    "queue": "passes items between threads", "random": "draws random numbers", "shutil": "copies and removes files",
    "socket": "talks over the network", "statistics": "computes means", "zipfile": "reads and writes archives"}
"""What each module does; the short answer is "NAME does it."."""
QUESTIONS = ("What does {} do?", "What is {} for?", "Tell me about {}.", "Explain the module {}.",
             "Why would I import {}?", "Describe {} in a sentence.", "How can {} help me?", "Do you know {}?",
             "I found import {} in a file. What is that?", "When is {} the right module?")
ASKED = "Please say what {} is good for."
"""The question of validation."""
LONG = ("Thank you for this question. The module {} is a part of Python. It {}. There is more to say about it, and the "
        "documentation has many examples.")
TEMPLATE = """{%- for message in messages %}
    {%- if message.role == 'user' %}{{- 'Question: ' + message.content + '\\nAnswer:' }}
    {%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}
{%- endfor %}"""
"""Chat template without special tokens of its own, because the tokenizer of the demo has none."""
CHATS, PAIRS, PROMPTS = "chat/chats.jsonl", "preferences/pairs.jsonl", "prompts.jsonl"
NUM_PROMPTS = 6


def write_chats(store: Store, tokenizer: bytes, eos_token: str) -> int:
    """Write conversations, pairs, prompts, the tokenizer and its chat template; return the number of conversations.

    Args:
        store: where to write.
        tokenizer: the base model's tokenizer.json.
        eos_token: its token that ends a document, which also ends a turn.
    """
    chats = list(_chats())
    _write(store, CHATS, chats)
    _write(store, PAIRS, list(_pairs()))
    asked = [{"messages": [{"role": "user", "content": ASKED.format(name)}]} for name in list(MODULES)[:NUM_PROMPTS]]
    _write(store, PROMPTS, asked)
    store.write("tokenizer.json", tokenizer)
    store.write_json("tokenizer_config.json", {"eos_token": eos_token})
    store.write("chat_template.jinja", TEMPLATE.encode())
    return len(chats)


def _answers(name: str) -> tuple[str, str]:
    """Return the short and the long answer about a module."""
    return f"{name} {MODULES[name]}.", LONG.format(name, MODULES[name])


def _chats() -> Iterator[dict[str, Any]]:
    for index, name in enumerate(MODULES):
        for number, question in enumerate(QUESTIONS):
            yield {"prompt": question.format(name), "completion": _answers(name)[(index + number) % 2]}


def _pairs() -> Iterator[dict[str, Any]]:
    for name in MODULES:
        short, long = _answers(name)
        for question in QUESTIONS:
            yield {"prompt": question.format(name), "chosen": short, "rejected": long}


def _write(store: Store, key: str, records: Sequence[dict[str, Any]]) -> None:
    store.write(key, "".join(json.dumps(record) + "\n" for record in records).encode())
