"""DAPO: GRPO with a higher upper bound and one average over all tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidewheel.train.policy.objective import SURROGATE, PolicyObjective
from tidewheel.versions import Version


class DAPO(PolicyObjective):
    """DAPO (https://arxiv.org/abs/2503.14476): clipping from 0.8 to 1.28, and a mean over all tokens of the step. Its
    other two parts are settings of the rollouts: `rollouts.resample` and `rollouts.overlong`."""

    VERSION = Version("objective_dapo", uses=(SURROGATE,))

    average: Literal["sequences", "tokens", "constant"] = "tokens"
    epsilon_high: float = Field(default=0.28, gt=0)
