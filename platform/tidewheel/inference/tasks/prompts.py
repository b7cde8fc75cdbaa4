"""Prompts of items: description, examples and the item, as text or as messages of a chat template.

The texts are those of lm-evaluation-harness 0.4.13 for the same task, seed and template.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tidewheel.errors import InputError
from tidewheel.inference.tasks.templates import Document

SEED = 1234
"""Default seed of the examples, as in lm-evaluation-harness."""
RenderChat = Callable[[Sequence[dict[str, str]]], str]
"""From messages to the text of a chat template, with the beginning of the assistant's turn."""


@dataclass(frozen=True)
class Turn:
    """A part of a prompt.

    Args:
        role: who says it, in a chat.
        content: what is said.
        after: what follows it in plain text.
    """

    role: str
    content: str
    after: str = ""


@dataclass(frozen=True)
class Delimiters:
    """What stands between the parts of a prompt; see `TaskConfig`."""

    target: str
    fewshot: str


def spaced(left: bool, right: bool) -> bool:
    """Return whether two texts need something between them: neither has white space where they meet."""
    return not (left or right)


def joined(prefix: str | None, text: str | None, between: str) -> str:
    """Return two texts with `between` in the middle, unless one is empty or has white space where they meet.

    Args:
        prefix: the first text.
        text: the second text.
        between: what stands between them.
    """
    if not prefix or not text:
        return prefix or text or ""
    return prefix + (between if spaced(prefix[-1].isspace(), text[0].isspace()) else "") + text


def turns(question: str, answer: str | None, prefix: str | None, delimiters: Delimiters) -> list[Turn]:
    """Return the turns of one example, or of the item.

    Args:
        question: what the user says.
        answer: of an example; None or "" for the item, whose answer is the model's.
        prefix: beginning of the answer.
        delimiters: what stands between the parts.
    """
    has_answer = bool(answer)
    after = delimiters.target if has_answer and not prefix else ""
    if prefix and question and spaced(question[-1].isspace(), prefix[0].isspace()):
        after = delimiters.target
    said = [Turn("user", question, after)]
    if has_answer:
        said.append(Turn("assistant", joined(prefix, answer, " "), delimiters.fewshot))
    elif prefix:
        said.append(Turn("assistant", prefix))
    return said


def rendered(said: Sequence[Turn], chat: RenderChat | None) -> str:
    """Return the text of turns, plain or by a chat template."""
    if chat is None:
        return "".join(turn.content + turn.after for turn in said)
    return chat([{"role": turn.role, "content": turn.content} for turn in said])


class Examples:
    """Draws the examples of each item.

    Items take their draws from one generator, one after another, so an item's examples depend on the items before it.

    Args:
        pool: the examples that there are.
        count: of an item.
        first: take the first ones, and draw nothing.
        seed: of the draws.
        where: for error messages.

    Raises:
        InputError: the pool is too small.
    """

    def __init__(self, pool: Sequence[Document], count: int, *, first: bool, seed: int, where: str) -> None:
        self._pool, self._count, self._first, self._where = list(pool), count, first, where
        self._random = random.Random(seed)
        if count and len(self._pool) < count:
            raise self._too_few(len(self._pool))

    def draw(self, item: Document | None) -> list[Document]:
        """Return the examples of the next item.

        Args:
            item: an item that must not be its own example; None if the examples are of another split.

        Raises:
            InputError: too few examples differ from the item.
        """
        if not self._count:
            return []
        if self._first or item is None:
            others = self._pool if item is None else [other for other in self._pool if other != item]
            if len(others) < self._count:
                raise self._too_few(len(others))
            return others[:self._count] if self._first else self._random.sample(others, self._count)
        if len(self._pool) <= self._count:
            raise self._too_few(len(self._pool) - 1)
        drawn = [other for other in self._random.sample(self._pool, self._count + 1) if other != item]
        if len(drawn) < self._count:  # the pool holds copies of the item
            others = [other for other in self._pool if other != item]
            if len(others) < self._count:
                raise self._too_few(len(others))
            drawn = self._random.sample(others, self._count)
        return drawn[:self._count]

    def _too_few(self, available: int) -> InputError:
        return InputError(f"{self._count} examples are asked for, but there are {available}", where=self._where,
                          fix="lower num_fewshot, or add items to the split of the examples")


def answer_text(answer: Any, choices: Sequence[str] | None, where: str) -> str:
    """Return the answer of an example as text: an index stands for its choice, a list for its first answer.

    Args:
        answer: the target of the example.
        choices: of the example; None: its answer is a text.
        where: for error messages.

    Raises:
        InputError: the index is out of range.
    """
    if choices is not None and isinstance(answer, int):
        if not 0 <= answer < len(choices):
            raise InputError(f"the target {answer} of an example is out of range: there are {len(choices)} choices",
                             where=where, fix="count from 0, and correct the item")
        return choices[answer]
    if isinstance(answer, list):
        answer = answer[0] if answer else ""
    if not isinstance(answer, str):
        raise InputError(f"the answer of an example is {answer!r}, not a text", where=where,
                         fix="give doc_to_choice, or a target that is a text")
    return answer
