"""REINFORCE++: the clipped loss with returns that are normalised over the whole step."""

from __future__ import annotations

from typing import Literal

from tidewheel.train.policy.objective import SURROGATE, PolicyObjective
from tidewheel.versions import Version


class Reinforce(PolicyObjective):
    """REINFORCE++ (https://arxiv.org/abs/2501.03262): PPO's clipped loss with a mean over all tokens. Its advantages
    are returns from each token on, normalised over the tokens of the step: `rollouts.advantage: batch`."""

    VERSION = Version("objective_reinforce", uses=(SURROGATE,))

    average: Literal["sequences", "tokens", "constant"] = "tokens"
