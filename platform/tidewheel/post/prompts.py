"""The prompts of a run: read once, checked, and put in an order that depends on the seed alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidewheel import storage
from tidewheel.errors import InputError
from tidewheel.shards.order import Order, hash64
from tidewheel.shards.tokenizer import Encoder
from tidewheel.shards.tokenizer.huggingface import HuggingFace
from tidewheel.storage import content_hash
from tidewheel.train.config import TrainConfig

SHOWN = 5
"""Records that an error names."""
BLOCK = 1024
"""Positions whose prompts are found together: of one alone, most of the time is that of calls."""
_KEYS = ("prompt", "reference", "id")
_SALT = 0x50524F4D
"""Tells the order of prompts from that of shards."""


@dataclass(frozen=True)
class Prompt:
    """What the policy is asked."""

    id: str
    """Unique in its file."""
    text: str
    reference: str | None
    """For the reward; None if there is none."""
    tokens: tuple[int, ...]


class Prompts:
    """The prompts of a file, in the order of a run: each once per epoch.

    Args:
        prompts: of the file, at least one.
        hash: of the file's content.
        seed: of the order.
    """

    def __init__(self, prompts: list[Prompt], hash: str, seed: int) -> None:
        self.prompts, self.hash = prompts, hash
        self._order = Order([len(prompts)], hash64(seed ^ _SALT))
        self._rows: tuple[int, list[int]] = (0, [])  # of the block of positions that was asked for last

    def at(self, position: int) -> Prompt:
        """Return the prompt at a position, which counts through all epochs from 0."""
        first, rows = self._rows
        if not first <= position < first + len(rows):
            first = position - position % BLOCK
            rows = self._order.locate(np.arange(first, first + BLOCK))[1].tolist()
            self._rows = first, rows
        return self.prompts[rows[position - first]]

    def epoch(self, position: int) -> int:
        """Return the epoch of a position."""
        return position // len(self.prompts)


def prompts_of(config: TrainConfig, encoder: Encoder) -> Prompts:
    """Return the prompts of a run; see `read_prompts`."""
    rollouts = config.rollouts
    assert rollouts is not None
    longest = rollouts.sequence_length or config.model.max_sequence_length
    return read_prompts(rollouts.prompts, encoder, room=longest - rollouts.answer_tokens, seed=rollouts.seed,
                        special_tokens=rollouts.special_tokens)


def read_prompts(uri: str, encoder: Encoder, *, room: int, seed: int, special_tokens: bool) -> Prompts:
    """Return the prompts of a JSONL file.

    Args:
        uri: the file.
        encoder: tokenizer of the policy.
        room: most tokens of a prompt.
        seed: of the order.
        special_tokens: encode special tokens that prompts spell out as such.

    Raises:
        InputError: there is no such file, or a record is no prompt, is too long, or has the id of another.
    """
    folder, key = storage.split(uri)
    try:
        data = folder.read(key)
    except FileNotFoundError:
        raise InputError("there is no such file", where=uri, fix="set rollouts.prompts to a JSONL file of prompts"
                         ) from None
    problems: list[str] = []
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        prompt, problem = _parsed(line, encoder, room, special_tokens)
        if prompt is not None and prompt.id in prompts:
            problem = f"has the id {prompt.id[:40]!r} of an earlier line"
        if problem:
            problems.append(f"line {number} {problem}")
        elif prompt is not None:
            prompts[prompt.id] = prompt
    if problems:
        more = f" and {len(problems) - SHOWN:,} more" if len(problems) > SHOWN else ""
        raise InputError("; ".join(problems[:SHOWN]) + more, where=uri,
                         fix='each line is {"prompt": text}, with "reference" and "id" if there are any; leave out or '
                             "shorten the named ones")
    if not prompts:
        raise InputError("the file has no prompt", where=uri, fix='write a line {"prompt": text} for each')
    return Prompts(list(prompts.values()), content_hash(data), seed)


def _parsed(line: bytes, encoder: Encoder, room: int, special_tokens: bool) -> tuple[Prompt | None, str]:
    """Return the prompt of a line, or what is wrong with it."""
    try:
        values: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None, "is not JSON"
    if not isinstance(values, dict) or not isinstance(values.get("prompt"), str) or not values["prompt"]:
        return None, 'has no text under "prompt"'
    unknown = [key for key in values if key not in _KEYS]
    if unknown:
        return None, f"has the unknown key {unknown[0][:40]!r}, allowed are {', '.join(_KEYS)}"
    reference = values.get("reference")
    if reference is not None and not isinstance(reference, str | int | float):
        return None, 'has a "reference" that is neither text nor a number'
    text = values["prompt"]
    name = str(values.get("id") or content_hash(json.dumps([text, reference]).encode())[:24])
    tokens = encoded(text, encoder, special_tokens)
    if not 1 <= len(tokens) <= room:
        return None, f"has {len(tokens):,} tokens, allowed are 1 to {room:,}"
    return Prompt(name, text, None if reference is None else str(reference), tokens), ""


def encoded(text: str, encoder: Encoder, special_tokens: bool) -> tuple[int, ...]:
    """Return the tokens of a prompt, or of an environment's text.

    Args:
        text: the text.
        encoder: the tokenizer.
        special_tokens: encode special tokens that the text spells out as such.
    """
    if special_tokens and isinstance(encoder, HuggingFace):
        return tuple(encoder.with_control_tokens.encode(text, add_special_tokens=False).ids)
    return tuple(encoder.encode_plain([text])[0].tolist())
