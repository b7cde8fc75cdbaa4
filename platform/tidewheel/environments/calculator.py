"""A calculator that the policy calls in its answer: `<calc>12*7</calc>` is followed by the result."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from tidewheel.environments.episode.base import Environment, Reply, Task
from tidewheel.rewards.scoring.expressions import shown, value_of
from tidewheel.versions import Version


class Calculator(Environment):
    """Answer each call with its result. A turn without a call is the policy's last one, which the reward judges."""

    VERSION: ClassVar[Version | None] = Version("environment_calculator")

    begin: str = Field(default="<calc>", min_length=1)
    """What stands before an expression."""
    end: str = Field(default="</calc>", min_length=1)
    """What stands behind it, and ends the turn."""
    result: str = "={}\n"
    """The reply, with the result in the place of {}."""
    error: str = "error"
    """The result of what is no expression of numbers, + - * / and parentheses."""

    def ends(self) -> tuple[str, ...]:
        """Return what stands behind an expression."""
        return (self.end,)

    def reset(self, task: Task) -> tuple[Any, str]:
        """Begin without a text."""
        return None, ""

    def step(self, state: Any, text: str) -> Reply:
        """Compute the last call of a turn."""
        before, end, _ = text.rpartition(self.end)
        _, begin, expression = before.rpartition(self.begin)
        if not end or not begin:
            return Reply(done=True)
        value = value_of(expression)
        return Reply(self.result.replace("{}", self.error if value is None else shown(value)))
