"""`Environment`, the base of all environments: a part that talks to the policy while an answer is sampled.

    class Echo(tw.Environment):
        "Repeat what the policy writes; 1 for a turn of three letters."

        def reset(self, task):
            return None, ""  # the state of this answer, and the text behind the prompt

        def step(self, state, text):
            return tw.Reply(text, reward=float(len(text) == 3), done=len(text) > 8)

The policy's tokens stay as they were sampled. A reply is tokenised once and put behind them; its tokens are not learnt.
The built-in environments are the modules of `tidewheel.environments`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from tidewheel.config import recipe_hash
from tidewheel.parts import Part
from tidewheel.versions import Version

OWN = Version("own_environments")
"""Version of how environments from outside the package are applied. Keys also contain the environment's source."""


@dataclass(frozen=True)
class Task:
    """What an answer begins with.

    Args:
        prompt: what the policy was asked.
        reference: for judging; None if there is none.
        seed: below 2^64, from the run's seed and the prompt's position: the same for all answers to the prompt.
        sample: index of the answer in its group.
    """

    prompt: str
    reference: str | None
    seed: int
    sample: int


@dataclass(frozen=True)
class Reply:
    """What an environment does after a turn of the policy.

    Args:
        text: put behind the policy's tokens, unless the answer ends here.
        reward: for this turn; the rewards of all turns are added up.
        done: whether the answer ends here.
        failure: why the turn cannot be judged, a short name to count by. The answer's group is then dropped: a failure
            is never a reward.
    """

    text: str = ""
    reward: float = 0.0
    done: bool = False
    failure: str = ""


class Environment(Part):
    """Base of an environment: its fields are its settings."""

    DETERMINISTIC: ClassVar[bool] = True
    """Whether replies follow from the task and the policy's turns alone. If not, a lost rollout that is made again is
    another one, and `tidewheel audit` cannot check replies."""

    turns: int = Field(default=8, ge=1)
    """Most turns of the policy in an answer."""
    turn_tokens: int = Field(default=0, ge=0)
    """Most tokens of a turn, which then ends; 0: as many as the answer has left."""

    def ends(self) -> tuple[str, ...]:
        """Return the texts that end a turn, as the end token does."""
        return ()

    def reset(self, task: Task) -> tuple[Any, str]:
        """Begin an answer.

        Returns:
            A state that belongs to this answer alone, and the text that follows the prompt, which may be empty.
        """
        raise NotImplementedError

    def step(self, state: Any, text: str) -> Reply:
        """Take a turn of the policy.

        Args:
            state: from `reset`; it may be changed.
            text: of the turn, without the end token. A turn that the limit on the answer's tokens cuts off is not
                taken.
        """
        raise NotImplementedError

    def key(self) -> str:
        """Return the hash that equal replies have in common: of the name, version, settings and own source."""
        version = self.VERSION or OWN
        return recipe_hash({"environment": self.decisive(), "versions": version.numbers()})
