"""What a task asks a model, and what the model answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class LogLikelihood:
    """How likely is a continuation of a context?

    Args:
        context: text before it; "": the beginning of a document.
        continuation: the text.
    """

    context: str
    continuation: str


@dataclass(frozen=True)
class Rolling:
    """How likely is a whole text, from the beginning of a document?"""

    text: str


@dataclass(frozen=True)
class Generate:
    """Continue a prompt.

    Args:
        prompt: the text before.
        stops: strings that end the new text, which does not hold them.
        tokens: maximum number of new tokens.
        temperature: of the draws; 0: take the most likely token.
        top_k: see `inference.generate.stream`.
        top_p: see `inference.generate.stream`.
        seed: of the draws.
    """

    prompt: str
    stops: tuple[str, ...] = ()
    tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


Request = LogLikelihood | Rolling | Generate


@dataclass(frozen=True)
class Likelihood:
    """An answer to `LogLikelihood` or `Rolling`.

    Args:
        log_likelihood: natural logarithm of the probability, summed over the tokens.
        greedy: whether each token is the most likely one.
        tokens: number of tokens that were predicted.
    """

    log_likelihood: float
    greedy: bool
    tokens: int = 0


Answer = Likelihood | str


class Scorer(Protocol):
    """A model that answers requests."""

    def identity(self) -> dict[str, Any]:
        """Return what its answers depend on, JSON values."""

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        """Return the text of the model's chat template for messages, with the beginning of the assistant's turn."""

    def answers(self, requests: Sequence[Request], *, chat: bool = False) -> list[Answer]:
        """Return the answers to requests, in their order.

        Args:
            requests: of any kinds.
            chat: their contexts are the text of the chat template.
        """


@dataclass(frozen=True)
class Item:
    """One item of a task, ready to be asked.

    Args:
        index: in its split, from 0.
        requests: what the model is asked.
        gold: the right answer: an index, a list of them, or texts.
        choices: texts of the choices.
    """

    index: int
    requests: tuple[Request, ...]
    gold: Any = None
    choices: tuple[str, ...] = field(default=())
