"""A game of several turns: find a number by guesses."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from pydantic import Field

from tidewheel.environments.episode.base import Environment, Reply, Task
from tidewheel.versions import Version

_NUMBER = re.compile(r"-?[0-9]{1,18}")


class GuessNumber(Environment):
    """1 for the right number, and nothing else; after a wrong guess the policy is told the direction. All answers to a
    prompt look for the same number."""

    VERSION: ClassVar[Version | None] = Version("environment_guess_number")

    highest: int = Field(default=9, ge=1, le=10**15)
    """The number is between 0 and this. A prompt's reference is the number, if there is one."""
    turn_end: str = "\n"
    """Ends a guess, as the end token does."""
    low: str = "higher\n"
    """The reply to a guess that is too low."""
    high: str = "lower\n"
    """The reply to a guess that is too high."""
    none: str = "?\n"
    """The reply to what is no number."""

    def ends(self) -> tuple[str, ...]:
        """Return what ends a guess."""
        return (self.turn_end,) if self.turn_end else ()

    def reset(self, task: Task) -> tuple[Any, str]:
        """Choose the number."""
        if task.reference is not None and _NUMBER.fullmatch(task.reference.strip()):
            return int(task.reference), ""
        return task.seed % (self.highest + 1), ""

    def step(self, state: Any, text: str) -> Reply:
        """Compare a guess."""
        guess = text.strip()
        if not _NUMBER.fullmatch(guess):
            return Reply(self.none)
        if int(guess) == state:
            return Reply(reward=1.0, done=True)
        return Reply(self.low if int(guess) < state else self.high)
