"""The tokens of one answer, of which another side may write some: where turns end, and what follows them.

All answers of a group get one token at a time, sampled or written by the other side. So their rows stay at one
position, whatever the lengths of their turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

TURN_BITS = 20
"""A place is the turn, and the index of the token in the turn in this many bits."""


class Partner(Protocol):
    """The other side of the conversations of a group."""

    turn_tokens: int
    """Most tokens of a turn; 0: no limit."""

    def opening(self, answer: int) -> Sequence[int]:
        """Return the tokens that follow the prompt.

        Args:
            answer: index of the conversation.
        """
        ...

    def ends(self, turn: Sequence[int]) -> bool:
        """Return whether the tokens of a turn end it."""
        ...

    def reply(self, answer: int, turn: Sequence[int]) -> Sequence[int] | None:
        """Return the tokens that follow a turn; None if the conversation is over.

        Args:
            answer: index of the conversation.
            turn: its newest turn, without a stop token.
        """
        ...


class Conversation:
    """One answer that is being made.

    Args:
        answer: its index, for the partner.
        stop: tokens that end a turn.
        most: most tokens of the answer.
        partner: the other side; None if the first turn is the whole answer.
    """

    def __init__(self, answer: int, stop: Collection[int], most: int, partner: Partner | None) -> None:
        self._answer, self._stop, self.most, self._partner = answer, stop, most, partner
        self.tokens: list[int] = []
        self.values: list[float] = []
        """Log-probability of each token; 0 for those of the partner."""
        self.written: set[int] = set()
        """Indices of the tokens that the partner wrote."""
        self.begin = 0
        """Index of the first token of the newest turn."""
        self.stopped = False
        """Whether the answer came to its end, by a stop token or by the partner."""
        self.over = False
        """Whether it gets no more tokens."""
        self._turn = 0
        self._queue: deque[int] = deque()
        if partner is not None:
            self._follow(partner.opening(answer))

    @property
    def next_written(self) -> int | None:
        """Return the next token if it is the partner's; None if it is to be sampled."""
        return self._queue[0] if self._queue else None

    @property
    def num_written(self) -> int:
        """Return how many of the next tokens are the partner's."""
        return len(self._queue)

    @property
    def place(self) -> int:
        """Return the turn and the index in it of the next token, as one number."""
        return (self._turn << TURN_BITS) + len(self.tokens) - self.begin

    def write(self) -> None:
        """Append the next token of the partner."""
        self.written.add(len(self.tokens))
        self._append(self._queue.popleft(), 0.0)
        self.begin = len(self.tokens)

    def add(self, token: int, value: float) -> None:
        """Append a sampled token.

        Args:
            token: the token.
            value: its log-probability.
        """
        self._append(token, value)
        ends = token in self._stop
        if self._partner is None:
            self.stopped = ends
            self.over |= ends
            return
        turn = self.tokens[self.begin:]
        if ends or self._partner.ends(turn) or len(turn) == self._partner.turn_tokens:
            reply = self._partner.reply(self._answer, turn[:-1] if ends else turn)
            if reply is None:
                self.stopped = self.over = True
            else:
                self._follow(reply)

    def _append(self, token: int, value: float) -> None:
        self.tokens.append(token)
        self.values.append(value)
        self.over = len(self.tokens) >= self.most

    def _follow(self, reply: Sequence[int]) -> None:
        """Begin the next turn behind a reply; end the answer if there is no room for one."""
        if len(self.tokens) + len(reply) >= self.most:
            self.over = True
            return
        self._queue.extend(reply)
        if self.tokens:
            self._turn += 1
            self.begin = len(self.tokens)
